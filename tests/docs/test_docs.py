"""The user-facing pages: their code runs, their tables are complete and true, their links lead somewhere."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import tomllib
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args

import numpy as np
import pytest
from pydantic import BaseModel
from standins import ConstantCost, fixed_arrivals

from dsim import check_policy, load_policy
from dsim.drafts import (
    PRESETS,
    BankDrafts,
    BankHeader,
    DraftSource,
    SyntheticSpec,
    bank_report,
    preset_curves,
    read_bank,
)
from dsim.drafts.presets import fig6_defaults
from dsim.metrics import summarize
from dsim.policy import make_view
from dsim.scenario import Point, simulate
from dsim.schema import DEFAULT_DRAFTERS, Scenario, load_scenario, parse_scenario
from dsim.telemetry import REQUEST_COLUMNS, STEP_COLUMNS
from dsim.workload import ClosedLoop, OpenLoop
from traces import read_trace

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])


# -- reading a page --------------------------------------------------------------------------------------


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(name: str, language: str) -> list[str]:
    """The fenced code blocks of a page in that language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page(name), re.MULTILINE | re.DOTALL)


def block_with(name: str, text: str) -> str:
    """The one Python block of a page that contains `text`."""
    (found,) = [block for block in blocks(name, "python") if text in block]
    return found


def run(block: str, namespace: dict[str, Any] | None = None) -> dict[str, Any]:
    """Execute a block; returns the names it leaves behind."""
    namespace = {"__name__": "docs"} if namespace is None else namespace
    exec(compile(block, "<docs>", "exec"), namespace)
    return namespace


def run_all(name: str) -> dict[str, Any]:
    """All Python blocks of a page, one after the other, as a reader would."""
    namespace: dict[str, Any] = {"__name__": "docs"}
    for block in blocks(name, "python"):
        run(block, namespace)
    return namespace


def section(name: str, heading: str) -> str:
    """The text below a heading, up to the next one of any level."""
    return re.split(r"^#+ ", page(name).split(f"\n{heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def tables(text: str) -> list[list[list[str]]]:
    """Cells of every table in a text, header and rule left out."""
    found = re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE)
    return [[[c.strip() for c in line.strip("|").split("|")] for line in table.splitlines()[2:]] for table in found]


def rows(text: str) -> list[list[str]]:
    """Rows of the first table."""
    return tables(text)[0]


def shell_lines(text: str) -> list[str]:
    """Lines of the bash blocks of a page."""
    return "".join(re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)).splitlines()


def commands() -> list[list[str]]:
    """Every `python experiments/...` command of README and the pages, split as a shell would."""
    found = []
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for line in [*shell_lines(text), *re.findall(r"`(python experiments/[^`\n]+)`", text)]:
            if line.startswith("python experiments/"):
                found.append(shlex.split(line, comments=True)[1:])
    return found


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory and an empty bank cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DSIM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


# -- all pages -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_relative_links_lead_to_files(path):
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    for target in targets:
        there = (path.parent / target.split("#")[0]).resolve()
        assert there.is_file(), f"{path.name}: {target}"
    if path.name == "README.md":
        linked = {(path.parent / target).resolve() for target in targets}
        assert {page for page in PAGES if page.name != "README.md"} <= linked


def test_commands_parse():
    found = commands()
    scripts = {command[0] for command in found}
    assert {f"experiments/{name}.py" for name in ("pareto", "ab", "load_adaptive", "profile_report")} <= scripts
    for script, *arguments in found:
        module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
        parser = module.options() if hasattr(module, "options") else module.parser()
        options = parser.parse_args(arguments)
        if getattr(options, "overrides", None):
            load_scenario(options.scenario, options.overrides)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_make_targets_exist(path):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    text = path.read_text(encoding="utf-8")
    for target in re.findall(
        r"^`?make ([\w-]+)", "\n".join([*shell_lines(text), *re.findall(r"`make [^`]+`", text)]), re.M
    ):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


# -- README and CONTRIBUTING -----------------------------------------------------------------------------


