"""The hash of a run: other for whatever can change its result, the same for what cannot."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
import tomllib
import zipfile
from pathlib import Path

import pytest
from banks import recorded_bank

from dsim import identity
from dsim.drafts import write_bank
from dsim.errors import InputError
from dsim.identity import ABOVE_RUNS, UnknowableError, arm_identity, callable_identity, run_key
from dsim.probe import StepRegret
from dsim.profile import load_profile, write_profile
from dsim.scenario import Point
from dsim.schema import load_scenario
from experiments._common import windows_of

ROOT = Path(__file__).resolve().parents[1]


def key(overrides=None, *, arm="dspark", users=8, rate=None, seed=0, **options):
    scenario = load_scenario("decode-node", overrides or {})
    point = Point(arm, seed, users=None if rate else users, rate_scale=rate)
    return run_key(arm_identity(scenario, arm, open_loop=rate is not None, **options), scenario, point)


@pytest.fixture(scope="module")
def usual():
    return key()


@pytest.mark.parametrize(
    "overrides",
    [
        {"name": "another study"},
        {"measure.seeds": 50},
        {"load.users": [8, 9, 10]},
        {"load.rate_scales": [3.0]},
        {"load.window_s": 3.0},
        {"load.requests": 7},
        {"load.scored_min": 150},  # 8 users score 200 requests either way
        {"load.scored_per_user": 5, "load.scored_min": 200},
        {"arms.0.policy": "fixed:k=2"},
        {"arms.6.gamma": 5},  # as the scenario's
        {"drafters.mtp.cost_scale": 2.0},
    ],
)
def test_what_a_run_does_not_read_is_no_part_of_it(usual, overrides):
    overrides = {"load.scored_min": 200} | overrides
    if overrides.get("load.scored_min") == 150:
        overrides["load.scored_per_user"] = 25
    assert key(overrides) == key({"load.scored_min": 200})


@pytest.mark.parametrize(
    "overrides",
    [
        {"arms.6.policy": "dspark:lag=3"},
        {"arms.6.gamma": 4},
        {"drafts.gamma": 4},
        {"arms.6.drafter": "dflash"},
        {"drafters.dspark.cost_scale": 2.0},
        {"drafters.dspark.confidence": "perfect"},
        {"drafts.source": "synthetic", "drafts.spread": 1.0},
        {"drafts.tilt.alpha": [0.5]},
        {"drafts.domains": {"math": 1.0}},
        {"drafts.preset": "qwen3-4b"},
        {"cost.fit": "additive"},
        {"cost.profile": "rtx5090-qwen3-4b-dflash16"},
        {"cost.allow_extrapolation": True},
        {"cluster.replicas": 2},
        {"cluster.max_seqs": 128},
        {"cluster.host": {"base_ms": 1.0, "hidden_fraction": 0.5}},
        {"workload.trace": "azure2023-code"},
        {"workload.window_s": [0.0, 600.0]},
        {"workload.order": "trace"},
        {"load.scored_min": 201},
        {"load.think_s": 1.0},
        {"load.stagger_s": 1.0},
        {"measure.mode": "whole-run"},
        {"slo.tpot_ms": 21.0},
    ],
)
def test_whatever_a_run_reads_is_part_of_it(usual, overrides):
    assert key(overrides) != (key({"drafts.source": "synthetic"}) if "drafts.source" in overrides else usual)


def test_point_engine_and_kind_of_load_are_part_of_it(usual):
    others = [key(users=9), key(seed=1), key(rate=8.0), key(rate=4.0), key(engine="step"), key(arm="mtp1")]
    assert len({usual, *others}) == 7
    assert key(engine="compiled") == usual
    assert key({"load.requests": 7}, rate=4.0) != key(rate=4.0)
    assert key({"load.scored_min": 7}, rate=4.0) == key(rate=4.0)
    # The width of windows matters to those who look at them.
    assert key({"load.window_s": 3.0}, windows=True) != key(windows=True)


# -- files --------------------------------------------------------------------------------------------------


def pair_of_keys(tmp_path, write, overrides):
    """Keys with a file as it is, elsewhere, and with other content."""
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, folder == "c")
    return [key(overrides(tmp_path / folder)) for folder in ("a", "b", "c")]


def write_vidur(folder, other):
    rows = "".join(f"{i},{100 + i},{10 + other}\n" for i in range(300))
    (folder / "t.csv").write_text(f"arrived_at,num_prefill_tokens,num_decode_tokens\n{rows}")


def write_other_profile(folder, other):
    profile = load_profile("rtx5090-qwen3-4b-dflash16")
    path = write_profile(profile, folder / "rtx5090-qwen3-4b-dflash16.csv")
    if other:
        path.write_text(path.read_text().replace(",0\n", ",7\n", 1))


def write_note(folder, other):
    write_other_profile(folder, False)
    if other:
        toml = folder / "rtx5090-qwen3-4b-dflash16.toml"
        toml.write_text(toml.read_text() + "\n# a remark\n")


def write_one_bank(folder, other):
    write_bank(recorded_bank(7, seed=int(other)), folder / "bank.npz")


def write_curve(folder, other):
    (folder / "curve.json").write_text(f'{{"math": [0.9, 0.{8 - other}]}}')


def write_temperatures(folder, other):
    (folder / "t.json").write_text(f'{{"temperatures": [1.1, 1.{2 + other}]}}')


@pytest.mark.parametrize(
    ("write", "overrides"),
    [
        (write_vidur, lambda folder: {"workload.trace": str(folder / "t.csv")}),
        (write_other_profile, lambda folder: {"cost.profile": str(folder / "rtx5090-qwen3-4b-dflash16.csv")}),
        (write_note, lambda folder: {"cost.profile": str(folder / "rtx5090-qwen3-4b-dflash16.csv")}),
        (
            write_one_bank,
            lambda folder: (
                {"drafts.source": "recorded", "drafters.dspark.bank": str(folder / "bank.npz")}
                | {"drafters.mtp.bank": "smollm2-mtp5", "drafts.preset": None}
            ),
        ),
        (
            write_curve,
            lambda folder: {"drafts.source": "tilted", "drafters.dspark.tilt_to": str(folder / "curve.json")},
        ),
        (write_temperatures, lambda folder: {"drafters.dspark.calibration": str(folder / "t.json")}),
    ],
)
def test_a_file_counts_by_its_content_not_by_its_place(tmp_path, write, overrides):
    here, elsewhere, other = pair_of_keys(tmp_path, write, overrides)
    assert here == elsewhere
    assert here != other


POLICY = """
from dsim.policy import BasePolicy

