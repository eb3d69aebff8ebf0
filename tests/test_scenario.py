"""One run of a scenario: identity, determinism, pairing, bad inputs."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest

from dsim.drafts import preset_spec, synthetic_bank, write_bank
from dsim.errors import InputError
from dsim.scenario import Point, check_scenario, simulate, trace_of
from dsim.schema import load_scenario
from dsim.workload import RequestStream

SMALL = {"load.scored_min": 30, "load.scored_per_user": 2, "load.requests": 60}


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