def test_the_policy_of_the_readme_has_ten_lines_conforms_and_runs(folder):
    block = block_with("README.md", "class Mine")
    assert len([line for line in block.splitlines() if line.strip()]) == 10
    (folder / "my_policy.py").write_text(block)
    for spec in ("my_policy.py:Mine", "my_policy.py:Mine:scale=256"):
        assert {"lossless", "prices unread", "permutation", "repr"} <= set(check_policy(spec))
    # R / scale = 0.5; survivals 0.8, 0.56, 0.28 and 0.4, 0.36, 0.324.
    view = make_view([[0.8, 0.7, 0.5], [0.4, 0.9, 0.9]], verify_ms=np.ones(9))
    assert load_policy("my_policy.py:Mine:scale=4").plan(view).tolist() == [2, 0]
    run(block_with("docs/drafts.md", "write_bank("))  # writes toy.npz
    scenario = parse_scenario(
        {
            "name": "tiny",
            "drafts": {"gamma": 3},
            "drafters": {"dspark": {"bank": "toy.npz"}},
            "workload": {"trace": "azure2023-conv"},
            "load": {"users": [4], "scored_min": 12, "scored_per_user": 1},
            "arms": [
                {"name": "easy", "policy": "my_policy.py:Mine"},
                {"name": "strict", "policy": "my_policy.py:Mine:scale=5"},
            ],
        }
    )
    easy, strict = (simulate(scenario, Point(name, 0, users=4)).row for name in ("easy", "strict"))
    # R / 512 is below every survival, 4 / 5 is not.
    assert easy["verification_budget"] == 4.0
    assert 1.0 < strict["verification_budget"] < 3.0
    assert strict["acceptance_rate"] > easy["acceptance_rate"]


def test_the_readme_commands_use_the_policy_that_it_shows():
    used = [argument for command in commands() for argument in command if argument.startswith("my_policy.py:")]
    assert "my_policy.py:Mine" in used


def test_the_readme_counts_the_runs_of_the_default_scenario():
    scenario = load_scenario("decode-node")
    sizes = len(scenario.arms), len(scenario.load.users), scenario.measure.seeds
    words = "{} arms x {} loads x {} seeds, {} simulations".format(*sizes, int(np.prod(sizes)))
    assert words in page("README.md")


def test_contributing_lists_every_module():
    (layout,) = [block for block in blocks("CONTRIBUTING.md", "text") if "errors.py" in block]
    listed = set(re.findall(r"^  (\S+)", layout, re.MULTILINE))
    modules = {path.name for path in (ROOT / "dsim").glob("*.py")} - {"__init__.py"}
    packages = {f"{path.parent.name}/" for path in (ROOT / "dsim").glob("*/__init__.py")}
    assert listed == modules | packages | {"data/", "scenarios/", "recipes/"}
    for folder in re.findall(r"^(\w+/) ", layout, re.MULTILINE):
        assert (ROOT / folder).is_dir()


def test_every_script_has_its_row():
    listed = re.findall(r"^\| `(\w+\.py)` \|", page("docs/experiments.md"), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in (ROOT / "experiments").glob("[!_]*.py"))


# -- docs/scenarios.md -----------------------------------------------------------------------------------

#: Heading in docs/scenarios.md of each model of dsim.schema.
HEADINGS = {
    "Scenario": "### top level",
    "CostSection": "### `[cost]`",
    "ClusterSection": "### `[cluster]`",
    "HostSection": "### `[cluster.host]`",
    "DraftsSection": "### `[drafts]`",
    "TiltSection": "### `[drafts.tilt]`",
    "LiveSection": "### `[drafts.live]`",
    "DrafterSection": "### `[drafters.NAME]`",
    "WorkloadSection": "### `[workload]`",
    "SyntheticSection": "### `[workload.synthetic]`",
    "LoadSection": "### `[load]`",
    "MeasureSection": "### `[measure]`",
    "SloSection": "### `[slo]`",
    "ArmSection": "### `[[arms]]`",
}


def models(annotation: Any = Scenario) -> dict[str, type[BaseModel]]:
    """All section models that a scenario can hold, by name."""
    if isinstance(annotation, type) and not isinstance(annotation, UnionType) and issubclass(annotation, BaseModel):
        found = {annotation.__name__: annotation}
        for info in annotation.model_fields.values():
            found |= models(info.annotation)
        return found
    return {name: model for inner in get_args(annotation) for name, model in models(inner).items()}


def written(default: Any) -> str:
    """A default as the tables write it."""
    if default is None or isinstance(default, BaseModel | dict):
        return "-"
    return f"`{json.dumps(list(default) if isinstance(default, tuple) else default)}`"


def test_every_section_has_its_table():
    assert set(models()) == set(HEADINGS)


@pytest.mark.parametrize("name", HEADINGS)
def test_every_key_is_documented_with_its_default(name):
    model = models()[name]
    documented = {row[0].strip("`"): row for row in rows(section("docs/scenarios.md", HEADINGS[name]))}
    assert list(documented) == list(model.model_fields)
    for key, info in model.model_fields.items():
        _, kind, default, meaning = documented[key]
        assert kind
        assert meaning
        assert default == ("required" if info.is_required() else written(info.default)), key
        # What a key may be is said in words: all of them are there.
        for choice in [c for part in [info.annotation, *get_args(info.annotation)] for c in get_args(part)]:
            if isinstance(choice, str):
                assert f"`{choice}`" in meaning, (key, choice)


