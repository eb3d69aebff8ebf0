"""Parameters that no batch could use: refused by name, before a sum overflows in the middle of a run."""

from __future__ import annotations

import pytest

from dsim.errors import InputError
from dsim.policy import load_policy
from policies._parameters import LEAST, MOST, MOST_INT, need_bool, need_int, need_number


def test_integers():
    for value in (2, 3, MOST_INT):
        need_int("n", value, 2)
    for value in (1, 2.0, True, "2", None, float("nan")):
        with pytest.raises(InputError, match=r"field 'n'.*expected an integer >= 2"):
            need_int("n", value, 2)
    with pytest.raises(InputError, match=r"field 'n': got 1000000001, expected an integer of at most 1000000000"):
        need_int("n", MOST_INT + 1, 2)


def test_numbers():
    for value in (0, 1e-300, 0.5, MOST):
        need_number("x", value)
    for value in (LEAST, 1, 1.0):
        need_number("x", value, most=1, zero=False)
    for value in (-1e-300, float("nan"), float("inf"), 2 * MOST, 10**400, True, "1", None):
        with pytest.raises(InputError, match=r"field 'x'.*expected a number in \[0, 1e\+12\]$"):
            need_number("x", value)
    for value in (0, -1, 1.1):
        with pytest.raises(InputError, match=r"field 'x'.*expected a number in \(0, 1\]$"):
            need_number("x", value, most=1, zero=False)
    with pytest.raises(InputError, match=r"field 'x': got 1e-300, expected a number in \(0, 1\], at least 1e-12"):
        need_number("x", 1e-300, most=1, zero=False)


def test_booleans():
    for value in (True, False):
        need_bool("b", value)
    for value in (0, 1, "true", None):
        with pytest.raises(InputError, match=r"field 'b'.*expected true or false"):
            need_bool("b", value)


@pytest.mark.parametrize(
    "spec",
    [
        "marginal:rate=1e308",
        "sglang:min_predicted_gain=1e308",
        "trtllm:min_predicted_gain=1e308",
        "trtllm:drain=1e308",
        "trtllm:drain=1,drain_tokens=1e-320",
        "vllm-ascend:initial=99999999999999999999999",
        "vllm-verify-adaptive:batch_step=99999999999999999999999",
        "tetris:capacity=99999999999999999999999",
        "lab:lookup=linear,probes=99999999999999999999999",
    ],
)
def test_specs_beyond_any_batch(spec):
    name = spec.replace(":", ",").split(",")[-1].split("=")[0]
    with pytest.raises(InputError, match=rf"field '{name}'"):
        load_policy(spec)
