"""One run of a scenario: identity, determinism, pairing, bad inputs."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
from banks import recorded_bank, write_shipped

from dsim import scenario as runs
from dsim.drafts import preset_curves, preset_spec, synthetic_bank, write_bank, write_temperatures
from dsim.errors import InputError
from dsim.scenario import Point, check_scenario, simulate, trace_of
from dsim.schema import load_scenario, scenario_path
from dsim.workload import RequestStream
from traces import read_trace, trace_file

SMALL = {"load.scored_min": 30, "load.scored_per_user": 2, "load.requests": 60, "drafts.source": "synthetic"}


@pytest.fixture(scope="module")
def scenario():
    return load_scenario("decode-node", SMALL)


def bytes_of(result):
    return b"".join(
        column.tobytes() for part in (result.records.steps, result.records.requests) for column in part.values()
    )


def test_same_seed_same_bytes_and_another_seed_other_bytes(scenario):
    point = Point("dspark", 3, users=8)
    first, second = simulate(scenario, point), simulate(scenario, point)
    assert bytes_of(first) == bytes_of(second)
    assert first.row == second.row
    assert bytes_of(simulate(scenario, Point("dspark", 4, users=8))) != bytes_of(first)


def test_no_drafts_is_no_speculation_byte_for_byte():
    overrides = SMALL | {"arms.3.gamma": 0, "arms.3.policy": "fixed:k=0"}
    scenario = load_scenario("decode-node", overrides)
    none, fixed = simulate(scenario, Point("none", 0, users=8)), simulate(scenario, Point("fixed5", 0, users=8))
    assert bytes_of(none) == bytes_of(fixed)
    rows = [{k: repr(v) for k, v in run.row.items() if k not in ("arm", "policy")} for run in (none, fixed)]
    assert rows[0] == rows[1]


def test_requests_are_the_same_in_every_arm_and_load(scenario):
    one = simulate(scenario, Point("dspark", 1, users=4)).records.requests
    two = simulate(scenario, Point("mtp1", 1, users=16)).records.requests
    n = min(len(one["domain"]), len(two["domain"]))
    for name in ("prompt_tokens", "output_tokens", "domain"):
        np.testing.assert_array_equal(one[name][:n], two[name][:n])
    assert len(set(one["domain"])) == 3


def test_rows_say_where_the_numbers_come_from(scenario):
    row = simulate(scenario, Point("mtp5", 0, users=4)).row
    assert row["cost_source"] == "measured:b300x4-dsv4-flash-0731:staircase;draft=5x0.333:assumed"
    assert row["drafts_source"] == "synthetic:dsv4:mtp"
    assert row["trace_source"] == "recorded:azure2023-conv"
    assert row["extrapolated"] is False
    assert row["n_scored"] == 30
    assert simulate(scenario, Point("none", 0, users=4)).row["drafts_source"] == "none"


def test_mtp_pays_a_third_of_a_pass_a_token(scenario):
    """Draft times by hand: measured 1 request 0.8829 ms; MTP-5 takes five passes of a third."""
    steps = simulate(scenario, Point("mtp5", 0, users=1)).records.steps
    alone = (steps["requests"] == 1) & (steps["drafts"] == 5)
    # Six tokens run at the captured size of 8.
    assert set(steps["step_ns"][alone].tolist()) == {round(0.8829e6 * 5 / 3) + 5_345_100}


def test_open_loop_replays_the_traces_own_gaps():
    scenario = load_scenario("colocated", SMALL | {"workload.order": "trace", "measure.mode": "whole-run"})
    result = simulate(scenario, Point("dspark", 0, rate_scale=2.0))
    arrivals = result.records.requests["arrival_ns"]
    # Second row of the trace: 18:15:50.9951690 against 18:15:46.6805900, twice as fast.
    assert arrivals[1] == round(4.314579e9 / 2)
    assert result.row["n_scored"] == 60
    assert result.row["rate_scale"] == 2.0


def test_open_loop_offsets_differ_by_seed_and_edges_are_not_scored():
    scenario = load_scenario("colocated", SMALL)
    one = simulate(scenario, Point("dspark", 0, rate_scale=2.0)).records
    two = simulate(scenario, Point("dspark", 1, rate_scale=2.0)).records
    assert one.requests["prompt_tokens"].tolist() != two.requests["prompt_tokens"].tolist()
    assert one.scored == (6, 54)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"cost.profile": "a100"}, "a100"),
        ({"cost.fit": "roofline", "cost.running_max": False}, "running_max"),
        ({"workload.trace": "azure1999"}, "azure2023-conv"),
        ({"drafts.preset": "gpt"}, "expected one of dsv4"),
        ({"drafts.gamma": 9}, r"holds blocks of 5.*got 9, expected 1 to 5"),
        ({"drafts.domains": {"poetry": 1.0}}, r"drafts.domains.poetry.*expected one of code, math, chat"),
        ({"drafts.domains": {"code": 0.0}}, r"sum > 0"),
        ({"drafts.auc": [0.99]}, "cannot be reached"),
        ({"arms.6.policy": "fixed:k=7"}, r"arm 'dspark': policy 'fixed:k=7' needs blocks of at least 7.*got 5"),
        ({"arms.6.policy": "dspark:lagg=2"}, "no parameter 'lagg'"),
        ({"arms.6.policy": "dsparc"}, "unknown policy 'dsparc'"),
        ({"drafters.dspark.bank": "nowhere.npz"}, "bank not found"),
        ({"cluster.token_budget": 100}, "token_budget"),
        ({"drafts.tilt": {"alpha": [1.0, 2.0]}}, "tilt.alpha"),
        ({"workload.window_s": [5.0, 1.0]}, "window"),
        (
            {"load.stagger_s": 1000.0},
            r"stagger_s.*the first scored request comes at .* the last of 2 users",
        ),
        ({"drafts.domains": {"code": 1e308, "chat": 1e308}}, "drafts.domains.code"),
    ],
)
def test_bad_inputs_are_one_clear_error(overrides, message):
    def attempt():
        scenario = load_scenario("decode-node", SMALL | overrides)
        check_scenario(scenario, ["dspark"])
        simulate(scenario, Point("dspark", 0, users=2))

    with pytest.raises(InputError, match=message):
        attempt()


@pytest.mark.parametrize(
    ("window", "message"),
    [
        ([0.0, 9e5], r"the window ends after trace '{name}', got \[0.0, 900000.0\], expected at most 3\d+\.\d+"),
        ([5.0, 1.0], r"got \[5.0, 1.0\], expected 0 <= start_s < end_s"),
        ([0.00001, 0.00002], r"the window holds no request of trace '{name}', got \[1e-05, 2e-05\]"),
    ],
)
def test_a_window_that_does_not_fit_names_the_key_and_the_traces_file(tmp_path, window, message):
    copy = tmp_path / "mine.csv.gz"
    copy.write_bytes(trace_file("azure2023-code").read_bytes())
    for trace, file, name in (
        ("azure2023-code", "traces/data/azure2023_code.csv.gz", "azure2023-code"),
        (str(copy), str(copy), "mine"),
    ):
        scenario = load_scenario("decode-node", {"workload.trace": trace, "workload.window_s": window})
        with pytest.raises(InputError, match=message.format(name=name)) as caught:
            check_scenario(scenario)
        assert caught.value.field == "workload.window_s"
        assert caught.value.file == (None if window == [5.0, 1.0] else file)


def test_a_window_of_a_synthetic_workload_names_the_key():
    lengths = {"prompt_mean": 100.0, "output_mean": 20.0, "sigma": 0.5}
    options = {"workload.trace": None, "workload.window_s": [0.0, 9e5]}
    options["workload.synthetic"] = {"requests": 50, "rate": 2.0} | lengths
    with pytest.raises(InputError, match="the window ends after trace") as caught:
        check_scenario(load_scenario("decode-node", options))
    assert caught.value.field == "workload.window_s"


def test_a_shipped_traces_name_is_that_trace_whatever_files_there_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"{i},100,10\n" for i in range(50))
    (tmp_path / "azure2023-code").write_text(f"arrived_at,num_prefill_tokens,num_decode_tokens\n{rows}")
    for read in (read_trace, lambda name: trace_of(load_scenario("decode-node", {"workload.trace": name}))):
        assert len(read("azure2023-code")) == 8819
        assert len(read("./azure2023-code")) == 50


def test_a_path_with_a_colon_is_found_from_the_scenarios_folder(tmp_path):
    (tmp_path / "t12:00").mkdir()
    rows = "".join(f"{i},100,10\n" for i in range(50))
    (tmp_path / "t12:00" / "t.csv").write_text(f"arrived_at,num_prefill_tokens,num_decode_tokens\n{rows}")
    mine = tmp_path / "mine.toml"
    mine.write_text(scenario_path("decode-node").read_text())
    scenario = load_scenario(mine, {"workload.trace": "t12:00/t.csv"})
    assert scenario.workload.trace == str(tmp_path / "t12:00" / "t.csv")
    assert len(trace_of(scenario)) == 50


def test_leaving_the_profile_raises_unless_allowed_and_is_then_labelled():
    small = SMALL | {"cost.profile": "gb10x2-inkling-small-nvfp4", "load.think_s": 0.0, "cluster.max_seqs": 64}
    with pytest.raises(InputError, match="extrapolat"):
        simulate(load_scenario("decode-node", small), Point("dspark", 0, users=64))
    allowed = load_scenario("decode-node", small | {"cost.allow_extrapolation": True})
    assert simulate(allowed, Point("dspark", 0, users=8)).row["extrapolated"] is True


def test_a_tilted_drafter_is_labelled_and_better():
    base = load_scenario("decode-node", SMALL)
    tilted = load_scenario("decode-node", SMALL | {"drafts.tilt": {"alpha": [1.0], "confidence": [1.0]}})
    one, two = (simulate(s, Point("fixed5", 0, users=4)).row for s in (base, tilted))
    assert two["drafts_source"] == "synthetic:dsv4:dspark:tilted"
    assert two["accepted_length"] > one["accepted_length"] + 0.5


def test_tpot_slack_is_the_lead_over_the_target(tmp_path):
    """A policy sees produced x target - time since the first token; by hand at one user."""
    policy = tmp_path / "spy.py"
    policy.write_text(
        "import numpy as np\nfrom dsim.policy import BasePolicy\nSEEN = []\n"
        "class Spy(BasePolicy):\n    def plan(self, view):\n"
        "        now = (view.produced, view.slo_slack_ms, view.time_s, view.first_ns)\n"
        "        SEEN.append([np.copy(part).tolist() for part in now])\n"
        "        return np.zeros(view.requests, dtype=np.int64)\n"
    )
    overrides = SMALL | {"arms.6.policy": f"{policy}:Spy", "load.scored_min": 1, "load.scored_per_user": 1}
    scenario = load_scenario("decode-node", overrides)
    simulate(scenario, Point("dspark", 0, users=1))
    (module,) = [m for name, m in sys.modules.items() if name.startswith("dsim_policy_spy_")]
    produced, slack, time_s, first = module.SEEN[7]
    assert produced == [7]
    assert slack[0] == pytest.approx(7 * 20.0 - (time_s * 1e3 - first[0] / 1e6))


def test_domains_are_the_same_requests_in_any_order_of_a_drafters_list():
    trace = trace_of(load_scenario("decode-node"))
    one = RequestStream(trace, {"code": 1.0, "chat": 2.0}, order_seed=1, domain_seed=2)
    two = RequestStream(trace, {"chat": 2.0, "code": 1.0}, order_seed=1, domain_seed=2)
    assert [one.domains[one.domain(i)] for i in range(50)] == [two.domains[two.domain(i)] for i in range(50)]


def test_a_profile_that_includes_its_drafter_prices_no_other():
    small = SMALL | {"cost.profile": "gb10x2-inkling-small-nvfp4", "cost.allow_extrapolation": True}
    scenario = load_scenario("decode-node", small)
    row = simulate(scenario, Point("dspark", 0, users=2)).row
    assert row["cost_source"].endswith(";draft=included")
    # Profiled from 8 tokens on, and nothing is captured: smaller steps are outside.
    assert row["extrapolated"] is True
    with pytest.raises(InputError, match="another drafter has no price there"):
        simulate(scenario, Point("mtp5", 0, users=2))


@pytest.mark.parametrize("prefill", ["disaggregated", "colocated"])
def test_a_profile_with_several_contexts_serves(tmp_path, prefill):
    """Steps are dearer at the longer context, and a batch's mean context decides."""
    rows = ["kind,tokens,requests,context_tokens,ms,repeat"]
    for context, factor in ((1, 1.0), (32768, 3.0)):
        rows += [f"verify,{tokens},,{context},{factor * (5 + 0.01 * tokens)},0" for tokens in (1, 64, 4096, 16384)]
    rows += [f"draft,,{requests},,{0.5 + 0.01 * requests},0" for requests in (1, 64)]
    (tmp_path / "two.csv").write_text("\n".join(rows) + "\n")
    (tmp_path / "two.toml").write_text(
        'name = "two"\nhardware = "x"\ngpus = 1\nmodel = "x"\nengine = "x"\nkind = "measured"\n'
        'captured_sizes = []\ncapture_limit = 0\nsource = "test"\nlicense = "test"\n'
    )
    overrides = {"cost.profile": str(tmp_path / "two.csv"), "cluster.prefill": prefill}
    point = Point("dspark", 0, users=4)
    short = simulate(load_scenario("decode-node", SMALL | overrides), point).row
    assert short["extrapolated"] is False
    # Contexts of a thousand tokens or so lie near the short end: between 1 and 1.3 times its price.
    assert 5.0 < short["mean_step_ms"] < 8.5


