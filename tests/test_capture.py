"""The capture-set advisor: exact against every subset, prices by hand, and profiles that can be simulated."""

from __future__ import annotations

import doctest
from itertools import combinations

import numpy as np
import pytest

import dsim.capture
from dsim.capture import (
    GraphPrices,
    best_sets,
    candidate_sizes,
    captured_profile,
    graph_prices,
    load_of_lengths,
    lost_throughput,
    step_load,
)
from dsim.cost import fit
from dsim.errors import InputError
from dsim.profile import load_profile, read_profile, write_profile

B300 = "b300x4-dsv4-flash-0731"


def prices(graph, eager=None, known=None):
    graph = np.asarray(graph, dtype=np.float64)
    return GraphPrices(graph, None if eager is None else np.asarray(eager, float), "test", known or graph.size - 1)


# -- loads -----------------------------------------------------------------------------------------------


def test_steps_are_pooled_and_add_up_to_one():
    load = step_load([3, 1, 3, 9], [1, 2, 1, 0])
    assert load.tokens.tolist() == [1, 3]
    assert load.weight.tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("tokens", "weight"),
    [([], []), ([1], [0]), ([0], [1]), ([1, 2], [1]), ([1], [-1]), ([1], [float("nan")]), ([[1]], [[1]])],
)
def test_bad_steps(tokens, weight):
    with pytest.raises(InputError):
        step_load(tokens, weight)


def test_requests_times_lengths():
    # One length: exactly R (1 + k).
    load = load_of_lengths({4: 0.25, 64: 0.75}, {5: 1.0})
    assert load.tokens.tolist() == [24, 384]
    assert load.weight.tolist() == [0.25, 0.75]
    # Three requests with 0 or 2 drafts: binomial.
    load = load_of_lengths({3: 1.0}, {0: 0.5, 2: 0.5})
    assert load.tokens.tolist() == [3, 5, 7, 9]
    assert load.weight.round(12).tolist() == [0.125, 0.375, 0.375, 0.125]
    many = load_of_lengths({200: 1.0}, {0: 0.3, 1: 0.3, 5: 0.4})
    assert float(many.weight @ many.tokens) == pytest.approx(200 * (1 + 0.3 + 2.0))
    for bad in (({0: 1.0}, {1: 1.0}), ({1: 1.0}, {-1: 1.0}), ({1: 0.0}, {1: 1.0}), ({1: 1.0}, {1: float("inf")})):
        with pytest.raises(InputError):
            load_of_lengths(*bad)


# -- the sets --------------------------------------------------------------------------------------------


def test_padding_and_eager_by_hand():
    load = step_load([1, 3, 4], [0.5, 0.25, 0.25])
    given = prices([0, 1, 2, 3, 4], eager=[0, 10, 10, 10, 10])
    assert given.padded(load, np.array([3])) == 0.5 * 3 + 0.25 * 3 + 0.25 * 10
    assert given.padded(load, np.array([1, 4])) == 0.5 * 1 + 0.5 * 4
    assert given.padded(load, np.array([], dtype=int)) == 10.0
    assert given.ideal(load) == 0.5 * 1 + 0.25 * 3 + 0.25 * 4
    assert prices([0, 1, 2, 3, 4]).padded(load, np.array([3])) == np.inf
    # A dip: three tokens are best run as four; and eagerly where that is cheaper still.
    assert prices([0, 1, 2, 9, 4]).ideal(load) == 0.5 * 1 + 0.5 * 4
    assert prices([0, 1, 2, 9, 9], eager=[0, 5, 5, 5, 5]).ideal(load) == 0.5 * 1 + 0.5 * 5


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", ["rising", "rising, eager", "dips", "dips, eager"])
def test_no_subset_is_better(kind, seed):
    """Every set of at most n sizes, not only of the candidates, against the dynamic program."""
    rng = np.random.default_rng(seed)
    last = 9
    graph = np.concatenate([[0.0], rng.uniform(1, 10, last)])
    if kind.startswith("rising"):
        graph = np.sort(graph)
    eager = rng.uniform(2, 12, last + 1) if kind.endswith("eager") else None
    given = prices(graph, eager)
    tokens = np.sort(rng.choice(np.arange(1, last + 1), 5, replace=False))
    load = step_load(tokens, rng.uniform(0.1, 1, 5))
    candidates = candidate_sizes(load, given)
    sets = best_sets(load, given, candidates, 9)
    everything = range(1, last + 1)
    for count in range(sets.ms.size):
        best = min(
            given.padded(load, np.array(chosen, dtype=int))
            for size in range(count + 1)
            for chosen in combinations(everything, size)
        )
        assert sets.ms[count] == pytest.approx(best)
        if np.isfinite(best):
            assert given.padded(load, sets.sizes(count)) == pytest.approx(best)
            assert sets.sizes(count).size <= count
            assert (np.diff(sets.sizes(count)) > 0).all()


