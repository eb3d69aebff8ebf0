"""The code blocks of docs/traces.md run, and its reader works."""

import re
from pathlib import Path

import pytest

from dsim.errors import InputError
from traces import read_trace, shipped_traces

DOCS = Path(__file__).parents[2] / "docs" / "traces.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", DOCS.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def run(block):
    namespace = {"__name__": "docs_traces"}
    exec(compile(block, str(DOCS), "exec"), namespace)
    return namespace


@pytest.fixture(scope="module")
def key_value():
    (block,) = [block for block in BLOCKS if "class KeyValueFormat" in block]
    return run(block)["KeyValueFormat"]()


@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_run(block):
    assert run(block)


def test_the_csv_format_of_the_docs_reads(tmp_path):
    (block,) = [block for block in BLOCKS if "MYLOG" in block]
    path = tmp_path / "log.csv"
    path.write_text("user,t,in_tokens,out_tokens\na,3,10,1\nb,5.5,20,2\n")
    trace = read_trace(path, format=run(block)["MYLOG"])
    assert trace.arrival_s.tolist() == [0.0, 2.5]
    assert trace.output_tokens.tolist() == [1, 2]
    assert "mylog" in trace.source


def test_the_reader_of_the_docs_reads(key_value, tmp_path):
    path = tmp_path / "log.txt"
    path.write_text("at=0.25 in=512 out=64\nat=1.5 in=7 out=1\n")
    trace = read_trace(path, format=key_value)
    assert trace.arrival_s.tolist() == [0.0, 1.25]
    assert trace.prompt_tokens.tolist() == [512, 7]
    assert trace.output_tokens.tolist() == [64, 1]


@pytest.mark.parametrize(
    ("line", "field", "text"),
    [
        ("at=2 in=x out=1", "in", "got 'x', expected a number"),
        ("at=2 out=1", "in", "expected a number"),
        ("at=2 in=1 out=0", "out", "an integer from 1"),
        ("at=2 in=1.5 out=1", "in", "an integer from 1"),
        ("at=2 in=nan out=1", "in", "an integer from 1"),
        ("at=inf in=1 out=1", "at", "finite"),
        ("at=0 in=1 out=1", "at", "time goes backwards"),
    ],
)
def test_the_reader_of_the_docs_gets_all_checks(key_value, tmp_path, line, field, text):
    path = tmp_path / "log.txt"
    path.write_text(f"at=0.25 in=512 out=64\n{line}\n")
    with pytest.raises(InputError, match=text) as caught:
        read_trace(path, format=key_value)
    assert (caught.value.file, caught.value.line, caught.value.field) == (str(path), 2, field)


def test_its_header_is_asked_for(key_value, tmp_path):
    path = tmp_path / "log.txt"
    path.write_text("at=0.25 in=512\n")
    with pytest.raises(InputError, match="column 'out' is missing"):
        read_trace(path, format=key_value)


def test_the_table_of_shipped_traces_is_true():
    text = DOCS.read_text(encoding="utf-8")
    for name in shipped_traces():
        trace = read_trace(name)
        (line,) = [line for line in text.splitlines() if line.startswith(f"| `{name}`")]
        for value in (
            f"{len(trace):,}",
            f"{trace.duration_s:,.1f} s",
            f"{trace.mean_rate:.2f} /s",
            f"{trace.prompt_tokens.mean():,.1f} / {trace.output_tokens.mean():,.1f}",
        ):
            assert value in line
