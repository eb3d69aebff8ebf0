"""docs/policies.md: its policy runs and conforms, its tables are complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dsim import check_policy
from dsim.conformance import RULES
from dsim.errors import InputError
from dsim.policy import BUILTIN_POLICIES, load_policy, make_view

TEXT = (Path(__file__).parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (block,) = [block for block in BLOCKS if "class StepBudget" in block]
    (tmp_path / "mine.py").write_text(block)
    monkeypatch.chdir(tmp_path)
    return block


def test_the_example_conforms_as_it_is_called_there(mine, capsys):
    (call,) = [block for block in BLOCKS if "check_policy(" in block]
    exec(call, {})
    assert "'lossless'" in capsys.readouterr().out
    for gamma in (1, 5, 16):
        applied = check_policy("mine.py:StepBudget", gamma=gamma)
        assert {"flat cost", "infinite cost", "repr", "lossless"} <= set(applied)


def test_the_example_does_what_it_says(mine):
    policy = load_policy("mine.py:StepBudget:factor=1.2")
    # 10 ms bare, 1 ms a draft: two drafts fit into 12 ms.
    view = make_view([[0.9, 0.8], [0.7, 0.6]], [0, 9, 10, 11, 12, 13, 14])
    assert policy.plan(view).tolist() == [2, 0]
    with pytest.raises(InputError, match="expected a number >= 1"):
        load_policy("mine.py:StepBudget:factor=0.5")


def test_the_example_is_short(mine):
    assert len([line for line in mine.splitlines() if line.strip()]) <= 20


def test_all_built_in_policies_and_rules_are_listed():
    for name in BUILTIN_POLICIES:
        assert re.search(rf"^\| `{name}[:`]", TEXT, re.MULTILINE), name
    listed = re.search(r"^\| rule \|.*?\n\n", TEXT, re.MULTILINE | re.DOTALL)[0]
    for rule in RULES:
        assert rule in listed, rule


def test_specs_in_the_table_load():
    for spec in re.findall(r"^\| `([^`]+)` \|", TEXT, re.MULTILINE):
        load_policy(spec)
