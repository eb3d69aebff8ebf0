"""What a bad value looks like in the one line that a user reads."""

from __future__ import annotations

import pickle

from dsim.errors import InputError


def test_a_long_value_is_shown_by_its_ends():
    text = str(InputError(field="k" * 1000, value=list(range(1000)), expected="fewer"))
    assert text.startswith("field 'kkk")
    assert "got [0, 1, 2, " in text
    assert " ... " in text
    assert text.endswith("998, 999], expected fewer")
    assert len(text) < 700
    # Up to 300 characters nothing is left out.
    assert str(InputError(value="x" * 298)) == f"got '{'x' * 298}'"


def test_a_value_that_has_no_text_is_named_by_its_type():
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert str(InputError(value=deep)) == "got a value of type list that is too long to show"
    assert str(InputError(value=10**5000)) == "got a value of type int that is too long to show"


def test_it_survives_the_trip_from_a_worker():
    error = InputError("is wrong", file="a.csv", line=3, field="x", value=[1], expected="2")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.value, again.line) == (str(error), [1], 3)
