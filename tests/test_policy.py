"""Specs, name resolution and the base class of policies."""

from __future__ import annotations

import copy
import doctest
import inspect
import pickle
import subprocess
import sys

import numpy as np
import pytest

import dsim.policy
from dsim.errors import InputError
from dsim.policy import BUILTIN_POLICIES, BasePolicy, Policy, Traits, load_policy, make_view, parse_spec

CUSTOM = """
import numpy as np
from dsim.policy import BasePolicy, Traits

class Half(BasePolicy):
    traits = Traits(cost_driven=False)

    def __init__(self, share: float = 0.5) -> None:
        if not 0 <= share <= 1:
            raise ValueError("share outside [0, 1]")
        self.share = share

    def plan(self, view):
        return (view.caps * self.share).astype(np.int64)

class NotAPolicy:
    pass

number = 3
"""


@pytest.fixture
def custom(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(CUSTOM)
    return path


@pytest.mark.parametrize(
    ("spec", "name", "params"),
    [
        ("none", "none", {}),
        (" none ", "none", {}),
        ("fixed:k=3", "fixed", {"k": 3}),
        ("threshold:t=0.5,on=survival", "threshold", {"t": 0.5, "on": "survival"}),
        ("threshold: t = 1e-2 , on = confidence", "threshold", {"t": 0.01, "on": "confidence"}),
        ("x:flag=true,other=False", "x", {"flag": True, "other": False}),
        ("policies.fixed:Fixed", "policies.fixed:Fixed", {}),
        ("policies.fixed:Fixed:k=2", "policies.fixed:Fixed", {"k": 2}),
        ("a/b.py:Mine:k=2", "a/b.py:Mine", {"k": 2}),
    ],
)
def test_parse_spec(spec, name, params):
    found_name, found = parse_spec(spec)
    assert (found_name, found) == (name, params)
    assert [type(value) for value in found.values()] == [type(value) for value in params.values()]


@pytest.mark.parametrize("spec", ["fixed:k=", "fixed:=3", "fixed:k=3,", "fixed:k=3,t", "fixed:3=k", "k=3", ":k=3"])
def test_malformed_spec(spec):
    with pytest.raises(InputError, match="NAME:key=value"):
        parse_spec(spec)


def test_parameter_given_twice():
    with pytest.raises(InputError, match="'k' is given twice"):
        parse_spec("fixed:k=3,k=4")


@pytest.mark.parametrize("name", sorted(BUILTIN_POLICIES))
def test_built_in_policies_resolve(name):
    policy = load_policy(name)
    assert isinstance(policy, Policy)
    assert type(policy).__module__.startswith("policies.")


def test_parameters_reach_the_policy():
    assert repr(load_policy("threshold:t=0.25,on=survival")) == "Threshold(t=0.25, on='survival')"


def test_module_and_class():
    assert load_policy("policies.fixed:Fixed:k=2") == load_policy("fixed:k=2")


def test_file_and_class(custom):
    policy = load_policy(f"{custom}:Half:share=1.0")
    assert policy.plan(make_view([[0.5, 0.5]], np.ones(4))).tolist() == [2]
    # The same file gives the same class, so that objects compare and copies unpickle.
    assert load_policy(f"{custom}:Half:share=1.0") == policy
    assert pickle.loads(pickle.dumps(policy)) == policy


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(InputError) as caught:
        load_policy("dsprak:lag=2")
    message = str(caught.value)
    assert "'dsprak'" in message
    for name in BUILTIN_POLICIES:
        assert name in message
    assert "package.module:Class" in message


def test_unknown_parameter_names_the_known_ones():
    with pytest.raises(InputError, match=r"policy 'threshold' has no parameter 'x'.*one of t, on"):
        load_policy("threshold:x=1")
    with pytest.raises(InputError, match=r"policy 'none' has no parameter 'k'.*expected no parameters"):
        load_policy("none:k=1")


def test_refused_parameter():
    with pytest.raises(InputError, match=r"field 'k': got -1, expected an integer >= 0"):
        load_policy("fixed:k=-1")


def test_value_error_of_a_policy_becomes_an_input_error(custom):
    with pytest.raises(InputError, match=r"refused its parameters \(ValueError: share outside"):
        load_policy(f"{custom}:Half:share=2")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("policies.fixed:Missing", "has no class 'Missing'"),
        ("no_such_package.module:Mine", "cannot import 'no_such_package.module'"),
        (":Mine", "cannot import ''"),
        ("..relative:Mine", "cannot import '..relative'"),
        ("policies.threshold:SIGNALS", "'SIGNALS' is not a class"),
        ("math:sqrt", "refused its parameters"),
        ("builtins:int", "'builtins:int' is not a policy"),
    ],
)
def test_names_that_lead_nowhere(name, message):
    with pytest.raises(InputError, match=message):
        load_policy(name)


