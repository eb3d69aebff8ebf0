from __future__ import annotations

import pytest

from dsim.errors import InputError
from dsim.schema import load_scenario, parse_override, parse_scenario, scenario_path

SMALL = """\
name = "small"

[workload]
trace = "azure2023-conv"

[load]
users = [1, 4]

[[arms]]
name = "one"
policy = "none"
gamma = 0

[[arms]]
name = "two"
policy = "fixed:k=2"
drafter = "dspark"
"""


def written(tmp_path, text):
    path = tmp_path / "s.toml"
    path.write_text(text)
    return path


def test_defaults_and_canonical_round_trip(tmp_path):
    scenario = load_scenario(written(tmp_path, SMALL))
    assert scenario.cost.profile == "b300x4-dsv4-flash-0731"
    assert scenario.load.users == (1, 4)
    assert scenario.gamma(scenario.arm("two")) == 5
    assert scenario.scored(100) == 400
    assert parse_scenario(scenario.canonical()) == scenario


@pytest.mark.parametrize("name", ["decode-node", "colocated"])
def test_shipped_scenarios_are_valid_and_complete(name):
    scenario = load_scenario(name)
    assert [arm.name for arm in scenario.arms] == [
        "none",
        "mtp1",
        "mtp5",
        "fixed5",
        "threshold",
        "dspark-alg1",
        "dspark",
        "oracle",
    ]
    assert scenario.load.users == (1, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256)
    assert scenario.measure.seeds == 5
    assert (scenario.cluster.prefill == "colocated") == (name == "colocated")


@pytest.mark.parametrize(
    ("old", "new", "line", "field", "message"),
    [
        ("users = [1, 4]", "usrs = [1, 4]", 7, "load.usrs", "unknown key, got .*expected one of users, think_s"),
        ("users = [1, 4]", "users = [1, 0]", 7, "load.users.1", "got 0, expected greater than or equal to 1"),
        ("users = [1, 4]", "users = []", 7, "load.users", "at least 1"),
        ("users = [1, 4]", 'users = ["1"]', 7, "load.users.0", "valid integer"),
        ("users = [1, 4]", "think_s = nan", 7, "load.think_s", "finite"),
        ("users = [1, 4]", "think_s = -1.0", 7, "load.think_s", "greater than or equal to 0"),
        ('drafter = "dspark"', 'draftr = "dspark"', 17, "arms.1.draftr", "unknown key"),
        ('policy = "none"', "gamma2 = 0", 11, "arms.0.gamma2|arms.0.policy", "unknown key|key is missing"),
        ("gamma = 0", "gamma = -1", 12, "arms.0.gamma", "greater than or equal to 0"),
        ("[load]", "[laod]", 6, "laod", "unknown key, .*expected one of name, cost"),
        ('trace = "azure2023-conv"', 'order = "trace"', 3, "workload", "a trace is missing"),
        ('drafter = "dspark"', 'drafter = "medusa"', None, None, "no drafter 'medusa', expected one of dspark"),
        ('name = "two"', 'name = "one"', None, None, "two arms are called 'one'"),
        ("users = [1, 4]", "users = [1, 4", 7, None, "is not TOML"),
    ],
)
def test_mistakes_name_file_line_and_field(tmp_path, old, new, line, field, message):
    path = written(tmp_path, SMALL.replace(old, new))
    with pytest.raises(InputError, match=message) as caught:
        load_scenario(path)
    assert caught.value.file == str(path)
    assert caught.value.field in (None if field is None else field.split("|"), field, *(field or "").split("|"))
    if line is not None:
        # An unclosed array is noticed at the next line.
        assert caught.value.line in (line, line + 2) if field is None else caught.value.line is not None
        if field is not None and "|" not in field:
            assert caught.value.line == line