def test_a_prompt_beyond_the_profile_is_found_before_the_work():
    scenario = load_scenario("decode-node", {"workload.trace": "mooncake-conversation"})
    with pytest.raises(InputError, match=r"a prompt of \d+ tokens.* prices prompts up to 16384"):
        check_scenario(scenario)


def test_a_window_without_a_step_is_an_error_not_a_zero():
    scenario = load_scenario("decode-node", SMALL)
    with pytest.raises(InputError, match="no step lies in the measuring window"):
        simulate(scenario, Point("dspark", 0, rate_scale=1e9))


def test_arms_that_would_meet_other_requests_are_an_error(tmp_path):
    bank = synthetic_bank(preset_spec("dsv4-flash-0731", "dspark"))
    write_bank(bank, tmp_path / "mixed.npz")
    scenario = load_scenario(
        "decode-node", SMALL | {"drafters.dspark.bank": str(tmp_path / "mixed.npz"), "drafts.domains": {"mixed": 1.0}}
    )
    check_scenario(scenario, ["dspark"])
    loose = scenario.model_copy(update={"drafts": scenario.drafts.model_copy(update={"domains": None})})
    with pytest.raises(InputError, match="'mtp1' and 'fixed5' draft for other domains"):
        check_scenario(loose)


def test_what_was_done_to_a_trace_is_in_its_label():
    scenario = load_scenario("decode-node", SMALL | {"workload.window_s": [0.0, 600.0]})
    assert simulate(scenario, Point("none", 0, users=2)).row["trace_source"] == "recorded:azure2023-conv:window"