def test_more_graphs_never_lose_more_and_the_steps_own_sizes_lose_nothing():
    load = load_of_lengths({8: 0.5, 32: 0.5}, {0: 0.3, 2: 0.3, 5: 0.4})
    given = graph_prices(load_profile(B300), int(load.tokens[-1]))
    sets = best_sets(load, given, candidate_sizes(load, given), load.tokens.size)
    assert (np.diff(sets.ms) <= 0).all()
    assert sets.ms[-1] == pytest.approx(given.ideal(load))
    assert sets.ms[4] < given.padded(load, np.array([64, 128, 192]))
    with pytest.raises(InputError, match="count"):
        sets.sizes(sets.ms.size)


def test_a_tie_takes_the_fewest():
    load = step_load([2, 4], [0.5, 0.5])
    sets = best_sets(load, prices([0, 5, 5, 5, 5]), np.array([2, 4]), 2)
    assert sets.sizes(2).tolist() == [4]


def test_candidates():
    load = step_load([3, 5, 12], [1, 1, 1])
    rising = prices(np.arange(17.0), known=16)
    assert candidate_sizes(load, rising).tolist() == [3, 5, 12]
    assert candidate_sizes(load, rising, multiple=4).tolist() == [4, 8, 12]
    assert candidate_sizes(load, rising, largest=8).tolist() == [3, 5]
    assert candidate_sizes(load, prices(np.arange(17.0), known=8)).tolist() == [3, 5]  # 12 was never timed in a graph
    dips = np.full(17, np.inf)
    dips[[4, 8, 16]] = 4.0, 9.0, 8.0
    assert candidate_sizes(load, prices(dips)).tolist() == [4, 8, 16]
    with pytest.raises(InputError, match="at least 3 tokens"):
        candidate_sizes(load, rising, largest=2)
    for bad in ({"multiple": 0}, {"largest": 0}):
        with pytest.raises(InputError):
            candidate_sizes(load, rising, **bad)
    with pytest.raises(InputError, match="count"):
        best_sets(load, rising, np.array([12]), 0)


# -- prices ----------------------------------------------------------------------------------------------


def test_smooth_prices_of_the_b300_and_its_eager_steps():
    given = graph_prices(load_profile(B300), 1600)
    assert given.label == f"measured:{B300}:roofline-moe"
    assert given.known == 1024
    assert (np.diff(given.graph[1:]) >= 0).all()
    assert given.graph[512] == pytest.approx(
        fit(load_profile(B300), "roofline-moe").verify_table(1, 512)[512], abs=1e-6
    )
    # The first eager step was timed at 1,536 tokens; a smaller one launches as many kernels.
    assert given.eager[[1, 700, 1100]].tolist() == [104.489] * 3


def test_measured_prices_keep_the_dips():
    given = graph_prices(load_profile(B300), 1024, curve="measured")
    assert given.graph[192] == 10.5128  # a running maximum would charge 11.39
    assert given.graph[193] == np.inf
    load = step_load([150, 190], [0.5, 0.5])
    sets = best_sets(load, given, candidate_sizes(load, given), 2)
    # 152 tokens cost 11.3 ms and 176 cost 10.5: padding further is cheaper.
    assert sets.sizes(2)[0] > 168


def test_profiles_with_few_sizes():
    lines = graph_prices(load_profile("rtx5090-qwen3-4b-dflash16"), 300)
    assert lines.label.endswith(":lines")
    assert lines.eager is None
    assert lines.graph[[1, 16, 72, 256]].tolist() == [8.1, 8.1, 8.85, 13.6]
    assert lines.graph[300] == pytest.approx(13.6 + 44 * 4.0 / 128)
    assumed = graph_prices(load_profile("rtx5090-qwen3-4b-dflash16"), 300, eager_factor=3.0)
    assert assumed.eager[16] == pytest.approx(24.3)
    assert assumed.label.endswith("eager=3x:assumed")