class Mine(BasePolicy):
    def __init__(self, table=""):
        self.table = table

    def plan(self, view):
        import helper_of_mine
        return view.caps
"""


def test_a_policy_counts_with_all_that_it_imports_and_opens(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(identity, "_STARTED_NS", 2**63)
    policy, helper, table = tmp_path / "mine.py", tmp_path / "helper_of_mine.py", tmp_path / "t.json"
    policy.write_text(POLICY)
    helper.write_text("import further_of_mine as further\n")
    (tmp_path / "further_of_mine.py").write_text("X = 1\n")
    table.write_text("{}")
    overrides = {"arms.6.policy": f"{policy}:Mine:table={table}"}
    keys = [key(overrides)]
    for file, text in (
        (policy, POLICY + "\n"),
        (helper, "import further_of_mine as further  # more\n"),
        (tmp_path / "further_of_mine.py", "X = 2\n"),
        (table, '{"a": 1}'),
    ):
        file.write_text(text)
        keys.append(key(overrides))
        assert key(overrides) == keys[-1]
    assert len(set(keys)) == 5


@pytest.mark.parametrize("folder", ["tp=4", "a,b", "t12:00", "date=2024-01-01, 12:00"])
def test_a_path_may_hold_what_parts_a_specs_words(tmp_path, monkeypatch, folder):
    (tmp_path / folder).mkdir()
    (tmp_path / "there").mkdir()
    for write, options in (
        (write_other_profile, {"cost.profile": "rtx5090-qwen3-4b-dflash16.csv"}),
        (write_vidur, {"workload.trace": "t.csv"}),
        (write_one_bank, {"drafts.source": "recorded", "drafters.dspark.bank": "bank.npz", "drafts.preset": None}),
    ):
        monkeypatch.chdir(tmp_path)
        keys = []
        for place, other in ((folder, False), ("there", False), (folder, True)):
            write(tmp_path / place, other)
            keys.append(
                key({name: f"{place}/{value}" if value and "." in value else value for name, value in options.items()})
            )
        assert keys[0] == keys[1], options
        assert keys[0] != keys[2], options


def test_a_profiles_two_files_are_told_apart(tmp_path):
    for text in ("ab", "ba"):
        for name, letter in zip(("p.csv", "p.toml"), text, strict=True):
            (tmp_path / name).write_text(letter)
        if text == "ab":
            first = identity._pinned_text(str(tmp_path / "p.csv"))
    assert identity._pinned_text(str(tmp_path / "p.csv")) != first


def keys_of(policy, *edits):
    """Keys of an arm before and after each edit (file and text)."""
    keys = [key({"arms.6.policy": policy})]
    for file, text in edits:
        file.write_text(text)
        keys.append(key({"arms.6.policy": policy}))
    return keys


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder whose modules can be imported, and edited as if that had been before this process began."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(identity, "_STARTED_NS", 2**63)
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def write_policy(path, imports):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(POLICY.replace("import helper_of_mine", imports))
    return path


def test_a_parameter_that_names_a_file_counts_wherever_the_file_lies(own, monkeypatch, tmp_path_factory):
    policy = write_policy(own / "mine.py", "pass")
    here = tmp_path_factory.mktemp("here")
    monkeypatch.chdir(here)
    (here / "prices").write_text("1")
    (own / "beside").write_text("1")
    spec = f"{policy}:Mine:table="
    assert len(set(keys_of(spec + "prices", (here / "prices", "2"), (own / "prices", "3")))) == 3
    assert len(set(keys_of(spec + "beside", (own / "beside", "2")))) == 2
    assert key({"arms.6.policy": spec + "prices"}) != key({"arms.6.policy": spec + "beside"})
    # The same table at another place is the same table.
    (here / "sub").mkdir()
    (here / "sub" / "beside").write_text("2")
    assert key({"arms.6.policy": f"{spec}{here}/sub/beside"}) == key({"arms.6.policy": f"{spec}{own}/beside"})


@pytest.mark.parametrize(
    ("imports", "files"),
    [
        ("from idspace.helper import K", {"idspace/helper.py": "K"}),
        ("import idspace.deep.helper", {"idspace/deep/helper.py": "K"}),
        ("import idpk.sub", {"idpk/__init__.py": "K", "idpk/sub.py": "K"}),
        ("import idpk2.a.b", {"idpk2/__init__.py": "K", "idpk2/a/__init__.py": "K", "idpk2/a/b.py": "K"}),
        (
            "import idall",
            {"idall.py": "from idstar import *\nK", "idstar/__init__.py": "__all__ = ['sub']\nK", "idstar/sub.py": "K"},
        ),
        ('__import__("idconsts")', {"idconsts.py": "K"}),
        ('from importlib import import_module as load; load(name="idloaded")', {"idloaded.py": "K"}),
        (
            "import idrel.a",
            {"idrel/a.py": "from .b import K as L\nK", "idrel/b.py": "import importlib as i\nK", "idrel/c.py": ""},
        ),
        ("import idbroken", {"idbroken.py": "this is no Python\nK"}),
    ],
)
def test_every_local_module_that_a_policy_imports_counts(own, imports, files):
    policy = write_policy(own / "mine.py", imports)
    for name, text in files.items():
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_text(text + " = 1\n" if text.endswith("K") else text)
    edits = [(own / name, text + " = 2\n") for name, text in files.items() if text.endswith("K")]
    assert len(set(keys_of(f"{policy}:Mine", *edits))) == len(edits) + 1
    if "idrel/c.py" in files:
        (own / "idrel/b.py").write_text("import importlib as i\nK = i.import_module('.c', __package__)\n")
        identity._reached.cache_clear()
        assert len(set(keys_of(f"{policy}:Mine", (own / "idrel/c.py", "K = 3\n")))) == 2


FACTORY = """
from dsim.policy import load_policy
from {helper} import K