def test_a_recorded_bank_drops_in_without_other_changes(tmp_path):
    """The same blocks read from a file give the same run; only the label says recorded."""
    spec = preset_spec("dsv4", "dspark")
    bank = synthetic_bank(spec)
    recorded = replace(bank, header=replace(bank.header, kind="recorded", source="tiny-target"))
    write_bank(recorded, tmp_path / "dspark.npz")
    preset = load_scenario("decode-node", SMALL)
    from_file = load_scenario("decode-node", SMALL | {"drafters.dspark.bank": str(tmp_path / "dspark.npz")})
    point = Point("dspark", 2, users=4)
    one, two = simulate(preset, point), simulate(from_file, point)
    assert bytes_of(one) == bytes_of(two)
    assert two.row["drafts_source"] == "recorded:tiny-target:dspark"


def test_a_point_is_either_closed_or_open(scenario):
    with pytest.raises(InputError, match="either users or a rate scale"):
        simulate(scenario, Point("none", 0))


# -- recorded and tilted drafts --------------------------------------------------------------------------


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """Small banks in the place of those that ship."""
    write_shipped(tmp_path / "banks")
    monkeypatch.setattr("dsim.drafts.bank._shipped_folder", lambda: tmp_path / "banks")
    runs._bank.cache_clear()
    yield
    runs._bank.cache_clear()