def test_refused_prices():
    b300 = load_profile(B300)
    with pytest.raises(InputError, match="curve"):
        graph_prices(b300, 64, curve="wavy")
    with pytest.raises(InputError, match="timed eager steps"):
        graph_prices(b300, 64, eager_factor=5.0)
    with pytest.raises(InputError, match="eager_factor"):
        graph_prices(load_profile("gb10x2-inkling-small-nvfp4"), 64, eager_factor=0.5)
    with pytest.raises(InputError, match="request counts"):
        graph_prices(load_profile("unnamed-dsv4-pro-trtllm"), 64)


def test_losses():
    assert lost_throughput(10.0, 8.0) == pytest.approx(0.2)
    assert lost_throughput(10.0, 8.0, 10.0) == pytest.approx(0.1)
    assert np.isnan(lost_throughput(np.inf, 8.0))


# -- profiles --------------------------------------------------------------------------------------------


def test_a_profile_with_other_graphs_prices_steps_as_the_advisor_does(tmp_path):
    b300 = load_profile(B300)
    given = graph_prices(b300, 1536)
    sizes = np.array([6, 100, 640])
    made = captured_profile(b300, given, sizes, "mine")
    write_profile(made, tmp_path / "mine.csv")
    back = read_profile(tmp_path / "mine.toml")
    assert back == made
    assert back.kind == "derived"
    assert back.captured_sizes.tolist() == [6, 100, 640]
    cost = fit(back)
    table = cost.verify_table(1, 1536)
    load = step_load([1, 6, 7, 100, 101, 640, 641, 1024, 1536], np.ones(9))
    assert table[load.tokens].mean() == pytest.approx(given.padded(load, sizes), abs=1e-5)
    assert cost.draft_ms(64) == fit(b300).draft_ms(64)
    # Prompts cost what they did, graphs or not.
    for tokens in (640, 1024, 1025, 1536, 5000):
        assert cost.prefill_ms(tokens) == pytest.approx(fit(b300).prefill_ms(tokens), rel=1e-6)


def test_a_profile_with_larger_graphs_loses_the_eager_samples_below():
    b300 = load_profile(B300)
    made = captured_profile(b300, graph_prices(b300, 3000), np.array([64, 3000]), "large")
    verify = made.samples.of("verify")
    assert np.unique(verify.tokens).tolist() == [64, 3000, 4096, 8192, 16384]
    assert made.capture_limit == 3000


def test_a_profile_with_an_assumed_eager_price():
    given = load_profile("gb10x2-inkling-small-nvfp4")
    assumed = graph_prices(given, 128, eager_factor=2.0)
    made = captured_profile(given, assumed, np.array([16, 64]), "assumed")
    table = fit(made).verify_table(1, 128)
    assert table[64] == pytest.approx(assumed.graph[64], abs=1e-6)
    assert table[128] == pytest.approx(assumed.eager[128], abs=1e-6)
    with pytest.raises(InputError, match="captures nothing"):
        captured_profile(given, assumed, np.array([], dtype=np.int64), "none")


def test_examples():
    result = doctest.testmod(dsim.capture)
    assert result.attempted
    assert not result.failed


def test_sizes_that_no_search_holds_are_refused():
    with pytest.raises(InputError, match="'tokens': got 4194305, expected at most 4194304"):
        step_load([8, (1 << 22) + 1], [1, 1])
    sizes = np.arange(1, 4098)
    prices = GraphPrices(np.ones(4098), None, "flat", 4097)
    with pytest.raises(
        InputError, match="'multiple': too many sizes to choose from, got '4097 sizes', expected at most"
    ):
        best_sets(step_load(sizes, np.ones(4097)), prices, sizes, 2)
    with pytest.raises(InputError, match=r"'eager_factor': got 1e\+308, expected a number from 1 to 1e6"):
        graph_prices(load_profile("m5max-nemotronh-30b"), 16, eager_factor=1e308)