def test_defaults_that_are_made_elsewhere_are_true():
    text = page("docs/scenarios.md")
    spec = {field.name: field.default for field in fields(SyntheticSpec)}
    for key in ("spread", "request_share", "text_share", "autocorrelation"):
        (row,) = [row for row in rows(section("docs/scenarios.md", "### `[drafts]`")) if row[0] == f"`{key}`"]
        assert float(re.search(r"not set: ([\d.]+)", row[3])[1]) == spec[key]
    assert set(DEFAULT_DRAFTERS) == {"dspark", "dflash", "mtp", "eagle3"}
    assert "`dspark` and `dflash` (one pass a block" in text


def test_toml_blocks_are_scenarios():
    found = blocks("docs/scenarios.md", "toml")
    assert len(found) >= 3
    used = set()
    for block in found:
        raw = tomllib.loads(block)
        assert parse_scenario(raw).name == raw["name"]
        used |= set(raw)
    assert used == set(Scenario.model_fields)


@pytest.mark.parametrize("name", ["decode-node", "colocated"])
def test_shipped_arms_are_in_the_table(name):
    shipped, arms = tables(section("docs/scenarios.md", "## Shipped scenarios"))
    assert f"`{name}`" in " ".join(row[0] for row in shipped)
    table = {row[0].strip("`"): row for row in arms}
    scenario = load_scenario(name)
    assert list(table) == [arm.name for arm in scenario.arms]
    for arm in scenario.arms:
        assert table[arm.name][2] == f"`{arm.policy}`"
        assert table[arm.name][1].split(",")[0] == (arm.drafter if scenario.gamma(arm) else "-")


# -- docs/drafts.md --------------------------------------------------------------------------------------


def test_the_draft_source_of_the_page_is_one_and_keeps_its_law():
    block = block_with("docs/drafts.md", "class Geometric")
    assert len([line for line in block.split("class ", 1)[1].splitlines() if line.strip()]) <= 20
    geometric = run(block)["Geometric"]
    source = geometric(p=(0.8, 0.5), gamma=3, seed=1)
    assert isinstance(source, DraftSource)
    source.open(0, 0, 10)
    source.open(1, 1, 10)
    requests, positions = np.repeat([0, 1], 20_000), np.tile(np.arange(20_000), 2)
    confidence, accepted = source.draft(requests, positions)
    assert confidence.dtype == np.float32
    assert confidence.shape == (40_000, 3)
    for domain, p in enumerate((0.8, 0.5)):
        mean = accepted[requests == domain].mean()
        assert 1 + mean == pytest.approx((1 - p**4) / (1 - p), abs=0.03)
    # Paired: one request alone, asked later, answers the same.
    again = source.draft(np.array([1]), np.array([7]))
    assert again[1][0] == accepted[20_007]


def test_the_blocks_of_the_drafts_page_run(folder, capsys):
    found = run_all("docs/drafts.md")
    text = capsys.readouterr().out
    comments = re.findall(r"print\(.*?\)  # (\S.*)$", page("docs/drafts.md"), re.MULTILINE)
    assert comments[0] in text.splitlines()
    assert comments[2] in text.splitlines()
    bank = read_bank("toy.npz")
    report = bank_report(bank)
    for domain in ("code", "chat"):
        assert report[domain]["acceptance"] == pytest.approx([0.8] * 3, abs=0.06)
    # The cut block of the example accepts what the whole block does, as far as it reaches.
    cut, whole = found["drafts"], BankDrafts(bank, seed=7)
    for source in (cut, whole):
        source.open(0, 1, 100)
    at = np.zeros(50, dtype=np.int64), np.arange(50)
    np.testing.assert_array_equal(cut.draft(*at)[1], np.minimum(whole.draft(*at)[1], 2))
    assert found["spec"].spread == 1.5


def test_the_bank_header_and_the_generator_are_documented():
    documented = re.findall(
        r"`(\w+)`", " ".join(row[0] for row in rows(section("docs/drafts.md", "## Banks").split("header:")[1]))
    )
    assert set(documented) == {field.name for field in fields(BankHeader)}
    text = page("docs/drafts.md").split("`SyntheticSpec`:")[1].split("\n\n")[0]
    assert re.findall(r"`(\w+)`", text) == [field.name for field in fields(SyntheticSpec)]
    for name in ("spread", "request_share", "text_share", "autocorrelation", "trajectories", "length", "seed"):
        (field,) = [field for field in fields(SyntheticSpec) if field.name == name]
        assert re.search(rf"`{name}`\s+\({field.default}[ )]", text), name