def drawn(source, **changes):
    return load_scenario("decode-node", SMALL | {"drafts.source": source} | changes)


@pytest.mark.parametrize("name", ["decode-node", "colocated"])
@pytest.mark.parametrize(
    ("source", "dspark", "mtp1"),
    [
        ("recorded", "recorded:tiny:dspark:first-5-of-7", "recorded:tiny:mtp:first-1-of-5"),
        ("tilted", "tilted:dsv4:recorded:tiny:dspark:first-5-of-7", "tilted:dsv4:recorded:tiny:mtp:first-1-of-5"),
        ("synthetic", "synthetic:dsv4:dspark", "synthetic:dsv4:mtp:first-1-of-5"),
    ],
)
def test_shipped_scenarios_run_with_every_source(shipped, name, source, dspark, mtp1):
    scenario = load_scenario(name, SMALL | {"drafts.source": source})
    check_scenario(scenario)
    for arm, label in (("dspark", dspark), ("mtp1", mtp1), ("none", "none")):
        assert simulate(scenario, Point(arm, 0, users=2)).row["drafts_source"] == label


def test_tilted_drafts_have_the_published_length_and_the_same_requests(shipped):
    """One domain, texts read whole and from the start: tau of the curve within noise; synthetic drafts agree."""
    overrides = {"drafts.domains": {"code": 1.0}, "load.scored_min": 150}
    lengths = {
        source: simulate(drawn(source, **overrides), Point("fixed5", 0, users=4)).row["accepted_length"]
        for source in ("recorded", "tilted", "synthetic")
    }
    tau = 1 + np.cumprod(preset_curves("dsv4")["dspark"]["code"]).sum()
    assert lengths["tilted"] == pytest.approx(tau, abs=0.12)
    assert lengths["synthetic"] == pytest.approx(tau, abs=0.2)
    assert abs(lengths["recorded"] - tau) > 0.4
    one, two = (simulate(drawn(s), Point("mtp1", 1, users=4)).records.requests for s in ("recorded", "tilted"))
    n = min(len(one["domain"]), len(two["domain"]))
    for column in ("prompt_tokens", "output_tokens", "domain"):
        np.testing.assert_array_equal(one[column][:n], two[column][:n])