def make():
    return load_policy(f"fixed:k={{K}}")
"""


def test_a_factory_counts_with_its_imports(own):
    (own / "idfac").mkdir()
    for name, text in (("__init__", ""), ("consts", "K = 1\n"), ("fac", FACTORY.format(helper="idfac.consts"))):
        (own / "idfac" / f"{name}.py").write_text(text)
    (own / "idconst.py").write_text("K = 1\n")
    (own / "fac.py").write_text(FACTORY.format(helper="idconst"))
    edits = [(own / "idfac" / "consts.py", "K = 2\n"), (own / "idfac" / "__init__.py", "# more\n")]
    edits.append((own / "idfac" / "fac.py", FACTORY.format(helper="idfac.consts") + "# more\n"))
    assert len(set(keys_of("idfac.fac:make", *edits))) == 4
    edits = [(own / "idconst.py", "K = 2\n"), (own / "fac.py", FACTORY.format(helper="idconst") + "# more\n")]
    assert len(set(keys_of(f"{own}/fac.py:make", *edits))) == 3


HOLDER = """
from dsim.policy import BasePolicy, load_policy

class Holder(BasePolicy):
    __slots__ = ("first",)

    def __init__(self):
        self.first = load_policy({inner!r})
        self.more = {{"a": [load_policy({other!r}), self]}}

    def plan(self, view):
        return view.caps
