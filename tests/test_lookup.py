"""Step tables as engines read them, by hand."""

from __future__ import annotations

import copy
import doctest
import pickle

import numpy as np
import pytest

import dsim.lookup
from dsim.errors import InputError
from dsim.lookup import PriceMemo, StepTable, sampled

SIZES, MS = np.array([2, 4, 8]), np.array([10.0, 14.0, 22.0])


def test_the_three_rules():
    assert StepTable(SIZES, MS, "next").prices(10).tolist() == [10, 10, 10, 14, 14, 22, 22, 22, 22, 24, 26]
    assert StepTable(SIZES, MS, "floor").prices(10).tolist() == [10, 10, 10, 10, 14, 14, 14, 14, 22, 22, 22]
    assert StepTable(SIZES, MS, "linear").prices(10).tolist() == [10, 10, 10, 12, 14, 16, 18, 20, 22, 24, 26]


def test_what_holds_beyond_the_largest_size():
    for rule in ("next", "linear"):
        assert StepTable(SIZES, MS, rule, hold=True).prices(10)[8:].tolist() == [22, 22, 22]
        # Never downwards, and level where one size is all there is.
        assert StepTable(SIZES, MS[::-1], rule).prices(10)[8:].tolist() == [10, 10, 10]
        assert StepTable(SIZES[:1], MS[:1], rule).prices(4).tolist() == [10] * 5


def test_running_maximum():
    dip = np.array([10.0, 8.0, 22.0])
    assert StepTable(SIZES, dip, "next", running_max=True).prices(4).tolist() == [10, 10, 10, 10, 10]
    assert StepTable(SIZES, dip, "next").prices(4).tolist() == [10, 10, 10, 8, 8]


def test_sampling_a_curve():
    curve = np.arange(9.0) ** 2
    assert sampled(curve, np.array([0, 1, 4, 99]), "linear", hold=True).prices(6).tolist() == [1, 1, 6, 11, 16, 16, 16]
    assert sampled(curve, np.array([99]), "linear").tokens.tolist() == [8]
    assert sampled(np.array([3.0, 1.0, 2.0]), np.array([1, 2]), "next", running_max=True).ms.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("field", "table"),
    [
        ("tokens", ([], [], "next")),
        ("tokens", ([2, 2], [1.0, 1.0], "next")),
        ("tokens", ([-1, 2], [1.0, 1.0], "next")),
        ("ms", ([1, 2], [1.0], "next")),
        ("ms", ([1, 2], [1.0, 0.0], "next")),
        ("ms", ([1, 2], [1.0, float("nan")], "next")),
        ("rule", ([1, 2], [1.0, 2.0], "ceil")),
    ],
)
def test_tables_that_are_none(field, table):
    tokens, ms, rule = table
    with pytest.raises(InputError, match=f"field '{field}'"):
        StepTable(np.array(tokens), np.array(ms), rule)


def test_the_memo_knows_a_curve_by_its_identity():
    made = []

    def make(curve, gamma):
        made.append(gamma)
        return curve * gamma

    memo, curve = PriceMemo(), np.array([1.0, 2.0])
    assert memo.get(curve, 3, make) is memo.get(curve, 3, make)
    assert memo.get(curve, 4, make).tolist() == [4, 8]
    assert memo.get(curve.copy(), 3, make).tolist() == [3, 6]
    assert made == [3, 4, 3]
    for twin in (copy.deepcopy(memo), pickle.loads(pickle.dumps(memo))):
        twin.get(curve, 3, make)
    assert made == [3, 4, 3, 3, 3]


def test_the_memo_does_not_grow_without_bound():
    memo = PriceMemo()
    curves = [np.array([float(i)]) for i in range(3 * PriceMemo.CURVES)]
    for curve in curves:
        assert memo.get(curve, 1, lambda curve, _: curve + 1)[0] == curve[0] + 1
    assert len(memo._held) <= PriceMemo.CURVES


def test_examples_in_the_docstrings():
    result = doctest.testmod(dsim.lookup)
    assert result.attempted >= 3
    assert result.failed == 0
