"""docs/engine-files.md: its code runs, its tables are complete, its output is what the command prints."""

from __future__ import annotations

import io
import json
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

from dsim.convert import main
from dsim.convert.command import OUTPUTS
from dsim.drafts.logs import FIELDS, read_log
from dsim.engines import FORMATS
from dsim.schema import parse_scenario

PAGE = (Path(__file__).parents[2] / "docs" / "engine-files.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def table_below(heading: str) -> list[list[str]]:
    text = PAGE.split(f"\n## {heading}\n", 1)[1]
    rows = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_every_format_and_every_field_of_a_file_is_in_the_table():
    rows = {row[0].strip("`"): row for row in table_below("Formats")}
    assert set(rows) == set(OUTPUTS) - {"profile", "bank"}
    for name, kind in FORMATS.items():
        for field in getattr(kind, "FIELDS", ()):
            assert f"`{field}`" in rows[name][1], (name, field)


def test_the_fields_of_a_log_are_in_the_table():
    assert [row[0].strip("`") for row in table_below("Confidence logs")] == list(FIELDS)


def test_the_code_runs_and_what_the_ten_lines_write_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for block in blocks("python"):
        exec(compile(block, "<docs>", "exec"), namespace)
    writer = next(block for block in blocks("python") if "def log_step" in block)
    assert len([line for line in writer.splitlines() if line.strip()]) <= 10
    stream = io.StringIO()
    for step, (tokens, accepted) in enumerate([(1, 2), (4, 0), (5, 1)]):
        request = SimpleNamespace(
            id="a",
            output_tokens=tokens,
            confidences=(0.9, 0.5),
            verify_length=2,
            accepted_length=accepted,
            domain="chat",
        )
        namespace["log_step"](stream, step, [request])
    Path("log.jsonl").write_text(stream.getvalue())
    log = read_log("log.jsonl")
    assert (log.position.tolist(), log.accepted.tolist(), log.missed) == ([0, 3, 4], [2, 0, 1], 0)


def test_the_scenario_is_one():
    (block,) = blocks("toml")
    assert parse_scenario(tomllib.loads(block)).drafters["dspark"].bank == "bank.npz"


def test_the_output_shown_is_what_the_command_prints(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (shown,) = blocks("text")
    command, *lines = shown.splitlines()
    assert main(command.removeprefix("$ python -m dsim.convert ").split()) == 0
    assert capsys.readouterr().out.splitlines() == lines


def test_the_commands_of_the_page_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    curves = {"draft_curve": [[1, 0.5], [4, 1.0]], "verify_curve": [[1, 2.0], [8, 3.0]]}
    for name in ("table.json", "the-engines-own.json"):
        Path(name).write_text(json.dumps(curves))
    line = {"request": 0, "confidences": [0.5], "verified": 1, "accepted": 0}
    Path("log.jsonl").write_text("\n".join(json.dumps(line | {"position": p, "step": p}) for p in range(9)))
    (block,) = blocks("bash")
    for command in block.splitlines():
        assert main(command.split("#")[0].removeprefix("python -m dsim.convert ").split()) == 0, command
    assert "- drafts_source is 'visited:log:dspark'" in capsys.readouterr().out
