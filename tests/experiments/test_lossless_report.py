"""experiments/lossless.py on a few cases: the table, the exit code, files, bad input."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest

from dsim.errors import InputError
from dsim.lossless import CONTROLS
from dsim.policy import BUILTIN_POLICIES
from experiments import lossless

LIAR = """
import numpy as np
from dsim.policy import BasePolicy, Traits

class Liar(BasePolicy):
    traits = Traits(cost_driven=False)

    def plan(self, view):
        return np.minimum(view.caps, view.gamma * (view.confidence[:, -1] >= 0.5))
"""


@pytest.fixture
def few(monkeypatch):
    """Few controls, and a short search for the smallest counterexample."""
    monkeypatch.setattr(lossless, "CONTROLS", {"peek": CONTROLS["peek"]})
    monkeypatch.setattr(lossless, "TRIES", 4)


def table(out):
    return pd.read_csv(out / "lossless.csv").set_index("policy")


def test_the_table_and_the_counterexamples(few, tmp_path, capsys):
    specs = ["dspark-alg1", "dspark:lag=0", "fixed:k=1"]
    assert lossless.main(["--policies", *specs, "--cases", "60", "--jobs", "1", "--out", str(tmp_path)]) == 0
    found = table(tmp_path)
    assert list(found.index) == [*specs, "control:peek"]
    assert found["verdict"].tolist() == ["none found", "lossy, as declared", "none found", "lossy, as declared"]
    assert found["claims_lossless"].tolist() == [True, False, True, False]
    assert found.loc["dspark-alg1", ["cases", "caught", "tv_max"]].tolist() == [60, 0, 0.0]
    assert found.loc["dspark-alg1", "tv_max_exact"] == "0"
    assert found.loc["dspark-alg1", "leak_rate_below"] == pytest.approx(1 - 0.05 ** (1 / 60))
    assert found.loc["fixed:k=1", "adapted_share"] == 0 < found.loc["dspark-alg1", "adapted_share"]
    # With confidences of the drafts themselves an early stop is no help; a fixed length does not mind.
    assert found.loc["dspark-alg1", "own_token_caught"] > 0 == found.loc["fixed:k=1", "own_token_caught"]
    lossy = found.loc["dspark:lag=0"]
    assert lossy["tv_max"] > 0
    assert (lossy["smallest_requests"], lossy["smallest_gamma"]) == (1, 2)
    text = (tmp_path / "counterexamples.md").read_text()
    assert "total variation distance 3/20 = 0.15" in text  # Appendix A
    assert "## dspark:lag=0" in text
    assert "## dspark-alg1" not in text
    assert {file.name for file in tmp_path.iterdir()} == {
        "counterexamples.md",
        "lossless.csv",
        "lossless.png",
        "lossless.svg",
    }
    assert "total variation 3/20" in capsys.readouterr().out


def test_a_refuted_claim_is_an_error(few, tmp_path, capsys):
    (tmp_path / "liar.py").write_text(LIAR)
    spec = f"{tmp_path / 'liar.py'}:Liar"
    out = tmp_path / "out"
    assert lossless.main(["--policies", spec, "--cases", "30", "--jobs", "1", "--out", str(out)]) == 1
    assert table(out).loc[spec, "verdict"] == "REFUTED"
    assert f"REFUTED: {spec} claims to be lossless" in capsys.readouterr().out
    # One is enough: it is not tried to the end.
    assert table(out).loc[spec, "caught"] >= 1


def test_the_bytes_do_not_depend_on_the_processes(few, tmp_path, monkeypatch):
    monkeypatch.setattr(lossless, "ROUND", 10)
    monkeypatch.setattr(lossless, "ENOUGH", 3)
    for jobs in ("1", "2"):
        command = ["--policies", "none", "oracle", "--cases", "25", "--jobs", jobs, "--out", str(tmp_path / jobs)]
        assert lossless.main(command) == 0
    for name in ("lossless.csv", "counterexamples.md", "lossless.png", "lossless.svg"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes(), name
    # Caught three times in the first ten cases, the oracle is spared the others.
    assert table(tmp_path / "1").loc["oracle", "cases"] == 10


def test_every_built_in_policy_is_audited():
    names = {spec.split(":")[0] for spec in lossless.builtin_specs()}
    assert names == set(BUILTIN_POLICIES)
    assert set(lossless.VARIANTS) <= set(BUILTIN_POLICIES)
    for spec in lossless.builtin_specs():
        assert lossless.policy_of(spec).traits.needs_gamma <= 3, spec


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policies", "fixed:k=5"], "blocks of at most 3 drafts (this one needs 5)"),
        (["--policies", "none", "none"], "each policy once"),
        (["--policies", "nothing"], "unknown policy 'nothing'"),
    ],
)
def test_bad_policies(options, message, tmp_path):
    with pytest.raises(InputError) as error:
        lossless.main([*options, "--cases", "1", "--jobs", "1", "--out", str(tmp_path / "out")])
    assert message in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [["--cases", "0"], ["--jobs", "-1"], ["--seed", "-1"], ["--seed", "x"]])
def test_bad_options(options, tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        lossless.main([*options, "--out", str(tmp_path / "out")])
    assert error.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_help_documents_every_option(capsys):
    with pytest.raises(SystemExit):
        lossless.main(["--help"])
    shown = capsys.readouterr().out
    for option in ("--policies", "--cases", "--seed", "--jobs", "--quick", "--out"):
        assert option in shown


# -- docs/lossless.md ---------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "lossless.md").read_text(encoding="utf-8")


def test_the_page_lists_every_policy_and_control():
    listed = set(re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE))
    assert {*lossless.builtin_specs(), *CONTROLS} <= listed
    for spec in lossless.builtin_specs():
        claims = "yes" if lossless.policy_of(spec).traits.lossless else "no"
        assert f"| `{spec}` | {claims} |" in PAGE, spec


def test_the_code_of_the_page_prints_what_it_says(capsys):
    namespace = {"__name__": "docs"}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        exec(compile(block, "<docs>", "exec"), namespace)
    lines = capsys.readouterr().out.splitlines()
    said = re.findall(r"^print\(.*\)  # (\S+)$", PAGE, re.MULTILINE)
    assert lines[:2] + lines[-2:] == said == ["3/20", "0", "11/20", "0"]


def test_the_page_defines_every_column(few, tmp_path):
    lossless.main(["--policies", "none", "--cases", "1", "--jobs", "1", "--out", str(tmp_path)])
    section = PAGE.split("## Columns of `lossless.csv`")[1]
    documented = re.findall(r"`([a-z_]+)`", "".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)))
    assert documented == list(pd.read_csv(tmp_path / "lossless.csv").columns)