def test_tilted_runs_are_the_same_bytes_again(shipped):
    point = Point("dspark", 3, users=8)
    first = simulate(drawn("tilted"), point)
    assert bytes_of(simulate(drawn("tilted"), point)) == bytes_of(first)
    runs._bank.cache_clear()
    assert bytes_of(simulate(drawn("tilted"), point)) == bytes_of(first)


def test_the_level_may_come_from_elsewhere(shipped, tmp_path):
    (tmp_path / "mine.json").write_text('{"code": [0.5, 0.5], "math": [0.5, 0.5], "chat": [0.5, 0.5]}')
    table = {domain: [0.5, 0.25] for domain in ("code", "math", "chat")}
    labels = {
        "qwen3-4b": {"drafts.preset": "qwen3-4b"},
        "qwen3-4b:dflash": {"drafters.dspark.tilt_to": "qwen3-4b:dflash"},
        "mine.json": {"drafters.dspark.tilt_to": str(tmp_path / "mine.json"), "drafts.gamma": 2},
        "scenario": {"drafters.dspark.tilt_to": table, "drafts.gamma": 2},
    }
    length = {}
    for to, changes in labels.items():
        scenario = drawn("tilted", **{"arms.3.policy": "fixed:k=2"}, **changes)
        row = simulate(scenario, Point("fixed5", 0, users=4)).row
        assert row["drafts_source"].startswith(f"tilted:{to}:recorded:tiny:dspark")
        length[to] = row["accepted_length"]
    assert length["mine.json"] == pytest.approx(1.75, abs=0.05)
    assert length["scenario"] == pytest.approx(1.625, abs=0.05)
    assert length["qwen3-4b"] > length["qwen3-4b:dflash"]


def test_a_further_tilt_is_labelled_and_better(shipped):
    better = drawn("tilted", **{"drafts.tilt": {"alpha": [1.0], "confidence": [1.0]}})
    one, two = (simulate(s, Point("fixed5", 0, users=4)).row for s in (drawn("tilted"), better))
    assert two["drafts_source"] == one["drafts_source"] + ":tilted"
    assert two["accepted_length"] > one["accepted_length"] + 0.5


def test_calibration_of_a_drafter(shipped, tmp_path):
    """Temperatures of a file, none at all, or learned in the run: another confidence, the same luck."""
    cooled = tuple(np.linspace(1.2, 2.0, 7))
    write_bank(recorded_bank(7, temperatures=cooled), tmp_path / "cooled.npz")
    write_temperatures(tmp_path / "t.json", (3.0,) * 7)
    rows = {}
    for name, calibration in (("", "bank"), (":uncalibrated", "none"), (":recalibrated", str(tmp_path / "t.json"))):
        keys = {"drafters.dspark.bank": str(tmp_path / "cooled.npz"), "drafters.dspark.calibration": calibration}
        rows[name] = simulate(drawn("tilted", **keys), Point("threshold", 0, users=4)).row
        assert rows[name]["drafts_source"] == f"tilted:dsv4:recorded:tiny:dspark:first-5-of-7{name}"
    online = drawn("tilted", **{"drafters.dspark.calibration": "online"})
    row = simulate(online, Point("threshold", 0, users=4)).row
    assert row["drafts_source"] == "tilted:dsv4:recorded:tiny:dspark:first-5-of-7:online-sts"
    assert len({row["verification_budget"] for row in (*rows.values(), row)}) == 4
    fixed = {c: drawn("recorded", **{"drafters.dspark.calibration": c}) for c in ("bank", "online")}
    lengths = {simulate(s, Point("fixed5", 0, users=4)).row["accepted_length"] for s in fixed.values()}
    assert len(lengths) == 1