"""


def test_policies_within_a_policy_count_wherever_it_keeps_them(own):
    inner, other = write_policy(own / "inner.py", "pass"), write_policy(own / "other.py", "pass")
    (own / "holder.py").write_text(HOLDER.format(inner=f"{inner}:Mine", other=f"{other}:Mine"))
    edits = [(file, POLICY.replace("import helper_of_mine", "return 1")) for file in (inner, other)]
    assert len(set(keys_of(f"{own}/holder.py:Holder", *edits))) == 3


def test_two_helpers_that_change_places_change_the_policy(own):
    policy = write_policy(own / "mine.py", "import idha, idhb")
    (own / "idha.py").write_text("K = 1\n")
    (own / "idhb.py").write_text("K = 2\n")
    before, _, after = keys_of(f"{policy}:Mine", (own / "idha.py", "K = 2\n"), (own / "idhb.py", "K = 1\n"))
    assert before != after


def test_a_policys_place_is_no_part_of_it(own, monkeypatch):
    keys = []
    for place in ("a", "b"):
        monkeypatch.syspath_prepend(str(own / place))
        policy = write_policy(own / place / "mine.py", "import idplace.helper")
        (own / place / "idplace").mkdir()
        (own / place / "idplace" / "helper.py").write_text("K = 1\n")
        keys.append(key({"arms.6.policy": f"{policy}:Mine"}))
    assert keys[0] == keys[1]
    parts = arm_identity(load_scenario("decode-node", {"arms.6.policy": f"{policy}:Mine"}), "dspark", open_loop=False)
    assert str(own) not in str(parts)


def test_code_in_an_archive_cannot_be_told(own):
    with zipfile.ZipFile(own / "lib.zip", "w") as archive:
        archive.writestr("idzipped.py", "K = 1\n")
    sys.path.insert(0, str(own / "lib.zip"))
    try:
        with pytest.raises(UnknowableError, match=r"idzipped\.py is no file of its own"):
            key({"arms.6.policy": f"{write_policy(own / 'mine.py', 'import idzipped')}:Mine"})
    finally:
        sys.path.remove(str(own / "lib.zip"))


def test_what_a_script_makes_of_a_run_counts_with_the_names_of_its_modules(own):
    (own / "idx.py").write_text("import idxa, idxb\ndef extract(result): ...\n")
    (own / "idxa.py").write_text("K = 1\n")
    (own / "idxb.py").write_text("K = 2\n")
    extract = importlib.import_module("idx").extract
    before = callable_identity(extract, "extract")
    (own / "idxa.py").write_text("K = 2\n")
    (own / "idxb.py").write_text("K = 1\n")
    assert callable_identity(extract, "extract") != before


def test_a_policy_of_the_package_does_not_count_for_the_others():
    scenario = load_scenario("decode-node")
    parts = {arm: arm_identity(scenario, arm, open_loop=False) for arm in ("dspark", "threshold")}
    assert parts["dspark"]["code"] == parts["threshold"]["code"]
    assert parts["dspark"]["policy"] != parts["threshold"]["policy"]


def test_code_that_was_written_after_it_was_read_cannot_be_told(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "fresh_of_mine.py"
    module.write_text(POLICY)
    importlib.import_module("fresh_of_mine")
    with pytest.raises(UnknowableError, match=r"fresh_of_mine\.py was written while this process was running"):
        key({"arms.6.policy": "fresh_of_mine:Mine"})
    os.utime(module, (1e9, 1e9))
    assert len(key({"arms.6.policy": "fresh_of_mine:Mine"})) == 64
    # A policy by its file's path is read again when it has changed.
    again = tmp_path / "again_of_mine.py"
    again.write_text(POLICY)
    assert len(key({"arms.6.policy": f"{again}:Mine"})) == 64


def test_functions_count_by_name_and_source(tmp_path, monkeypatch):
    assert callable_identity(None, "extract") == ""
    assert callable_identity(windows_of, "extract") != callable_identity(StepRegret, "extract")
    for given in (lambda _: 1, print, StepRegret().step):
        with pytest.raises(InputError, match="field 'extract': cannot be told from others by its name"):
            callable_identity(given, "extract")


# -- the code -----------------------------------------------------------------------------------------------


def test_what_is_left_out_of_the_code_is_what_no_run_may_import():
    """The import contracts' layers above `dsim.scenario`, and live drafting."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = next(c["layers"] for c in config["contracts"] if c["name"] == "imports point one way")
    above = []
    for layer in layers:
        names = [name.strip() for name in layer.split("|")]
        if "dsim.scenario" in names:
            above += [name for name in names if name != "dsim.scenario"]
            break
        above += names
    packages = {name.removeprefix("dsim.") for name in above if name.startswith("dsim.")}
    assert packages | {"drafter"} == set(ABOVE_RUNS)


def test_no_run_imports_what_is_left_out():
    code = """
        import sys
        from dsim.scenario import Point, load_scenario, simulate
        scenario = load_scenario("decode-node", {"load.scored_min": 12, "load.scored_per_user": 2})
        for engine in ("step", "auto"):
            simulate(scenario, Point("dspark", 0, users=2), engine=engine)
        print(*(name for name in sys.modules if name.startswith("dsim.")))
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True, timeout=120
    )
    loaded = {name.split(".")[1] for name in ran.stdout.split()}
    assert "scenario" in loaded
    assert not loaded & set(ABOVE_RUNS)
