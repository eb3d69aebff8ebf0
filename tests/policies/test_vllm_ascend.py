"""Hand-computed: the mean count, its rounding, how often, and who gets the drafts."""

from __future__ import annotations

import numpy as np
import pytest

from dsim import check_policy
from dsim.conformance import ConformanceError
from dsim.errors import InputError
from dsim.policy import Traits, load_policy, make_view
from policies.vllm_ascend import VllmAscend


def counting(*counts, gamma=7):
    """Blocks of which the first `count` drafts have a survival of 0.5 and the others one of 0.25."""
    survival = np.array([[0.5 if k < count else 0.25 for k in range(gamma)] for count in counts])
    return survival / np.hstack([np.ones((len(counts), 1)), survival[:, :-1]])


def view(now, **kwargs):
    return make_view(now, np.ones(1000), **kwargs)


def length(*counts, gamma=7, **params):
    policy = VllmAscend(interval=1, **params)
    policy.plan(view(counting(*counts, gamma=gamma)))
    return policy.length


def test_the_mean_count_is_rounded_up():
    # 10 over 3 requests: 3.33, up to 4, made odd: 5. Rounded to the nearest it would stay at 3.
    assert length(3, 3, 4) == 5
    assert length(3, 3, 3) == 3


def test_an_even_mean_is_made_odd_unless_it_is_the_block():
    assert [length(n) for n in range(1, 8)] == [1, 3, 3, 5, 5, 7, 7]
    assert [length(n, gamma=6) for n in range(1, 7)] == [1, 3, 3, 5, 5, 6]


def test_the_threshold_is_on_the_survival_and_includes_it():
    # Conditional confidences are 0.75 throughout; survivals 0.75, 0.5625, 0.42, 0.316, 0.237: four from 0.3 on.
    policy = VllmAscend(interval=1)
    policy.plan(view([[0.75] * 7]))
    assert policy.length == 5
    assert length(3, threshold=0.5) == length(3) == 3
    assert length(3, threshold=0.51) == 1


def test_it_is_renewed_in_every_interval_th_step():
    policy = VllmAscend(interval=4, initial=5)
    seen = []
    for count in (1, 1, 1, 3, 7, 7, 7, 1, 7):
        policy.plan(view(counting(count)))
        seen.append(policy.length)
    assert seen == [5, 5, 5, 3, 3, 3, 3, 1, 1]


def test_the_first_steps_have_the_initial_length():
    # 5 drafts a request, shared: the ten best of two alike, first come first served among equals.
    assert VllmAscend().plan(view(counting(1, 1))).tolist() == [7, 3]
    assert VllmAscend().plan(view(counting(1))).tolist() == [5]
    assert VllmAscend(initial=2).plan(view(counting(7))).tolist() == [2]
    assert VllmAscend().plan(view(counting(1, 1, gamma=3))).tolist() == [3, 3]


def test_the_batch_shares_what_the_length_gives():
    # K = 2 each: 4 drafts. One each, then the two best of the rest: 0.81 and 0.729 against 0.36.
    policy = VllmAscend(initial=2)
    assert policy.plan(view([[0.9, 0.9, 0.9], [0.6, 0.6, 0.6]])).tolist() == [3, 1]


def test_the_floor_is_given_even_to_hopeless_drafts():
    now = [[0.9, 0.9, 0.9], [0.0, 0.9, 0.9]]
    assert VllmAscend(initial=1).plan(view(now)).tolist() == [1, 1]
    assert VllmAscend(initial=1, floor=0).plan(view(now)).tolist() == [2, 0]
    assert VllmAscend(initial=0, floor=2).plan(view(now)).tolist() == [2, 2]
    assert length(1, floor=4) == 4


def test_no_promising_draft_gives_one():
    assert length(0, floor=0) == 1


def test_caps_bind_the_floor_and_leave_the_rest_to_others():
    policy = VllmAscend(initial=2)
    assert policy.plan(view([[0.9] * 3, [0.6] * 3], caps=[0, 3])).tolist() == [0, 3]
    assert policy.plan(view([[0.9] * 3, [0.6] * 3], caps=[0, 0])).tolist() == [0, 0]


def test_capped_drafts_do_not_count():
    policy = VllmAscend(interval=1)
    policy.plan(view(counting(7, 7), caps=[0, 2]))
    assert policy.length == 1


def test_batches_of_none_and_blocks_of_one():
    policy = VllmAscend(interval=1)
    assert policy.plan(view(np.ones((0, 5)))).tolist() == []
    assert policy.plan(view([[0.9], [0.1]])).tolist() == [1, 1]
    assert check_policy("vllm-ascend:interval=1,floor=2", gamma=1)


def test_the_length_is_kept_across_batch_sizes():
    policy = VllmAscend(interval=2)
    policy.plan(view(counting(3, 3)))
    policy.plan(view(counting(3, 3)))
    assert policy.plan(view(counting(7))).tolist() == [3]


@pytest.mark.parametrize(("floor", "without", "with_it"), [(1, [1, 1], [5, 1]), (0, [2, 0], [5, 1])])
def test_a_draft_behind_decides_about_one_before_it(floor, without, with_it):
    # The second request has no promising draft; the first has 0.9, 0.81 and 0.81 * c_3. With c_3 = 0.1 two of the
    # batch are promising: a mean of 1, so two drafts in all. With c_3 = 0.9 three: 1.5, up to 2, made 3: six drafts.
    # With a floor the second request takes one of the two, so c_3, hence x_2, decides whether x_2 is verified.
    def lengths(third):
        policy = VllmAscend(interval=1, floor=floor)
        return policy.plan(view([[0.9, 0.9, third, 0.9, 0.9], [0.1] * 5])).tolist()

    assert lengths(0.1) == without
    assert lengths(0.9) == with_it
    assert VllmAscend(floor=floor).traits.lossless == (min(without[0], 2) == min(with_it[0], 2))


class ClaimsLossless(VllmAscend):
    def __init__(self) -> None:
        super().__init__(interval=1)
        self.traits = Traits(cost_driven=False, floor=1)


def test_the_claim_to_be_lossless_would_be_refuted():
    assert "lossless" not in check_policy("vllm-ascend:interval=1")
    with pytest.raises(ConformanceError, match="depends on the tokens it is about"):
        check_policy(ClaimsLossless())
    assert all("lossless" in check_policy("vllm-ascend:interval=1,floor=0", seed=seed) for seed in range(8))


def test_spec_and_traits():
    assert load_policy("vllm-ascend") == VllmAscend(threshold=0.3, interval=16, initial=5, floor=1)
    assert VllmAscend(floor=2).traits == Traits(cost_driven=False, floor=2, lossless=False, needs_gamma=2)


@pytest.mark.parametrize("name", ["interval", "initial", "floor"])
@pytest.mark.parametrize("value", [-1, 1.0, True, "2", None])
def test_counts_that_are_none(name, value):
    with pytest.raises(InputError, match=rf"field '{name}'.*expected an integer >= "):
        VllmAscend(**{name: value})


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), True, "0.3", None])
def test_threshold_that_is_no_probability(value):
    with pytest.raises(InputError, match=r"field 'threshold'.*expected a number in \[0, 1\]"):
        VllmAscend(threshold=value)


def test_an_initial_length_that_no_step_has_is_refused():
    with pytest.raises(InputError, match="field 'initial': is not used"):
        VllmAscend(interval=1, initial=3)


def test_an_interval_of_zero_is_refused():
    with pytest.raises(InputError, match=r"field 'interval'.*>= 1"):
        VllmAscend(interval=0)