def test_files_that_lead_nowhere(custom, tmp_path):
    with pytest.raises(InputError, match="policy file not found"):
        load_policy(f"{tmp_path / 'absent.py'}:Mine")
    with pytest.raises(InputError, match="NotAPolicy' is not a policy"):
        load_policy(f"{custom}:NotAPolicy")
    with pytest.raises(InputError, match="'number' is not a class"):
        load_policy(f"{custom}:number")
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0\n")
    with pytest.raises(InputError, match="raised ZeroDivisionError"):
        load_policy(f"{broken}:Mine")
    assert not any("broken" in name for name in sys.modules if name.startswith("dsim_policy_"))


class Plain(BasePolicy):
    traits = Traits(cost_driven=False)

    def plan(self, view):
        return np.zeros(view.requests, dtype=np.int64)


class Tuned(Plain):
    def __init__(self, share: float = 0.5, mode: str = "x") -> None:
        self.share = share
        self.mode = mode


def test_base_policy_without_parameters():
    assert Plain().params() == {}
    assert repr(Plain()) == "Plain()"
    assert Plain() == Plain()


def test_base_policy_round_trips_through_its_repr():
    policy = Tuned(share=0.25, mode="y")
    assert repr(policy) == "Tuned(share=0.25, mode='y')"
    assert eval(repr(policy)) == policy
    assert policy != Tuned()
    assert policy != Plain()
    assert hash(policy) == hash(copy.deepcopy(policy))
    with pytest.raises(NotImplementedError, match="plan"):
        BasePolicy().plan(make_view([[0.5]], np.ones(3)))


def test_view_ages_and_survivals():
    view = make_view([[0.5, 0.5]], np.ones(4), history=([[1.0, 0.25]],), depth=2)
    assert view.survival(1).tolist() == [[1.0, 0.25]]
    assert view.aged(2).tolist() == [[1.0, 1.0]]  # a request that did not exist then
    assert view.survival().dtype == np.float32
    with pytest.raises(IndexError):
        view.survival(3)


def test_step_ms_holds_draft_and_host_time():
    view = make_view([[0.5, 0.5]], [0.0, 1.0, 2.0, 8.0, 9.0], draft_ms=0.5, prefill_tokens=1)
    view = view._replace(host_hidden_ms=4.0, host_exposed_ms=0.25)
    # Base 2: GPU 2.5, 8.5, 9.5 by admitted drafts; 4 ms of host work hide behind it, 0.25 do not.
    assert view.step_ms().tolist() == [4.25, 8.75, 9.75]


def test_a_nan_in_a_view_is_a_zero():
    nan = float("nan")
    view = make_view([[0.5, nan, 0.5]], np.ones(5), history=([[nan, 0.5, 0.5]],))
    assert view.confidence.tolist() == [[0.5, 0.0, 0.5]]
    assert view.survival().tolist() == [[0.5, 0.0, 0.0]]
    assert view.survival(1).tolist() == [[0.0, 0.0, 0.0]]


def test_steps_of_a_made_view():
    one = [[0.5]]
    # As many as there is history that was seen, or as told.
    assert make_view(one, np.ones(3)).step == 0
    assert make_view(one, np.ones(3), history=(one,), depth=2).age_steps.tolist() == [1]
    assert make_view(one, np.ones(3), history=(one,), step=7).age_steps.tolist() == [7]


def test_make_view_wants_a_matrix():
    with pytest.raises(InputError, match="confidence"):
        make_view([0.5, 0.5], np.ones(4))


def test_every_parameter_of_the_built_ins_has_a_default():
    for name in BUILTIN_POLICIES:
        parameters = inspect.signature(type(load_policy(name))).parameters.values()
        assert all(parameter.default is not inspect.Parameter.empty for parameter in parameters)