@pytest.mark.parametrize(
    ("source", "overrides", "message"),
    [
        (
            "recorded",
            {"drafters.dspark.bank": "smollm3"},
            r"unknown bank, got 'smollm3', expected one of smollm2-dspark",
        ),
        ("tilted", {"arms.3.drafter": "eagle3"}, r"unknown bank, got 'smollm2-eagle3', expected one of smollm2-d"),
        ("tilted", {"drafters.dspark.bank": "nowhere.npz"}, "bank not found"),
        ("tilted", {"drafts.preset": "gpt"}, r"got 'gpt', expected one of dsv4"),
        ("tilted", {"drafts.preset": "dsv4-flash-0731"}, r"the curve 'dsv4-flash-0731' has no domain 'math'"),
        ("tilted", {"drafters.dspark.tilt_to": "dsv4:eagle3"}, r"no acceptance curve of drafter 'eagle3'.*dsv4:mtp"),
        ("tilted", {"drafters.dspark.tilt_to": "nowhere.json"}, "cannot be read.*acceptance curve"),
        ("tilted", {"drafters.dspark.tilt_to": {"code": [0.5] * 5}}, r"the curve 'scenario' has no domain 'math'"),
        (
            "tilted",
            {"drafters.dspark.tilt_to": {d: [0.5] * 5 for d in ("code", "math", "chat", "art")}},
            r"the bank has no domain 'art'",
        ),
        ("tilted", {"drafts.gamma": 6}, r"the curve 'dsv4' ends at position 5.*got 6, expected 1 to 5"),
        ("recorded", {"drafts.gamma": 8}, r"holds blocks of 7.*got 8"),
        ("tilted", {"drafts.domains": {"poetry": 1.0}}, r"expected one of math, code, chat"),
        ("tilted", {"drafts.tilt": {"alpha": [1.0, 2.0]}}, "tilt.alpha"),
        ("recorded", {"drafters.dspark.calibration": "none"}, r"drafters.dspark.calibration.*changes nothing.*'bank'"),
        ("synthetic", {"drafters.dspark.calibration": "none"}, r"changes nothing"),
        ("recorded", {"drafters.dspark.calibration": "none.json"}, r"cannot be read.*temperatures"),
    ],
)
def test_bad_sources_of_drafts_are_one_clear_error(shipped, source, overrides, message):
    def attempt():
        check_scenario(drawn(source, **overrides), ["fixed5"])

    with pytest.raises(InputError, match=message):
        attempt()


def test_a_drafter_without_a_curve_of_its_own_may_borrow_one(shipped):
    borrowed = {"arms.3.drafter": "own", "drafters.own": {"bank": "smollm2-dspark"}}
    with pytest.raises(InputError, match=r"'dsv4' has no acceptance curve of drafter 'own'.*dsv4:dspark, dsv4:mtp"):
        check_scenario(drawn("tilted", **borrowed), ["fixed5"])
    borrowed["drafters.own"]["tilt_to"] = "dsv4:dspark"
    one, two = drawn("tilted", **borrowed), drawn("tilted")
    own, dspark = (simulate(s, Point("fixed5", 0, users=4)) for s in (one, two))
    assert bytes_of(own) == bytes_of(dspark)
    assert own.row["drafts_source"] == "tilted:dsv4:dspark:recorded:tiny:dspark:first-5-of-7"


def test_the_fleet_serves_every_request_and_both_loops_agree() -> None:
    """64 replicas behind a router, a thousandth of the hour."""
    small = {"workload.synthetic.requests": 1500, "load.requests": 1500}
    scenario = load_scenario("fleet", small)
    fast, slow = (
        simulate(scenario, Point("dspark", 0, rate_scale=1.0), engine=engine).row for engine in ("auto", "step")
    )
    assert fast == slow
    assert fast["n_scored"] == 1500
    used = simulate(scenario, Point("dspark", 0, rate_scale=1.0)).records.requests["replica"]
    assert set(used.tolist()) == set(range(64))
