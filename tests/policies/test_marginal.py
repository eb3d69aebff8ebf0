"""Hand-computed: expected tokens less rate times time, with a fixed and with a running rate."""

from __future__ import annotations

import numpy as np
import pytest

from dsim import check_policy
from dsim.conformance import ConformanceError
from dsim.errors import InputError
from dsim.policy import Traits, load_policy, make_view
from policies.dspark import DSpark
from policies.marginal import Marginal

# Two requests, 10 ms and 2 ms a draft. Survivals 0.75, 0.375 | 0.5, 0.25.
LINEAR = [0, 0, 10, 12, 14, 16, 18]
NOW = [[0.75, 0.5], [0.5, 0.5]]
GOOD = [[1.0, 1.0], [1.0, 1.0]]
BAD = [[0.0, 0.0], [0.0, 0.0]]


def plan(policy, now=NOW, *older, verify_ms=LINEAR, **kwargs):
    return policy.plan(make_view(now, verify_ms, history=older, **kwargs)).tolist()


# -- a fixed rate ------------------------------------------------------------------------------------------


def test_a_draft_must_survive_more_often_than_its_time_is_worth():
    # 2 ms at 0.2 tokens a millisecond: 0.4. At 0.3: 0.6. At 0.15: 0.3. At 0.1: 0.2.
    lengths = {rate: plan(Marginal(rate=rate, lag=0)) for rate in (0.4, 0.3, 0.2, 0.15, 0.1, 0)}
    assert lengths == {0.4: [0, 0], 0.3: [1, 0], 0.2: [1, 1], 0.15: [2, 1], 0.1: [2, 2], 0: [2, 2]}


def test_an_even_bargain_is_none():
    assert plan(Marginal(rate=0.375, lag=0)) == [0, 0]
    assert plan(Marginal(rate=0.25, lag=0)) == [1, 0]


def test_it_is_the_difference_and_not_the_ratio():
    # 100 ms for the step itself: per ms, 2/100 < 2.75/102 < 3.25/104 < 3.625/106 < 3.875/108, so the ratio takes all.
    prefill = [0, 0, 100, 102, 104, 106, 108]
    assert plan(DSpark(lag=0), verify_ms=prefill) == [2, 2]
    assert plan(Marginal(rate=0.2, lag=0), verify_ms=prefill) == plan(Marginal(rate=0.2, lag=0)) == [1, 1]


def test_the_search_crosses_a_stair():
    # The first draft costs 8 ms, the others nothing: 0.75 < 0.8, 1.25 > 0.8 at 0.1 tokens a millisecond.
    assert plan(Marginal(rate=0.1, lag=0), verify_ms=[0, 0, 10, 18, 18, 18, 18]) == [2, 2]
    assert plan(Marginal(rate=0.3, lag=0), verify_ms=[0, 0, 10, 18, 18, 18, 18]) == [0, 0]


def test_the_price_is_the_whole_steps():
    # The host needs 14 ms anyway: the first two drafts are free, the third costs 2 ms.
    view = make_view(NOW, LINEAR)._replace(host_hidden_ms=14.0)
    assert Marginal(rate=0.3, lag=0).plan(view).tolist() == [1, 1]
    # 4 ms of drafting fill the same wait.
    assert Marginal(rate=0.3, lag=0).plan(view._replace(draft_ms=4.0)).tolist() == [1, 0]


def test_prefill_chunks_move_along_the_prices():
    stair = [0] + [10] * 6 + [20] * 6
    assert plan(Marginal(rate=0.2, lag=0), verify_ms=stair) == [2, 2]
    assert plan(Marginal(rate=0.2, lag=0), verify_ms=stair, prefill_tokens=2) == [1, 1]


# -- staleness ---------------------------------------------------------------------------------------------


def test_capacity_is_set_by_old_confidences_and_ranked_by_current_ones():
    assert plan(Marginal(rate=0.2), NOW, BAD, GOOD) == [2, 2]
    assert plan(Marginal(rate=0.2), GOOD, GOOD, BAD) == [0, 0]
    # K = 2 from the old ones; now all of that is the second request's.
    assert plan(Marginal(rate=0.2, lag=1), [[0.1, 0.1], [0.9, 0.9]], NOW) == [0, 2]


def test_lag_decides_whether_it_is_lossless():
    assert Marginal().traits == Traits(confidence_age=2)
    assert Marginal(lag=0).traits == Traits(lossless=False)
    assert all("lossless" in check_policy("marginal:rate=2.5", seed=seed) for seed in range(3))


class ClaimsLossless(Marginal):
    def __init__(self) -> None:
        super().__init__(lag=0)
        self.traits = Traits()