def test_the_table_of_presets_is_true():
    table = rows(section("docs/drafts.md", "## Presets"))
    listed = {(row[0].split("`")[1], row[1].strip("`")): row for row in table}
    curves = {(preset, drafter): curve for preset in PRESETS for drafter, curve in preset_curves(preset).items()}
    assert set(listed) == set(curves)
    for key, curve in curves.items():
        assert int(listed[key][2]) == len(next(iter(curve.values())))
        expected = " / ".join(f"{1 + np.cumprod(values).sum():.2f}" for values in curve.values())
        assert listed[key][3] == expected
        assert list(curve) in (["code", "math", "chat"], ["mixed"])
    fig6, text = fig6_defaults(7), page("docs/drafts.md")
    assert "AUC " + ", ".join(f"{fig6['auc'][k]:.3f}" for k in (0, 2, 4, 6)) in " ".join(text.split())
    assert "ECE " + ", ".join(f"{100 * fig6['ece'][k]:.1f}" for k in (0, 2, 4, 6)) in " ".join(text.split())


# -- docs/simulation.md and docs/extending.md ------------------------------------------------------------


def test_the_blocks_of_the_simulation_page_run():
    found = run_all("docs/simulation.md")
    assert found["result"].row["cost_source"] == "measured:b300x4-dsv4-flash-0731:staircase"


def test_every_column_and_metric_is_defined():
    text = page("docs/simulation.md")
    for name in (*STEP_COLUMNS, *REQUEST_COLUMNS):
        assert f"`{name}`" in section("docs/simulation.md", "## What comes out"), name
    defined = re.findall(r"`(\w+)`", " ".join(row[0] for row in rows(section("docs/simulation.md", "### Metrics"))))
    serve = run(block_with("docs/extending.md", "def serve"))["serve"]
    source = run(block_with("docs/drafts.md", "class Geometric"))["Geometric"]()
    trace = fixed_arrivals([0.0], 10, 20)
    records = serve(ConstantCost(), source, load_policy("fixed:k=2"), trace, ClosedLoop(users=1, scored=4))
    families = {
        f"{name}_{stat}_ms": name for name in ("ttft", "tpot", "itl", "e2e") for stat in ("mean", "p50", "p90", "p99")
    }
    assert {families.get(name, name) for name in summarize(records)} == set(defined)
    assert all(f"`_{stat}_ms`" in text for stat in ("mean", "p50", "p90", "p99"))


def test_the_blocks_of_the_extending_page_run(folder, capsys):
    namespace = run(block_with("docs/drafts.md", "class Geometric"))
    for block in blocks("docs/extending.md", "python"):
        run(block, namespace)
    assert capsys.readouterr().out.splitlines()[0] == "assumed:memory-bound 6.0"
    # The file that the page writes holds the trace, and the trace has the tide.
    trace = namespace["trace"]
    back = read_trace("tide.csv")
    np.testing.assert_array_equal(back.arrival_s, trace.arrival_s)
    np.testing.assert_array_equal(back.output_tokens, trace.output_tokens)
    rising = np.sin(2 * np.pi * trace.arrival_s / 30.0) > 0
    assert 1.5 < rising.sum() / (~rising).sum() < 6.0
    assert trace.mean_rate == pytest.approx(5.0, rel=0.2)
    assert 1.0 < namespace["row"]["verification_budget"] <= 6.0


def test_the_parts_of_the_pages_work_together(folder):
    """The README's policy, the drafts page's source, the extending page's prices and arrivals, in open loop."""
    namespace = run(block_with("docs/drafts.md", "class Geometric"))
    for text in ("class MemoryBound", "class Tide", "def serve"):
        run(block_with("docs/extending.md", text), namespace)
    mine = run(block_with("README.md", "class Mine"))["Mine"]
    trace = namespace["trace"].head(60)
    load = OpenLoop(requests=60)
    serve, cost = namespace["serve"], namespace["MemoryBound"]()
    first, second = (serve(cost, namespace["Geometric"](gamma=4), mine(scale=1e9), trace, load) for _ in range(2))
    assert all(np.array_equal(first.steps[name], second.steps[name]) for name in STEP_COLUMNS)
    row = summarize(first)
    # Whole blocks of the two domains' coins, one half each by request: between the two laws.
    low, high = ((1 - p**5) / (1 - p) for p in (0.6, 0.8))
    assert low < row["accepted_length"] < high
    assert row["verification_budget"] == 5.0
    assert row["n_scored"] == 60