def test_the_contract_imports_no_policy():
    code = "import sys, dsim.policy, dsim.planning; sys.exit(any(m.split('.')[0] == 'policies' for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_examples_in_the_docstrings():
    result = doctest.testmod(dsim.policy)
    assert result.attempted >= 5
    assert result.failed == 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("    traits = Traits(confidence_age='a')\n", "traits.confidence_age"),
        ("    traits = Traits(needs_gamma=-1)\n", "traits.needs_gamma"),
        ("    def __init__(self):\n        1 / 0\n", "refused its parameters \\(ZeroDivisionError"),
        ("    def __init__(self):\n        raise SystemExit(0)\n", "refused its parameters \\(SystemExit"),
        (
            "    def __init__(self):\n        import threading\n        self.lock = threading.Lock()\n",
            "cannot be copied",
        ),
    ],
)
def test_policies_that_cannot_be_built_are_errors(tmp_path, body, message):
    path = tmp_path / "bad.py"
    path.write_text(f"from dsim.policy import BasePolicy, Traits\nclass Bad(BasePolicy):\n{body}")
    with pytest.raises(InputError, match=message):
        load_policy(f"{path}:Bad")


def test_a_file_that_exits_is_an_error_and_an_edited_one_is_read_again(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import sys; sys.exit(0)")
    with pytest.raises(InputError, match="SystemExit"):
        load_policy(f"{path}:Mine")
    for k in (1, 2):
        body = f"class Mine(Fixed):\n    def __init__(self):\n        super().__init__({k})\n"
        path.write_text(f"from policies.fixed import Fixed\n{body}")
        assert load_policy(f"{path}:Mine").k == k


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # Three tokens without drafts (a prompt's among them) and four drafts: seven tokens, eight prices.
        (
            {"verify_ms": np.ones(7)},
            r"'verify_ms': got \[7\], expected one price for each of 0\.\.7 tokens: 3 without drafts, 2 x 2",
        ),
        ({"verify_ms": np.ones((2, 8))}, r"'verify_ms': got \[2, 8\]"),
        ({"verify_ms": [9, 9, 9, 1, 1, 0, 1, 1]}, r"'verify_ms\[5\]': got 0\.0, expected a finite number > 0"),
        ({"verify_ms": [9, 9, 9, 1, 1, np.inf, 1, 1]}, r"'verify_ms\[5\]': got inf"),
        ({"confidence": [[0.5, 1.5], [1, 1]]}, r"'confidence': got 1\.5, expected probabilities of at most 1"),
        ({"history": ([[0.5, 0.5]],)}, r"'history\[0\]': got \(1, 2\), expected an array \[2, 2\]"),
        ({"caps": [3, 0]}, r"'caps': got \[3, 0\], expected 2 integers in 0\.\.2"),
        ({"caps": [-1, 0]}, r"'caps': got \[-1, 0\]"),
        ({"caps": [1.5, 0]}, r"'caps': got \[1\.5, 0\.0\]"),
        ({"caps": [1]}, r"'caps': got \[1\]"),
        ({"accepted": [0, 3]}, r"'accepted': got \[0, 3\]"),
        ({"prefill_tokens": -1}, r"'prefill_tokens': got -1"),
        ({"draft_ms": np.nan}, r"'draft_ms': got nan, expected a finite number >= 0"),
        ({"captured_sizes": [4, 2]}, r"'captured_sizes': got \[4, 2\], expected increasing integers >= 1"),
    ],
)
def test_views_that_no_step_has_are_refused(changes, message):
    good = {"confidence": np.full((2, 2), 0.5), "verify_ms": np.ones(8), "prefill_tokens": 1}
    make_view(**good)
    with pytest.raises(InputError, match=message):
        make_view(**good | changes)


def test_prices_below_the_step_and_beyond_it_do_not_matter():
    nan = float("nan")
    assert make_view([[0.5], [0.5]], [nan, nan, 1, 1, 1, nan]).base_tokens == 2
    assert make_view(np.empty((0, 5)), [0.0]).requests == 0


def test_a_view_has_prices_of_its_own():
    # A policy remembers what it makes of a curve by the array's identity: other captured sizes, another answer.
    prices, now = np.array([0.0, 8.0, 10.0, 11.0, 14.0, 20.0, 26.0]), [[0.5, 0.25], [0.75, 0.5]]
    policy = load_policy("vllm-adaptive")
    # Tokens a ms by drafts: 2 / 10, 2.75 / 14, 3.25 / 14, ... and 2 / 11, 2.75 / 11, 3.25 / 26, ...
    for sizes, lengths in (([2, 4, 6], [1, 1]), ([3, 6], [0, 1])):
        view = make_view(now, prices, history=(now,), captured_sizes=sizes)
        assert policy.plan(view).tolist() == lengths
    prices[:] = 1.0
    assert view.verify_ms[2] == 10.0