def test_the_claim_without_a_lag_would_be_refuted():
    # One request: a dear first draft and a free second one. The second pays for the first, so c_2, which is computed
    # from x_1, decides whether x_1 is verified.
    stair = [0, 10, 18, 18]
    assert plan(Marginal(rate=0.1, lag=0), [[0.75, 0.9]], verify_ms=stair) == [2]
    assert plan(Marginal(rate=0.1, lag=0), [[0.75, 0.0]], verify_ms=stair) == [0]
    with pytest.raises(ConformanceError, match="depends on the tokens it is about"):
        check_policy(ClaimsLossless())


# -- the running rate --------------------------------------------------------------------------------------


def test_the_first_step_is_the_best_by_ratio():
    # 2/10, 2.75/12, 3.25/14, 3.625/16, 3.875/18: the best is 0.2321 at two drafts.
    policy = Marginal(lag=0)
    assert plan(policy) == [1, 1]
    assert (policy.tokens, policy.elapsed_ms) == (3.25, 14.0)


def test_the_rate_is_that_of_the_steps_so_far():
    policy = Marginal(lag=0, weight=0.5)
    plan(policy)
    # At 3.25/14 = 0.232 a draft of 2 ms must survive with 0.464: two do, in a step of 100 ms too.
    assert plan(policy, verify_ms=[0, 0, 100, 102, 104, 106, 108]) == [1, 1]
    assert (policy.tokens, policy.elapsed_ms) == (3.25, (14 + 104) / 2)
    # Now 3.25/59 = 0.055: 0.11 is enough.
    assert plan(policy) == [2, 2]
    assert (policy.tokens, policy.elapsed_ms) == ((3.25 + 3.875) / 2, (59 + 18) / 2)


def test_the_weight_is_how_fast_it_forgets():
    slow = Marginal(lag=0, weight=0.1)
    plan(slow)
    plan(slow, verify_ms=[0, 0, 100, 102, 104, 106, 108])
    # 3.25 tokens in 14 + 0.1 * 90 ms: 0.141, so 0.28 is needed.
    assert slow.elapsed_ms == pytest.approx(23.0)
    assert plan(slow) == [2, 1]


def test_a_fixed_rate_stays():
    policy = Marginal(rate=0.3, lag=0)
    plan(policy)
    plan(policy, verify_ms=[0, 0, 100, 102, 104, 106, 108])
    assert plan(policy) == [1, 0]
    assert (policy.tokens, policy.elapsed_ms) == (0.0, 0.0)


def test_the_running_rate_finds_the_best_ratio():
    # The same step again and again: Dinkelbach's iteration ends at the ratio rule's choice, from any start.
    rng = np.random.default_rng(5)
    for _ in range(20):
        now = rng.uniform(0.3, 1.0, (8, 5))
        prices = np.cumsum(rng.uniform(0, 1, 8 * 6 + 1)) + 5
        policy = Marginal(lag=0, weight=0.5)
        policy.tokens, policy.elapsed_ms = 1.0, 1.0
        for _ in range(60):
            found = plan(policy, now, verify_ms=prices)
        assert found == plan(DSpark(lag=0), now, verify_ms=prices)


# -- edges -------------------------------------------------------------------------------------------------


def test_empty_batches_caps_and_blocks_of_one():
    policy = Marginal(lag=0)
    assert plan(policy, np.ones((0, 5)), verify_ms=[0.0]) == []
    assert policy.tokens == 0
    assert plan(Marginal(rate=0.1, lag=0), caps=[1, 0]) == [1, 0]
    assert plan(Marginal(rate=0.1, lag=0), caps=[0, 0]) == [0, 0]
    assert plan(Marginal(rate=0.1, lag=0), [[0.5]], verify_ms=[0, 10, 12]) == [1]
    assert plan(Marginal(rate=0, lag=0), [[np.nan, 0.9], [0.5, np.nan]]) == [0, 1]


def test_spec():
    assert load_policy("marginal:rate=0.5,lag=1") == Marginal(rate=0.5, lag=1)
    assert load_policy("marginal") == Marginal(rate=None, lag=2, weight=0.05)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"rate": -1}, r"'rate'.*a number in \[0, 1e\+12\]"),
        ({"rate": float("nan")}, "'rate'"),
        ({"rate": float("inf")}, "'rate'"),
        ({"rate": True}, "'rate'"),
        ({"rate": "fast"}, "'rate'"),
        ({"lag": -1}, "'lag'.*integer >= 0"),
        ({"lag": 1.0}, "'lag'"),
        ({"weight": 0.0}, r"'weight'.*\(0, 1\]"),
        ({"weight": 2}, "'weight'"),
        ({"weight": False}, "'weight'"),
        ({"rate": 0.5, "weight": 0.1}, "'weight': is not used with a fixed rate"),
    ],
)
def test_parameters_outside_their_range(params, expected):
    with pytest.raises(InputError, match=expected):
        Marginal(**params)