@pytest.mark.parametrize(
    ("synthetic", "message"),
    [
        ('arrivals = "poisson"\ncv = 2.0', "'cv' is not used by"),
        ('arrivals = "gamma"', "'cv' is missing for"),
        ('lengths = "fixed"\nsigma = 1.0', "'sigma' is not used by"),
        ('lengths = "empirical"', "'prompt_mean' is not used by"),
    ],
)
def test_idle_options_of_a_synthetic_workload_are_errors(tmp_path, synthetic, message):
    means = "prompt_mean = 10.0\noutput_mean = 10.0\n"
    sigma = "" if "sigma" in synthetic or "fixed" in synthetic else "sigma = 1.0\n"
    text = SMALL.replace('trace = "azure2023-conv"', f"[workload.synthetic]\n{means}{sigma}{synthetic}")
    with pytest.raises(InputError, match=message):
        load_scenario(written(tmp_path, text))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"cluster.router": "least-tokens"}, "'router' is not used by one replica"),
        ({"cluster.prefill_chunk": 512}, "'prefill_chunk' is not used by prefill = 'disaggregated'"),
        ({"cluster.admit_ahead": True}, "'admit_ahead' is not used by prefill = 'disaggregated'"),
        (
            {
                "cluster.admit_ahead": True,
                "cluster.prefill": "colocated",
                "cluster.scheduling": "synchronous",
                "cluster.host.base_ms": 1.0,
            },
            "'admit_ahead' is not used by scheduling = 'synchronous'",
        ),
        ({"cluster.scheduling": "synchronous"}, "changes nothing where there is no host time"),
        (
            {"cluster.scheduling": "synchronous", "cluster.host.base_ms": 1.0, "cluster.host.hidden_fraction": 0.5},
            "'host.hidden_fraction' is not used by scheduling = 'synchronous'",
        ),
        ({"cluster.host.base_ms": 1.0}, "'host.hidden_fraction' is missing"),
        ({"load.users": [4, 4]}, "'load.users' holds a value twice"),
        ({"cluster.host.power": 0.5}, "'power' is not used by per_request_ms = 0"),
        ({"cluster.host.hidden_fraction": 0.5}, "'hidden_fraction' is not used"),
        ({"measure.mode": "whole-run", "load.stagger_s": 1.0}, "'load.stagger_s' is not used by"),
        ({"measure.mode": "whole-run", "load.warmup_per_user": 3}, "'load.warmup_per_user' is not used by"),
        ({"load.warmup_per_user": 2}, "discards at least 3"),
        (
            {"drafts.source": "synthetic", "drafts.auc": [0.8], "drafters.dspark.bank": "x.npz"},
            "'drafts.auc' shapes synthetic drafts; every drafter has a bank",
        ),
        ({"drafts.source": "tilted", "drafts.auc": [0.8]}, "'auc' shapes synthetic drafts; .* source = 'tilted'"),
        ({"drafts.source": "recorded", "drafts.spread": 1.0}, "'spread' shapes synthetic .* source = 'recorded'"),
        ({"drafts.source": "recorded", "drafts.preset": "dsv4"}, "'preset' is not used by source = 'recorded'"),
        (
            {"drafts.source": "synthetic", "drafters.dspark.tilt_to": "dsv4"},
            "'drafters.dspark.tilt_to' is not used by drafts.source = 'synthetic'",
        ),
        (
            {"drafts.source": "recorded", "drafters.mtp.tilt_to": "dsv4"},
            "'drafters.mtp.tilt_to' is not used by drafts.source = 'recorded'",
        ),
    ],
)
def test_options_that_would_change_nothing_are_errors(tmp_path, overrides, message):
    with pytest.raises(InputError, match=message):
        load_scenario(written(tmp_path, SMALL), overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"drafts.source": "guessed"}, r"field 'drafts.source': got 'guessed', expected 'recorded', 'tilted'"),
        (
            {"drafts.source": "tilted", "arms.1.drafter": "mine", "drafters.mine": {"tilt_to": "dsv4:mtp"}},
            r"drafter 'mine' has no bank: 'drafters.mine.bank' is missing for 'tilted'",
        ),
        (
            {"drafts.source": "recorded", "arms.1.drafter": "mine", "drafters.mine": {}},
            r"drafter 'mine' has no bank: 'drafters.mine.bank' is missing for 'recorded'",
        ),
        (
            {"drafters.dspark.calibration": "offline"},
            r"drafters.dspark.calibration.*got 'offline', expected one of bank, none, online, or a .json file",
        ),
        (
            {"drafts.source": "tilted", "drafters.mtp.tilt_to": {"code": [0.5, 1.0]}},
            r"'drafters.mtp.tilt_to': field 'curve.code': got \(0.5, 1.0\), expected a list of numbers strictly",
        ),
        ({"drafts.source": "tilted", "drafters.mtp.tilt_to": {"code": []}}, r"curve.code': got \(\), expected a list"),
        ({"drafts.source": "tilted", "drafters.mtp.tilt_to": {}}, "an acceptance curve for each domain"),
        ({"drafts.source": "tilted", "drafters.mtp.tilt_to": 3}, r"'drafters.mtp.tilt_to': got 3, expected PRESET, "),
    ],
)
def test_where_drafts_come_from_is_checked(tmp_path, overrides, message):
    with pytest.raises(InputError, match=message):
        load_scenario(written(tmp_path, SMALL), overrides)


