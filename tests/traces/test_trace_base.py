"""`Trace`: its invariants, window, head, scale and rate, by hand-computed numbers."""

import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsim.errors import InputError
from traces import Trace


def five(**changes):
    fields = {
        "name": "five",
        "kind": "recorded",
        "source": "by hand",
        "arrival_s": [0.0, 1.0, 1.0, 3.0, 8.0],
        "prompt_tokens": [10, 513, 30, 40, 50],
        "output_tokens": [1, 2, 3, 4, 5],
        "prefix_blocks": ((0,), (0, 1), (0,), (), (7,)),
    }
    return Trace(**(fields | changes))


def test_types_and_read_only_arrays():
    trace = five()
    assert trace.arrival_s.dtype == np.float64
    assert trace.prompt_tokens.dtype == trace.output_tokens.dtype == np.int64
    for array in (trace.arrival_s, trace.prompt_tokens, trace.output_tokens):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_the_arrays_are_the_traces_own():
    arrival = np.array([0.0, 1.0])
    trace = five(arrival_s=arrival, prompt_tokens=[1, 2], output_tokens=[1, 2], prefix_blocks=None)
    arrival[1] = 99.0
    assert trace.arrival_s.tolist() == [0.0, 1.0]


def test_length_duration_and_rate():
    trace = five()
    assert len(trace) == 5
    assert trace.duration_s == 8.0
    assert trace.mean_rate == 0.5  # four gaps in eight seconds


@pytest.mark.parametrize("arrival", [[0.0], [0.0, 0.0]])
def test_no_rate_without_a_span(arrival):
    ones = [1] * len(arrival)
    trace = five(arrival_s=arrival, prompt_tokens=ones, output_tokens=ones, prefix_blocks=None)
    with pytest.raises(InputError, match="no mean rate"):
        _ = trace.mean_rate


def test_window_is_half_open_and_starts_its_own_clock():
    cut = five().window(1.0, 8.0)
    assert cut.arrival_s.tolist() == [0.0, 0.0, 2.0]
    assert cut.prompt_tokens.tolist() == [513, 30, 40]
    assert cut.output_tokens.tolist() == [2, 3, 4]
    assert cut.prefix_blocks == ((0, 1), (0,), ())
    assert cut.source == "by hand; window [1, 8) s"
    assert (cut.name, cut.kind) == ("five", "recorded")


def test_window_to_the_end():
    assert five().window(2.0, math.inf).arrival_s.tolist() == [0.0, 5.0]
    assert len(five().window()) == 5


@pytest.mark.parametrize(
    ("start", "end", "text"),
    [
        (3.5, 7.5, "holds no request"),
        (9.0, math.inf, "holds no request"),
        (2.0, 2.0, "0 <= start_s < end_s"),
        (-1.0, 2.0, "0 <= start_s < end_s"),
        (0.0, 8.5, "ends after trace"),
        (math.nan, 2.0, "seconds"),
        (0.0, math.nan, "seconds"),
        ("0", 2.0, "seconds"),
        (False, 2.0, "seconds"),
    ],
)
def test_bad_windows(start, end, text):
    with pytest.raises(InputError, match=text):
        five().window(start, end)


def test_head():
    cut = five().head(2)
    assert cut.arrival_s.tolist() == [0.0, 1.0]
    assert cut.prefix_blocks == ((0,), (0, 1))
    assert cut.source == "by hand; first 2 requests"


@pytest.mark.parametrize("n", [0, -1, 6, 2.0, True, "2"])
def test_bad_heads(n):
    with pytest.raises(InputError, match=r"field 'head'.*from 1 to 5") as caught:
        five().head(n)
    assert caught.value.value == n


def test_scaled_divides_times_and_nothing_else():
    fast = five().scaled(4)
    assert fast.arrival_s.tolist() == [0.0, 0.25, 0.25, 0.75, 2.0]
    assert fast.mean_rate == 2.0
    assert fast.prompt_tokens.tolist() == five().prompt_tokens.tolist()
    assert fast.source == "by hand; rate x 4"


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan, "2", None, True])
def test_bad_rates(rate):
    with pytest.raises(InputError, match=r"field 'rate'.*a finite factor > 0"):
        five().scaled(rate)


def test_a_scale_that_leaves_the_clock_is_refused():
    with pytest.raises(InputError, match=r"arrival_s.*at most 9e"):
        five().scaled(1e-10)


