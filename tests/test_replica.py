"""The step loop, by exact event logs computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
from standins import ConstantCost, ScriptedDrafts, ScriptedPolicy, fixed_arrivals

from dsim.cluster import Cluster
from dsim.errors import InputError
from dsim.options import HostCost, ReplicaConfig
from dsim.policy import Traits
from dsim.prices import DraftCost
from dsim.workload import ClosedLoop, OpenLoop, RequestStream

MS = 1_000_000


def cluster(trace, *, drafts=None, policy=None, cost=None, load=None, replicas=1, router="round-robin", **config):
    options = {"max_seqs": 8, "token_budget": 64, "block_tokens": 4, "kv_blocks": 1000} | config
    stream = RequestStream(trace, {"any": 1.0}, order_seed=0, domain_seed=0, order="trace")
    return Cluster(
        replicas=replicas,
        config=ReplicaConfig(**options),
        cost=cost or ConstantCost(),
        drafts=drafts,
        draft_cost=DraftCost(),
        policy=policy or ScriptedPolicy(0),
        stream=stream,
        load=load or OpenLoop(requests=len(trace)),
        router=router,
    )


def steps(records, *names):
    return [tuple(int(records.steps[name][i]) for name in names) for i in range(len(records.steps["end_ns"]))]


def test_one_request_without_drafts_takes_a_step_a_token():
    records = cluster(fixed_arrivals([0.0], 10, 4), cost=ConstantCost(step_ms=2.0, prefill=5.0)).run()
    # The prefill node gives token 1 at 5 ms; tokens 2, 3, 4 come from three steps of 2 ms.
    assert steps(records, "end_ns", "requests", "committed", "batch_tokens") == [
        (7 * MS, 1, 1, 1),
        (9 * MS, 1, 1, 1),
        (11 * MS, 1, 1, 1),
    ]
    assert records.requests["first_ns"].tolist() == [5 * MS]
    assert records.requests["finish_ns"].tolist() == [11 * MS]


def test_accepted_drafts_and_the_cut_at_the_output_length():
    drafts = ScriptedDrafts([[3, 0, 0, 0, 1, 0, 0]], gamma=3)
    records = cluster(
        fixed_arrivals([0.0], 1, 7),
        drafts=drafts,
        policy=ScriptedPolicy(2),
        cost=ConstantCost(step_ms=1.0, token_ms=0.1, draft=0.25),
    ).run()
    # Position 0: min(3, 2) + 1 = 3 tokens -> position 3; there 0 -> 4; there min(1, 2) + 1 = 2 -> done (1 + 6 = 7).
    assert steps(records, "drafts", "accepted", "committed", "step_ns") == [
        (2, 2, 3, round(1.55 * MS)),
        (2, 0, 1, round(1.55 * MS)),
        (2, 1, 2, round(1.55 * MS)),
    ]


def test_a_policy_is_told_what_became_of_its_drafts_before_it_plans_again():
    log = []

    class Listening(ScriptedPolicy):
        """One draft of the first request, two of the second."""

        def plan(self, view):
            log.append(view.requests)
            return np.minimum(view.caps, np.arange(view.requests) + 1)

        def observe(self, verified, accepted):
            log.append((verified.tolist(), accepted.tolist()))
            verified[:] = accepted[:] = 99  # its own copies

    # Each has its first token. Request 0 wants 2 more: 1 of 1 accepted and the target's own. Request 1 wants 5: 2 of 2
    # and one; then it is alone and verifies one draft a step: 0 of 1, twice.
    records = cluster(
        fixed_arrivals([0.0, 0.0], 1, [3, 6]),
        drafts=ScriptedDrafts([[3, 0, 0], [3, 0, 0, 0, 0, 0]], gamma=3),
        policy=Listening(),
    ).run()
    assert log == [2, ([1, 2], [1, 2]), 1, ([1], [0]), 1, ([1], [0])]
    assert steps(records, "drafts", "accepted", "committed") == [(3, 3, 5), (1, 0, 1), (1, 0, 1)]


def test_a_nan_of_the_drafter_reaches_no_policy():
    seen = []

    class Looking(ScriptedPolicy):
        traits = Traits(confidence_age=1)

        def plan(self, view):
            seen.append([block.tolist() for block in view.history])
            return super().plan(view)

    class Sick(ScriptedDrafts):
        def draft(self, requests, positions):
            confidence, accepted = super().draft(requests, positions)
            confidence[:, 1:] = np.nan
            return confidence, accepted

    cluster(fixed_arrivals([0.0], 1, 3), drafts=Sick([[0, 0, 0]], gamma=2), policy=Looking(0)).run()
    assert seen == [[[[0.5, 0.0]], [[1.0, 1.0]]], [[[0.5, 0.0]], [[0.5, 0.0]]]]


def test_errors_of_a_policy_that_is_told_name_it():
    class Deaf(ScriptedPolicy):
        def observe(self, verified, accepted):
            raise ZeroDivisionError("what?")

    with pytest.raises(InputError, match=r"Deaf\(answer=1\) raised ZeroDivisionError: what\?"):
        cluster(fixed_arrivals([0.0], 1, 3), drafts=ScriptedDrafts([[1, 1, 1]], gamma=1), policy=Deaf(1)).run()


def test_tokens_beyond_the_output_are_accepted_but_not_committed():
    records = cluster(
        fixed_arrivals([0.0], 1, 3), drafts=ScriptedDrafts([[4, 4, 4]], gamma=4), policy=ScriptedPolicy(4)
    ).run()
    assert steps(records, "drafts", "accepted", "committed") == [(4, 4, 2)]
    clipped = cluster(
        fixed_arrivals([0.0], 1, 3),
        drafts=ScriptedDrafts([[4, 4, 4]], gamma=4),
        policy=ScriptedPolicy(lambda view: view.caps.copy()),
        clip_to_remaining=True,
    ).run()
    assert steps(clipped, "drafts", "accepted", "committed") == [(1, 1, 2)]


def test_a_batch_shares_steps_and_a_late_arrival_joins_at_the_next():
    records = cluster(fixed_arrivals([0.0, 0.0015], 1, [4, 3])).run()
    assert steps(records, "end_ns", "requests", "committed") == [
        (1 * MS, 1, 1),
        (2 * MS, 1, 1),
        (3 * MS, 2, 2),
        (4 * MS, 1, 1),
    ]
    assert records.requests["finish_ns"].tolist() == [3 * MS, 4 * MS]


def test_an_output_of_one_token_needs_no_decode_step():
    records = cluster(fixed_arrivals([0.0], 5, 1), cost=ConstantCost(prefill=3.0)).run()
    assert steps(records, "end_ns") == []
    assert records.requests["finish_ns"].tolist() == [3 * MS]


def test_colocated_prefill_chunks_share_the_token_budget():
    records = cluster(
        fixed_arrivals([0.0, 0.0], [10, 3], [2, 2]),
        colocated=True,
        token_budget=8,
        prefill_chunk=8,
        cost=ConstantCost(step_ms=1.0, token_ms=0.1),
    ).run()
    # Budget 8: 8 of prompt 0; then its last 2 and all 3 of prompt 1; both then decode one token.
    assert steps(records, "requests", "prefill_tokens", "first_tokens", "committed", "batch_tokens") == [
        (0, 8, 0, 0, 8),
        (0, 5, 2, 0, 5),
        (2, 0, 0, 2, 2),
    ]
    assert records.requests["first_ns"].tolist() == [round(3.3 * MS)] * 2


def test_admission_a_step_ahead_misses_the_next_step():
    def run(ahead):
        trace = fixed_arrivals([0.0, 0.0005], [4, 3], [4, 2])
        return cluster(trace, colocated=True, admit_ahead=ahead).run()

    # Request 1 arrives in the first step: it is in the second, or in the third.
    assert steps(run(False), "requests", "prefill_tokens") == [(0, 4), (1, 3), (2, 0), (1, 0)]
    records = run(True)
    assert steps(records, "requests", "prefill_tokens") == [(0, 4), (1, 0), (1, 3), (2, 0)]
    assert records.requests["first_ns"].tolist() == [1 * MS, 3 * MS]
    assert records.requests["finish_ns"].tolist() == [4 * MS, 4 * MS]


def test_a_slot_that_becomes_free_is_filled_a_step_later_when_admitting_ahead():
    def first_tokens(ahead, output):
        trace = fixed_arrivals([0.0] * 3, 1, output)
        return cluster(trace, colocated=True, max_seqs=2, admit_ahead=ahead).run().requests["first_ns"].tolist()

    # Request 0 ends at 2 ms, in the second step; request 1 goes on.
    assert first_tokens(False, [2, 5, 1]) == [1 * MS, 1 * MS, 3 * MS]
    assert first_tokens(True, [2, 5, 1]) == [1 * MS, 1 * MS, 4 * MS]
    # Both end at 2 ms: the replica is idle, and an idle one admits at once.
    assert first_tokens(True, [2, 2, 1]) == [1 * MS, 1 * MS, 3 * MS]


@pytest.mark.parametrize("options", [{}, {"colocated": True, "overlapped": False}])
def test_admission_a_step_ahead_needs_an_engine_that_can(options):
    with pytest.raises(InputError, match=r"'admit_ahead'.*expected False, or a colocated and overlapped engine"):
        cluster(fixed_arrivals([0.0], 1, 2), admit_ahead=True, **options)


def test_decoding_requests_keep_room_for_whole_blocks():
    drafts = ScriptedDrafts([[0] * 9, [0] * 9], gamma=3)
    records = cluster(
        fixed_arrivals([0.0, 0.0005], [4, 12], [6, 2]),
        drafts=drafts,
        policy=ScriptedPolicy(3),
        colocated=True,
        token_budget=8,
        max_seqs=2,
        prefill_chunk=8,
    ).run()
    # Step 1 prefills request 0. From then on 1 x (1 + 3) of 8 tokens are reserved: chunks of 4.
    assert steps(records, "requests", "prefill_tokens", "drafts")[:5] == [
        (0, 4, 0),
        (1, 4, 3),
        (1, 4, 3),
        (1, 4, 3),
        (2, 0, 6),
    ]


def test_kv_admission_waits_until_blocks_are_free():
    # Each request holds ceil((8 + 2 + 1) / 4) = 3 blocks at its end; four blocks hold one at a time.
    records = cluster(fixed_arrivals([0.0, 0.0], 8, 2), kv_blocks=4).run()
    assert steps(records, "end_ns", "requests", "queue") == [(1 * MS, 1, 1), (2 * MS, 1, 0)]


def test_kv_preemption_recomputes_and_loses_no_token():
    # Prompts of 4, outputs of 9, blocks of 4: the start needs 2 + 2 blocks, the ends 4 + 4; six blocks force it.
    records = cluster(fixed_arrivals([0.0, 0.0], 4, 9), kv_blocks=6, cost=ConstantCost(step_ms=1.0, prefill=0.5)).run()
    assert records.requests["preemptions"].tolist() == [0, 1]
    assert records.requests["generated_tokens"].tolist() == [9, 9]
    colocated = cluster(fixed_arrivals([0.0, 0.0], 4, 9), kv_blocks=6, colocated=True, prefill_chunk=4).run()
    assert colocated.requests["preemptions"].sum() >= 1
    assert colocated.requests["generated_tokens"].tolist() == [9, 9]
    # Its recomputed context is processed as prompt tokens again.
    assert int(colocated.steps["prefill_tokens"].sum()) > 8


def test_a_request_larger_than_the_cache_is_an_error_with_numbers():
    with pytest.raises(InputError, match=r"request 0 .* needs 27 KV blocks .* got 20, expected >= 27"):
        cluster(fixed_arrivals([0.0], 100, 5), kv_blocks=20).run()


@pytest.mark.parametrize(("overlapped", "expected"), [(True, 4.0), (False, 5.0)])
def test_host_time_hides_behind_the_gpu_only_when_overlapped(overlapped, expected):
    host = HostCost(base_ms=2.0, hidden_fraction=0.5)
    records = cluster(
        fixed_arrivals([0.0], 1, 2), cost=ConstantCost(step_ms=3.0), host=host, overlapped=overlapped
    ).run()
    assert steps(records, "step_ns") == [(round(expected * MS),)]


def test_confidences_age_by_request_and_a_new_one_counts_as_sure():
    seen = []

    def answer(view):
        seen.append([[round(float(c), 2) for c in view.aged(n)[:, 0]] for n in range(3)])
        return np.zeros(view.requests, dtype=np.int64)

    class Drafts(ScriptedDrafts):
        def draft(self, requests, positions):
            confidence, accepted = super().draft(requests, positions)
            confidence[:, 0] = (10 * (requests + 1) + positions) / 100
            return confidence, accepted

    policy = ScriptedPolicy(answer)
    policy.traits = Traits(confidence_age=2, cost_driven=False)
    cluster(fixed_arrivals([0.0, 0.0015], 1, [4, 3]), drafts=Drafts([[0] * 9] * 2, gamma=1), policy=policy).run()
    assert seen == [
        [[0.1], [1.0], [1.0]],
        [[0.11], [0.1], [1.0]],
        [[0.12, 0.2], [0.11, 1.0], [0.1, 1.0]],
        [[0.21], [0.2], [1.0]],
    ]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (9, r"policy ScriptedPolicy\(answer=9\) .* out of bounds for request 0.*got 9, expected 0\.\.3"),
        (-1, r"out of bounds for request 0.*got -1"),
        (
            lambda view: np.zeros(view.requests + 1, dtype=np.int64),
            r"got 'int64\[2\]', expected an integer array \[1\]",
        ),
        (lambda view: np.zeros(view.requests), r"got 'float64\[1\]'"),
        (lambda view: None, r"expected an integer array \[1\]"),
    ],
)
def test_a_policy_that_returns_nonsense_is_named(answer, message):
    with pytest.raises(InputError, match=message) as caught:
        cluster(
            fixed_arrivals([0.0], 1, 3), drafts=ScriptedDrafts([[0, 0, 0]], gamma=3), policy=ScriptedPolicy(answer)
        ).run()
    assert caught.value.field is not None


@pytest.mark.parametrize("users", [3, 20])
@pytest.mark.parametrize("answer", [4, -1])
def test_bounds_are_checked_in_small_and_large_batches(users, answer):
    def last_one_wrong(view):
        lengths = np.zeros(view.requests, dtype=np.int64)
        lengths[-1] = answer if view.requests == users else 0
        return lengths

    drafts = ScriptedDrafts([[0] * 9] * users, gamma=3)
    trace = fixed_arrivals([0.0] * users, 1, 5)
    with pytest.raises(InputError, match=f"out of bounds for request {users - 1}.*got {answer}"):
        cluster(trace, drafts=drafts, policy=ScriptedPolicy(last_one_wrong), max_seqs=users, token_budget=200).run()


def test_a_policy_that_raises_is_named():
    def fails(view):
        raise ZeroDivisionError("by nothing")

    with pytest.raises(InputError, match=r"policy ScriptedPolicy\(.*raised ZeroDivisionError: by nothing"):
        cluster(
            fixed_arrivals([0.0], 1, 3), drafts=ScriptedDrafts([[0, 0, 0]], gamma=3), policy=ScriptedPolicy(fails)
        ).run()


def test_a_policy_that_refuses_its_input_is_named():
    def refuses(view):
        raise InputError("the table has no graph", file="t.json", field="requests", value=1, expected="at most 0")

    message = r"t\.json, field 'requests': policy ScriptedPolicy\(.*\): the table has no graph, got 1, expected at most"
    with pytest.raises(InputError, match=message):
        cluster(
            fixed_arrivals([0.0], 1, 3), drafts=ScriptedDrafts([[0, 0, 0]], gamma=3), policy=ScriptedPolicy(refuses)
        ).run()


def test_a_policy_that_exits_is_an_error_not_a_success():
    def exits(view):
        raise SystemExit(0)

    with pytest.raises(InputError, match="raised SystemExit"):
        cluster(
            fixed_arrivals([0.0], 1, 3), drafts=ScriptedDrafts([[0, 0, 0]], gamma=3), policy=ScriptedPolicy(exits)
        ).run()


def test_views_are_read_only_and_carry_what_they_say():
    seen = []

    def look(view):
        for array in (view.caps, view.produced, view.born, view.first_ns, *view.history):
            assert not array.flags.writeable
        seen.append(
            (
                view.base_tokens,
                view.sampling,
                view.queue_length,
                round(view.time_s * 1e3, 6),
                view.draft_ms,
                view.host_hidden_ms,
                view.host_exposed_ms,
                view.step,
                view.born.tolist(),
                view.produced.tolist(),
                view.first_ns.tolist(),
                view.slo_tpot_ms,
                view.captured_sizes.tolist(),
                view.capture_limit,
                round(float(view.verify_ms[3]), 6),
                round(float(view.step_ms()[1]), 6),
            )
        )
        return np.zeros(view.requests, dtype=np.int64)

    run = Cluster(
        replicas=1,
        config=ReplicaConfig(
            max_seqs=1,
            token_budget=8,
            colocated=True,
            prefill_chunk=8,
            block_tokens=4,
            host=HostCost(base_ms=4.0, hidden_fraction=0.75),
        ),
        cost=ConstantCost(step_ms=1.0, token_ms=0.5, draft=0.25, captured=(1, 4)),
        drafts=ScriptedDrafts([[0] * 9] * 2, gamma=2),
        draft_cost=DraftCost(),
        policy=ScriptedPolicy(look),
        stream=RequestStream(
            fixed_arrivals([0.0, 0.001], 3, 3), {"any": 1.0}, order_seed=0, domain_seed=0, order="trace"
        ),
        load=OpenLoop(requests=2),
        slo_tpot_ms=20.0,
    )
    run.run()
    # The prompt's step: 1 + 3 x 0.5 = 2.5 ms GPU, 3 ms hidden and 1 ms exposed host: 4 ms. Then 1 + 0.5 + 0.25 = 1.75
    # ms of GPU hide behind the host: 4 ms again. A second request waits from 1 ms on.
    first = [(1, 1, 1, 4.0, 0.25, 3.0, 1.0, 0, [0], [0], [4 * MS], 20.0, [1, 4], 4, 2.5, 4.0)]
    assert seen[:1] == first
    assert seen[1][3] == 8.0
    assert seen[1][7:10] == (1, [0], [1])


def test_clairvoyant_policies_see_useful_drafts_only():
    seen = []

    def look(view):
        seen.append(view.accepted.tolist())
        return view.accepted.copy()

    policy = ScriptedPolicy(look)
    policy.traits = Traits(clairvoyant=True, cost_driven=False)
    drafts = ScriptedDrafts([[3, 3, 3, 3, 3, 3]], gamma=3)
    cluster(fixed_arrivals([0.0], 1, 7), drafts=drafts, policy=policy).run()
    # 6 tokens to go: 3 useful drafts (4 tokens); 2 to go: 1 useful draft.
    assert seen == [[3], [1]]


def test_router_counts_return_to_nothing_even_after_preemption():
    for colocated in (False, True):
        run = cluster(
            fixed_arrivals([0.0, 0.0, 0.0], 4, 9), kv_blocks=7, colocated=colocated, prefill_chunk=4, max_seqs=3
        )
        records = run.run()
        assert records.requests["preemptions"].sum() >= 1
        assert run.replicas[0].outstanding_tokens == 0
        assert run.replicas[0]._reserved_worst == 0


def test_blocks_of_prompts_in_progress_count():
    """A prompt of 16 tokens (5 blocks with its first token) takes two steps; meanwhile no second one fits into 8."""
    records = cluster(fixed_arrivals([0.0, 0.0], [16, 16], [9, 2]), kv_blocks=8, colocated=True, prefill_chunk=8).run()
    assert steps(records, "requests", "prefill_tokens", "queue")[:3] == [(0, 8, 1), (0, 8, 1), (1, 0, 1)]


def test_prompts_share_a_steps_prefill_chunk_first_come_first_served():
    records = cluster(
        fixed_arrivals([0.0] * 3, [10, 3, 6], [1, 1, 1]), colocated=True, prefill_chunk=8, token_budget=64
    ).run()
    assert steps(records, "prefill_tokens", "first_tokens") == [(8, 0), (8, 2), (3, 1)]


def test_steps_are_priced_at_the_mean_context_of_the_batch():
    class ByContext(ConstantCost):
        def __init__(self):
            super().__init__()
            self.depends_on_context = True
            self.contexts = np.array([0, 1 << 20])
            self.asked = []

        def verify_table(self, requests, max_tokens, context=None):
            self.asked.append((requests, context))
            return super().verify_table(requests, max_tokens)

    cost = ByContext()
    trace = fixed_arrivals([0.0, 0.0], [640, 1280], 200)
    records = cluster(trace, cost=cost, kv_blocks=10000).run()
    # Mean of 640 + t and 1280 + t tokens, to the nearest 64; t runs from 1 to 199.
    assert [context for _, context in cost.asked] == [960.0, 1024.0, 1088.0, 1152.0]
    assert records.steps["context_tokens"].tolist() == [640 + 1280 + 2 * t for t in range(1, 200)]
    assert not cluster(trace, kv_blocks=10000).run().steps["context_tokens"].any()  # nobody asks for it


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table[:-1], r"does not reach the largest step, got \[\d+\], expected an array \[\d+\]"),
        (
            lambda table: np.where(np.arange(table.size) == 3, np.nan, table),
            r"price of 3 tokens is no duration, got nan",
        ),
        (lambda table: 0.0 * table, r"price of 1 tokens is no duration, got 0\.0, expected milliseconds from 1e-6"),
    ],
)
def test_a_cost_model_without_a_price_for_a_step_is_named(change, message):
    class Short(ConstantCost):
        def verify_table(self, requests, max_tokens, context=None):
            return change(super().verify_table(requests, max_tokens))

    with pytest.raises(InputError, match=rf"field 'verify_table': the cost model's .*{message}"):
        cluster(fixed_arrivals([0.0], 1, 3), cost=Short())


def test_open_loop_window_ends_with_the_last_scored_arrival():
    trace = fixed_arrivals([0.0, 0.010, 0.020, 0.030], 1, 50)
    records = cluster(trace, load=OpenLoop(requests=4, warmup=1, cooldown=1)).run()
    assert records.scored == (1, 3)
    assert records.window_ns == (10 * MS, 20 * MS)


def test_small_integer_types_are_accepted():
    policy = ScriptedPolicy(lambda view: np.ones(view.requests, dtype=np.int32))
    records = cluster(fixed_arrivals([0.0], 1, 3), drafts=ScriptedDrafts([[1, 1, 1]], gamma=2), policy=policy).run()
    assert steps(records, "drafts", "committed") == [(1, 2)]


def test_routers_spread_requests():
    trace = fixed_arrivals([0.0, 0.0, 0.0, 0.0], 4, [100, 2, 2, 2])
    by = {}
    for router in ("round-robin", "least-tokens", "power-of-two"):
        by[router] = cluster(trace, replicas=2, router=router).run().requests["replica"].tolist()
    assert by["round-robin"] == [0, 1, 0, 1]
    assert by["least-tokens"] == [0, 1, 1, 1]
    assert sorted(set(by["power-of-two"])) == [0, 1]
    with pytest.raises(InputError, match="router"):
        cluster(trace, router="nearest")


def test_closed_loop_keeps_the_population_and_thinks():
    load = ClosedLoop(users=2, think_s=0.003, scored=4, warmup_per_user=3)
    records = cluster(fixed_arrivals([0.0], 1, 2), load=load).run()
    arrivals = records.requests["arrival_ns"].tolist()
    # Each request takes one step of 1 ms; then the user thinks for 3 ms: a new pair every 4 ms.
    assert arrivals[:6] == [0, 0, 4 * MS, 4 * MS, 8 * MS, 8 * MS]
    assert records.scored == (6, 10)


def test_whole_run_issues_exactly_the_scored_requests():
    load = ClosedLoop(users=3, scored=7, steady=False)
    records = cluster(fixed_arrivals([0.0], 1, 5), load=load).run()
    assert len(records.requests["arrival_ns"]) == 7
    assert records.scored == (0, 7)
    assert np.all(records.requests["finish_ns"] >= 0)


def test_token_budget_must_hold_a_full_batch_with_whole_blocks():
    with pytest.raises(InputError, match=r"token_budget.*got 16, expected >= max_seqs x \(1 \+ gamma\) = 32"):
        cluster(fixed_arrivals([0.0], 1, 2), drafts=ScriptedDrafts([[0]], gamma=3), token_budget=16)


def test_the_audit_catches_a_lost_token():
    run = cluster(fixed_arrivals([0.0], 1, 4))
    original = run.steps.append
    run.steps.append = lambda row: original((*row[:7], row[7] - 1, *row[8:]))
    with pytest.raises(RuntimeError, match="audit invariant violated: tokens produced"):
        run.run()
