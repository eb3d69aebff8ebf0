"""Policies that are pinned to an engine's file: blocks of another size, and batches that the table does not reach."""

from __future__ import annotations

import engine_files
import numpy as np
import pytest
from engine_files import FILES, write

from dsim.engines import parse_engine_file
from dsim.errors import InputError
from dsim.policy import load_policy, make_view
from dsim.scenario import Point, simulate
from dsim.schema import load_scenario

POLICIES = ("sglang", "atom", "vllm-adaptive", "trtllm")


def view_for(policy, confidence, step=9):
    confidence = np.asarray(confidence, dtype=np.float64)
    requests, gamma = confidence.shape
    age = policy.traits.confidence_age
    return make_view(confidence, np.ones(requests * (1 + gamma) + 1), history=(confidence,) * age, step=step)


def settled(policy, view):
    """The answer in the second of two steps that are alike: `atom` trims nothing in the first."""
    policy.plan(view)
    return policy.plan(view)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("gamma", [3, 5])
def test_exact_graphs_of_another_block_size_are_refused(tmp_path, name, gamma):
    path = write(tmp_path, engine_files.trtllm_v2(), "exact.json")
    policy = load_policy(f"{name}:table={path}")
    expected = (
        rf"exact\.json, field 'engine_fingerprint\.max_draft_len': the table is for blocks of 4 drafts, and the arm's "
        rf"have {gamma}, got 4, expected {gamma}, or an arm with gamma = 4"
    )
    with pytest.raises(InputError, match=expected):
        settled(policy, view_for(policy, np.full((4, gamma), 0.5)))


@pytest.mark.parametrize("name", POLICIES)
def test_exact_graphs_of_the_arms_block_size_are_read(tmp_path, name):
    policy = load_policy(f"{name}:table={write(tmp_path, engine_files.trtllm_v2())}")
    # Of four requests: nothing extra up to 12 tokens at 5.2 ms, 5.6 up to 16, 6 for all 20. Hopeless drafts beyond two
    # tokens a request never pay.
    lengths = settled(policy, view_for(policy, [[1.0, 1.0, 0.0, 0.0]] * 4))
    assert lengths.tolist() == [2, 2, 2, 2]


def test_a_run_that_is_pinned_to_another_block_size_ends_with_the_policys_name(tmp_path):
    path = write(tmp_path, engine_files.trtllm_v2())
    arm = {"name": "pinned", "policy": f"trtllm:table={path}", "drafter": "dspark"}
    settings = {"arms": [arm], "drafts.source": "synthetic", "load.users": [4]}
    with pytest.raises(InputError, match=r"policy Trtllm\(.*blocks of 4 drafts, and the arm's have 5"):
        simulate(load_scenario("decode-node", settings), Point("pinned", 0, users=4))


#: (format, what the engine believes of a step beyond the table's last size)
BEYOND = {
    "sglang-diagonal": "held",
    "sglang-additive": "held",
    "trtllm-v1": "held",
    "vllm": "on in a straight line",
}


@pytest.mark.parametrize("name", BEYOND)
def test_a_table_that_ends_is_continued_as_its_engine_does_it(name):
    table = parse_engine_file(FILES[name]())
    end = table.largest
    prices = table.prices(8, 2 * end)
    beyond, last = prices[end + 1 :], prices[end]
    if BEYOND[name] == "held":
        assert (beyond == last).all()
    else:
        assert np.allclose(np.diff(prices[end:]), 1.0)  # 30 ms at 12 tokens, 34 at 16
        assert beyond[0] > last


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *((name, form) for name in POLICIES for form in ("sglang-diagonal", "sglang-additive", "trtllm-v1")),
        *((name, "vllm") for name in POLICIES),
    ],
)
def test_beyond_a_short_table_a_held_price_makes_drafts_free_and_a_line_does_not(tmp_path, name, form):
    """80 requests of 4 drafts: 80 to 400 tokens, where the tables end at 64 or 16."""
    policy = load_policy(f"{name}:table={write(tmp_path, FILES[form]())}")
    confidence = np.full((80, 4), 0.3)
    lengths = settled(policy, view_for(policy, confidence))
    if BEYOND[form] == "held":
        # Every draft is free.
        assert lengths.tolist() == [4] * 80
        return
    # 98 ms at 80 tokens, the draft pass apart, and 1 ms a token more, which 0.3 tokens do not pay for.
    assert lengths.max() <= 1  # at most the floor that `trtllm` gives to everybody


@pytest.mark.parametrize("name", POLICIES)
def test_a_batch_that_no_graph_holds_is_an_error(tmp_path, name):
    policy = load_policy(f"{name}:table={write(tmp_path, engine_files.trtllm_v2())}")
    with pytest.raises(InputError, match=r"no graph for so many requests.*got 9, expected at most 8"):
        settled(policy, view_for(policy, np.full((9, 4), 0.5)))


def test_the_page_says_how_tables_are_continued():
    text = (engine_files.Path(__file__).parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")
    assert "shorter than the batch is continued as its engine does it" in " ".join(text.split())