@given(st.lists(st.floats(0.0, 1e6), min_size=2, max_size=30), st.floats(0.01, 100.0))
def test_scaling_there_and_back(times, rate):
    times = np.sort(times)
    n = len(times)
    trace = Trace("t", "synthetic", "drawn", times - times[0], np.arange(1, n + 1), np.ones(n, int))
    there_and_back = trace.scaled(rate).scaled(1.0 / rate)
    np.testing.assert_allclose(there_and_back.arrival_s, trace.arrival_s, rtol=1e-12, atol=1e-300)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.data())
def test_a_trace_is_its_windows_one_after_the_other(gaps, data):
    times = np.concatenate([[0.0], np.cumsum(gaps)])
    n = times.size
    trace = Trace("t", "synthetic", "drawn", times, np.arange(1, n + 1), np.ones(n, int))
    cut = data.draw(st.integers(1, int(times[-1])))
    first, second = trace.window(0.0, cut), trace.window(cut, math.inf)
    assert first.prompt_tokens.tolist() + second.prompt_tokens.tolist() == trace.prompt_tokens.tolist()
    assert np.diff(second.arrival_s).tolist() == np.diff(times[len(first) :]).tolist()


def test_pickle_round_trip():
    back = pickle.loads(pickle.dumps(five()))
    assert back.arrival_s.tolist() == five().arrival_s.tolist()
    assert back.prefix_blocks == five().prefix_blocks


def test_repr_is_one_short_line():
    assert repr(five()) == "Trace(name='five', kind='recorded', source='by hand')"


@pytest.mark.parametrize(
    ("changes", "field", "text"),
    [
        ({"arrival_s": []}, "arrival_s", "holds no request"),
        ({"arrival_s": [0.0, 1.0, math.nan, 3.0, 8.0]}, "arrival_s", "request 2.*got nan.*finite seconds"),
        ({"arrival_s": [0.0, 1.0, 2.0, 3.0, math.inf]}, "arrival_s", "request 4.*got inf"),
        ({"arrival_s": [0.0, 1.0, 0.5, 3.0, 8.0]}, "arrival_s", "request 2 arrives before.*at least 1.0"),
        ({"arrival_s": [0.5, 1.0, 2.0, 3.0, 8.0]}, "arrival_s", "got 0.5.*0.0 for the first"),
        ({"arrival_s": [[0.0, 1.0]]}, "arrival_s", "one number a request"),
        ({"arrival_s": ["0", "1", "2", "3", "4"]}, "arrival_s", "one number a request"),
        ({"arrival_s": [[0.0], [1.0, 2.0]]}, "arrival_s", "not an array"),
        ({"prompt_tokens": [10, 0, 30, 40, 50]}, "prompt_tokens", "request 1.*got 0.*an integer from 1"),
        ({"prompt_tokens": [10, 20, 30, -40, 50]}, "prompt_tokens", "request 3.*got -40"),
        ({"output_tokens": [1, 2, 3.5, 4, 5]}, "output_tokens", "request 2.*got 3.5"),
        ({"output_tokens": [1, 2, 3, 4, math.nan]}, "output_tokens", "request 4.*got nan"),
        ({"output_tokens": [1, 2, 3, 4, math.inf]}, "output_tokens", "request 4.*got inf"),
        ({"output_tokens": [2**31, 2, 3, 4, 5]}, "output_tokens", "request 0.*got 2147483648"),
        ({"output_tokens": [1, 2, 3, 4]}, "output_tokens", "got 4.*5 lengths"),
        ({"output_tokens": [True] * 5}, "output_tokens", "got 'bool"),
        ({"kind": "measured"}, "kind", "recorded, synthetic"),
        ({"name": " "}, "name", "not empty"),
        ({"source": ""}, "source", "not empty"),
        ({"prefix_blocks": ((0,),)}, "prefix_blocks", "got 1, expected 5 tuples"),
        ({"prefix_blocks": ((0, 1), (), (), (), ())}, "prefix_blocks", "request 0.*'2 blocks'.*at most 1"),
        ({"prefix_blocks": ((0.5,), (), (), (), ())}, "prefix_blocks", "request 0.*integers >= 0"),
        ({"prefix_blocks": ((), (-1,), (), (), ())}, "prefix_blocks", "request 1.*integers >= 0"),
    ],
)
def test_bad_fields(changes, field, text):
    with pytest.raises(InputError, match=text) as caught:
        five(**changes)
    assert caught.value.field == field


def test_whole_floats_are_lengths():
    assert five(output_tokens=[1.0, 2.0, 3.0, 4.0, 5.0]).output_tokens.dtype == np.int64