@pytest.mark.parametrize("source", ["recorded", "tilted", "synthetic"])
def test_scenarios_survive_the_round_trip_with_every_source(tmp_path, source):
    overrides = {"drafts.source": source, "drafters.mtp.calibration": "online"}
    if source == "tilted":
        overrides |= {"drafters.mtp.tilt_to": {"code": [0.5], "chat": [0.4]}, "drafters.dspark.tilt_to": "dsv4:mtp"}
    scenario = load_scenario(written(tmp_path, SMALL), overrides)
    assert scenario.drafts.source == source
    assert parse_scenario(scenario.canonical()) == scenario


def test_drafters_add_to_the_built_in_ones(tmp_path):
    scenario = load_scenario(written(tmp_path, SMALL), {"drafters.mine": {"bank": "x.npz"}})
    assert set(scenario.drafters) == {"dspark", "dflash", "mtp", "eagle3", "mine"}


def test_overrides_change_nested_keys_and_lists(tmp_path):
    path = written(tmp_path, SMALL)
    scenario = load_scenario(path, {"load.users": [2], "cost.fit": "roofline", "arms.1.gamma": 3})
    assert scenario.load.users == (2,)
    assert scenario.cost.fit == "roofline"
    assert scenario.gamma(scenario.arm("two")) == 3
    with pytest.raises(InputError, match=r"field 'arms\.7\.gamma': got '7', expected an index below 2"):
        load_scenario(path, {"arms.7.gamma": 3})
    with pytest.raises(InputError, match="'name' is a value, not a section"):
        load_scenario(path, {"name.x": 3})
    with pytest.raises(InputError, match="unknown key"):
        load_scenario(path, {"load.speed": 3})


def test_override_text():
    assert parse_override("load.users=[1, 2]") == ("load.users", [1, 2])
    assert parse_override("drafts.preset = qwen3-4b") == ("drafts.preset", "qwen3-4b")
    assert parse_override("arms.0.gamma=3") == ("arms.0.gamma", 3)
    assert parse_override("measure.seeds=3\nload.users=[1]") == ("measure.seeds", "3\nload.users=[1]")
    for bad in ("", "=1", "a", "a b=1", "a="):
        with pytest.raises(InputError, match="KEY=VALUE"):
            parse_override(bad)


def test_files_are_found_beside_the_scenario(tmp_path):
    (tmp_path / "mine.py").write_text("")
    text = SMALL.replace('"fixed:k=2"', '"mine.py:Mine:k=2"')
    for name in ("b.npz", "c.json", "t.json", "smollm2-dspark"):
        (tmp_path / name).write_text("")
    keys = {"bank": "b.npz", "tilt_to": "c.json", "calibration": "t.json"}
    overrides = {"drafts.source": "tilted", "drafters.mine": keys, "drafters.mtp.bank": "smollm2-dspark"}
    scenario = load_scenario(written(tmp_path, text), overrides)
    assert scenario.drafters["mine"].model_dump(include=set(keys)) == {
        key: str((tmp_path / name).resolve()) for key, name in keys.items()
    }
    assert scenario.drafters["mtp"].bank == "smollm2-dspark"  # a name, whatever lies there
    assert scenario.arm("two").policy == f"{(tmp_path / 'mine.py').resolve()}:Mine:k=2"


def test_an_engines_table_is_found_beside_the_scenario(tmp_path, monkeypatch):
    folder = tmp_path / "study"
    folder.mkdir()
    (folder / "sps.json").write_text("{}")
    table = (folder / "sps.json").resolve()
    for spec, expected in (
        ("sglang:table=sps.json", f"sglang:table={table}"),
        ("sglang:lag=1,table=sps.json,fill=true", f"sglang:lag=1,table={table},fill=true"),
        ("mine.py:Mine:table=sps.json", f"mine.py:Mine:table={table}"),
        ("sglang:table=additive", "sglang:table=additive"),
        ("sglang:table=none.json", "sglang:table=none.json"),
        ("trtllm:retable=sps.json", "trtllm:retable=sps.json"),
    ):
        scenario = load_scenario(written(folder, SMALL.replace('"fixed:k=2"', f'"{spec}"')))
        assert scenario.arm("two").policy == expected
    # A folder whose name would break the spec: the table is found from there only.
    odd = tmp_path / "a,b"
    odd.mkdir()
    (odd / "sps.json").write_text("{}")
    monkeypatch.chdir(odd)
    scenario = load_scenario(written(odd, SMALL.replace('"fixed:k=2"', '"sglang:table=sps.json"')))
    assert scenario.arm("two").policy == "sglang:table=sps.json"


def test_unknown_scenarios_list_the_shipped_ones():
    with pytest.raises(InputError, match="colocated, decode-node"):
        scenario_path("nowhere")
    with pytest.raises(InputError, match=r"unknown arm.*expected one of none, mtp1"):
        load_scenario("decode-node").arm("mtp9")
