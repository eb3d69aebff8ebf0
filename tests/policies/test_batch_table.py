"""Hand-computed: a length by batch size."""

from __future__ import annotations

import numpy as np
import pytest

from dsim import check_policy
from dsim.errors import InputError
from dsim.policy import Traits, load_policy, make_view
from policies.batch_table import BatchTable


def length(policy, requests, gamma=7, **kwargs):
    """The one length that all requests get."""
    view = make_view(np.full((requests, gamma), 0.1), np.ones(requests * (1 + gamma) + 100), **kwargs)
    (found,) = set(policy.plan(view).tolist())
    return found


def test_both_ends_of_a_range_are_in_it():
    policy = BatchTable("1-2=5/3-4=3/5-9=0")
    assert [length(policy, n) for n in range(1, 10)] == [5, 5, 3, 3, 0, 0, 0, 0, 0]


def test_a_gap_has_the_length_before_it():
    policy = BatchTable("1-1=5/4-4=3/8-9=1")
    assert [length(policy, n) for n in range(1, 10)] == [5, 5, 5, 3, 3, 3, 3, 1, 1]


def test_a_batch_beyond_the_table_has_its_last_length():
    assert length(BatchTable("1-2=5/3-4=2"), 300) == length(BatchTable("1-2=5/3-=2"), 300) == 2


def test_the_length_need_not_fall():
    assert [length(BatchTable("1-1=1/2-=4"), n) for n in (1, 2)] == [1, 4]


def test_prefill_chunks_are_not_in_the_batch():
    assert length(BatchTable("1-2=5/3-=2"), 2, prefill_tokens=50) == 5


def test_caps_and_blocks_cut_it():
    policy = BatchTable("1-=3")
    view = make_view(np.ones((3, 5)), np.ones(19), caps=[0, 2, 5])
    assert policy.plan(view).tolist() == [0, 2, 3]
    assert length(policy, 2, gamma=1) == 1


def test_an_empty_batch_has_no_length():
    assert BatchTable("1-=3").plan(make_view(np.ones((0, 5)), np.ones(1))).tolist() == []


def test_the_longest_entry_is_what_the_block_must_hold():
    assert BatchTable("1-2=2/3-4=6/5-=1").traits == Traits(cost_driven=False, needs_gamma=6)


def test_forms_of_the_table():
    text = "1-16=5/17-64=3/65-=1"
    assert load_policy(f"batch-table:table={text}") == BatchTable(text)
    assert repr(BatchTable(text)) == f"BatchTable(table='{text}')"
    assert BatchTable([[1, 16, 5], (17, 64, 3)]) == BatchTable("1-16=5/17-64=3")
    assert BatchTable().table == "1-64=3/65-128=1/129-512=0"
    assert "lossless" in check_policy(BatchTable([[1, 5, 3], [7, 12, 1]]))


@pytest.mark.parametrize(
    "table",
    [
        "",
        "1-16",
        "1-16=",
        "1=5",
        "1-16=x",
        "1-16=5/",
        "a-16=5",
        "1-16=-1",
        "1-16=1.5",
        "2-16=5",  # does not start at 1
        "1-16=5/16-32=3",  # overlap
        "17-32=3/1-16=5",  # descending
        "1-4=5/9-8=3",  # upside down
        "1-=5/17-32=3",  # open in the middle
        "0-16=5",
        "1-16=99999999999",
        [],
        [[1, 16]],
        [[1, 16, -1]],
        [[1, 16, 1.0]],
        [[2, 16, 1]],
        [[1, 16, 5], [16, 32, 3]],
        [[1, True, 5]],
        ["abc"],
        [5],
        5,
        None,
    ],
)
def test_what_is_no_table(table):
    with pytest.raises(InputError, match=r"field 'table'.*expected ranges FIRST-LAST=K"):
        BatchTable(table)
