"""The policy contract: what a verification policy sees, what it returns, and how it is found by name.

A policy decides, in every step, how many drafted tokens of each request the target model verifies. It is
a small class with one decision method; it never sees the simulator. This module imports no policy: names
are resolved by string when asked for.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from dsim.errors import InputError
from dsim.planning import allowed

FloatArray = npt.NDArray[np.float64]
Float32Array = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

#: Built-in policies by name. `module:Class`, imported only when the name is used.
BUILTIN_POLICIES: dict[str, str] = {
    "none": "policies.none:NoSpeculation",
    "fixed": "policies.fixed:Fixed",
    "threshold": "policies.threshold:Threshold",
    "dspark-alg1": "policies.dspark_alg1:DSparkAlgorithm1",
    "dspark": "policies.dspark:DSpark",
    "tetris": "policies.tetris:Tetris",
    "disco": "policies.disco:Disco",
    "batch-table": "policies.batch_table:BatchTable",
    "goodput": "policies.goodput:Goodput",
    "marginal": "policies.marginal:Marginal",
    "vllm-ascend": "policies.vllm_ascend:VllmAscend",
    "vllm-adaptive": "policies.vllm_adaptive:VllmAdaptive",
    "vllm-verify-adaptive": "policies.vllm_verify_adaptive:VllmVerifyAdaptive",
    "sglang": "policies.sglang:Sglang",
    "trtllm": "policies.trtllm:Trtllm",
    "atom": "policies.atom:Atom",
    "lab": "policies.lab:Lab",
    "oracle": "policies.oracle:Oracle",
}

ENTRY_POINT_GROUP = "dsim.policies"

_ZERO = np.float32(0)


@dataclass(frozen=True, slots=True)
class Traits:
    """What a policy declares about itself; the engine and `check_policy` hold it to that.

    Parameters
    ----------
    confidence_age
        Oldest confidences the policy reads, in engine steps (0: current only, 2: two steps old).
    cost_driven
        The decision depends on the price tables (`verify_ms`, `draft_ms`).
    floor
        Verify length that every request gets whatever the price.
    gain_guard
        Relative predicted gain below which the policy refuses to trim (0: none).
    pads_to_captured
        The policy fills the padding up to the next captured size, so it may admit tokens of no value.
    coarse_prices
        The policy prices steps by a table of few sizes, as its engine profiles them: what a token costs between
        two of them is hidden from it.
    clairvoyant
        The policy reads `PolicyView.accepted`, which no real engine knows before verification.
    lossless
        The policy claims to keep the target's output distribution (no unadmitted token decides).
    needs_gamma
        Smallest block that the policy can be used with (``fixed:k=5`` needs 5): a smaller one is an error,
        not a silent clip. An arm without drafts (gamma 0) is exempt.
    """

    confidence_age: int = 0
    cost_driven: bool = True
    floor: int = 0
    gain_guard: float = 0.0
    pads_to_captured: bool = False
    coarse_prices: bool = False
    clairvoyant: bool = False
    lossless: bool = True
    needs_gamma: int = 0

    def __post_init__(self) -> None:
        for name, high in (("confidence_age", 1024), ("floor", 64), ("needs_gamma", 64)):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= high:
                raise InputError(field=f"traits.{name}", value=value, expected=f"an integer in 0..{high}")
        if not isinstance(self.gain_guard, int | float) or not self.gain_guard >= 0:
            raise InputError(field="traits.gain_guard", value=self.gain_guard, expected="a number >= 0")


class PolicyView(NamedTuple):
    """Everything a policy may look at in one engine step. Read-only; R requests are in decode.

    Attributes
    ----------
    history
        ``history[n]`` is float32[R, gamma]: the conditional confidences c_{r,k} of `n` steps ago, request by
        request; ``history[0]`` is the current block. A request that did not exist then has c = 1 (what vLLM
        and SGLang assume). As deep as the policy's `Traits.confidence_age`. Never NaN (see `without_nan`).
    verify_ms
        float64[>= base_tokens + R * gamma + 1]: milliseconds of the target's forward pass, indexed by the
        number of tokens *in the whole step* (decode tokens, drafts and prefill chunks together).
    draft_ms
        Milliseconds the drafter took for this batch (already spent when the policy is asked).
    base_tokens
        Tokens the step holds before any draft is admitted: R plus the prefill chunks.
    sampling
        Requests that will produce a token in this step: R plus prompts whose last chunk is in it.
    caps
        int64[R]: most drafts that may be verified for each request (0..gamma).
    captured_sizes
        int64[S] ascending: token counts for which the engine holds a captured graph; may be empty.
    capture_limit
        Largest captured size; above it the engine runs eagerly. 0 where nothing is captured.
    host_hidden_ms, host_exposed_ms
        Host time that the GPU can hide and that it cannot (see `step_ms`).
    step, born
        Number of this step at the replica, and int64[R] that of each request's first one (see `age_steps`).
    slo_tpot_ms
        Latency target a token after the first (TPOT), milliseconds; NaN where there is none.
    produced, first_ns
        int64[R]: tokens each request has beyond its first, and when that came (see `slo_slack_ms`).
    queue_length
        Requests waiting for admission at this replica.
    time_s
        Simulated time, seconds.
    accepted
        int64[R]: drafts that the target would accept (useful ones, cut at the output's end). Only for
        policies whose traits say ``clairvoyant``; None for all others.
    caps_bind
        False where every cap is gamma, so that a policy need not look at them.

    Examples
    --------
    One request, two drafts, a step that costs 1 ms a token:

    >>> import numpy as np
    >>> view = make_view(np.array([[0.5, 0.5]]), verify_ms=np.arange(4.0))
    >>> view.requests, view.gamma, view.base_tokens
    (1, 2, 1)
    >>> view.survival().tolist()
    [[0.5, 0.25]]
    """

    history: tuple[Float32Array, ...]
    verify_ms: FloatArray
    draft_ms: float
    base_tokens: int
    sampling: int
    caps: IntArray
    captured_sizes: IntArray
    capture_limit: int
    host_hidden_ms: float
    host_exposed_ms: float
    step: int
    born: IntArray
    slo_tpot_ms: float
    produced: IntArray
    first_ns: IntArray
    queue_length: int
    time_s: float
    accepted: IntArray | None = None
    caps_bind: bool = True

    @property
    def confidence(self) -> Float32Array:
        """float32[R, gamma]: current conditional confidences."""
        return self.history[0]

    @property
    def requests(self) -> int:
        """R, the number of requests in decode."""
        return int(self.history[0].shape[0])

    @property
    def gamma(self) -> int:
        """Drafted tokens a request."""
        return int(self.history[0].shape[1])

    def aged(self, steps: int) -> Float32Array:
        """float32[R, gamma]: the confidences of `steps` steps ago."""
        return self.history[steps]

    def survival(self, steps: int = 0) -> Float32Array:
        """float32[R, gamma]: a_{r,j} = prod_{i<=j} c_{r,i} of `steps` steps ago; 0 beyond a request's cap."""
        confidence = self.history[steps]
        survival = np.multiply.accumulate(confidence, 1)
        return survival * allowed(self.caps, confidence.shape[1]) if self.caps_bind else survival

    @property
    def slo_slack_ms(self) -> FloatArray:
        """float64[R]: how far each request is ahead of its TPOT target, milliseconds; NaN without a target."""
        return np.asarray(self.produced * self.slo_tpot_ms - (self.time_s * 1e3 - self.first_ns * 1e-6))

    @property
    def age_steps(self) -> IntArray:
        """int64[R]: decode steps each request has been through."""
        return self.step - self.born

    def step_ms(self) -> FloatArray:
        """float64[max drafts + 1]: the whole step's duration by number of admitted drafts (host included)."""
        drafts = self.requests * self.gamma
        gpu = self.draft_ms + self.verify_ms[self.base_tokens : self.base_tokens + drafts + 1]
        return np.maximum(gpu, self.host_hidden_ms) + self.host_exposed_ms


@runtime_checkable
class Policy(Protocol):
    """A verification policy. See `docs/policies.md` for a complete 20-line one.

    A policy object belongs to one replica of one run: the engine deep-copies the object it is given, so a
    policy may keep state between calls.

    A policy may also have ``observe(verified, accepted)``, int64[R] each: the engine calls it when a step ends,
    in the order of that step's view, with the drafts verified of each request and the accepted ones among them
    (the leading run of them, those beyond the output's end included). It is told of a step before it plans the
    next one. What was not verified stays unknown, as in a real engine.
    """

    traits: Traits

    def plan(self, view: PolicyView) -> IntArray:
        """int[R]: how many drafts of each request to verify, 0 <= l_r <= caps[r] <= gamma."""
        ...


class BasePolicy:
    """Optional base: `repr`, equality and the command-line spec from the `__init__` keywords.

    Parameters are stored under their own names; that is all that a subclass has to do.
    """

    #: What every instance declares; one that depends on a parameter sets `self.traits` in `__init__`.
    traits: Traits = Traits()

    def plan(self, view: PolicyView) -> IntArray:
        raise NotImplementedError("a policy implements plan(view)")

    def params(self) -> dict[str, Any]:
        """Keyword arguments that rebuild this policy."""
        # The class's signature, not that of `__init__`: without one of its own it would be object's.
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def __repr__(self) -> str:
        args = ", ".join(f"{name}={value!r}" for name, value in self.params().items())
        return f"{type(self).__name__}({args})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and isinstance(other, BasePolicy) and self.params() == other.params()

    def __hash__(self) -> int:
        return hash(repr(self))


def without_nan(confidence: Float32Array) -> Float32Array:
    """The confidences as policies see them, in a new array: a NaN counts as 0 (and so does what is below 0).

    Its survival and that of all later drafts of the block is then 0, for every policy alike. Left as it is, a
    NaN would be the best candidate for one sort and the worst for another.

    >>> without_nan(np.array([[0.5, np.nan, 0.25]], dtype=np.float32)).tolist()
    [[0.5, 0.0, 0.25]]
    """
    return np.fmax(confidence, _ZERO)


def make_view(
    confidence: npt.ArrayLike,
    verify_ms: npt.ArrayLike,
    *,
    history: tuple[npt.ArrayLike, ...] = (),
    depth: int = 0,
    prefill_tokens: int = 0,
    draft_ms: float = 0.0,
    caps: npt.ArrayLike | None = None,
    captured_sizes: npt.ArrayLike = (),
    accepted: npt.ArrayLike | None = None,
    queue_length: int = 0,
    time_s: float = 0.0,
    slo_tpot_ms: float = float("nan"),
    step: int | None = None,
) -> PolicyView:
    """A view from a few arrays, for tests, notebooks and `check_policy`.

    Parameters
    ----------
    confidence
        [R, gamma] current confidences.
    verify_ms
        [> R + prefill_tokens + R * gamma] milliseconds by tokens in the step.
    history
        Older confidences, one step old first. Padded with ones up to `depth`.
    step
        Number of the step; all requests are there since step 0. By default as many steps as `history` holds, so
        that all of it was seen and the padding was not.

    Raises
    ------
    InputError
        Arrays that do not fit together, or values that no step has.
    """
    current = without_nan(np.asarray(confidence, dtype=np.float32))
    if current.ndim != 2:
        raise InputError(field="confidence", value=current.shape, expected="an array [requests, gamma]")
    requests, gamma = current.shape
    past = [without_nan(np.asarray(item, dtype=np.float32)) for item in history]
    _check_view(current, past, verify_ms, prefill_tokens, draft_ms, caps, captured_sizes, accepted)
    seen = len(past)
    while len(past) < depth:
        past.append(np.ones_like(current))
    sizes = np.asarray(captured_sizes, dtype=np.int64)
    limits = np.full(requests, gamma, dtype=np.int64) if caps is None else np.asarray(caps, dtype=np.int64)
    return PolicyView(
        history=(current, *past),
        # A copy: what policies remember of a price curve, they remember by the array's identity.
        verify_ms=np.array(verify_ms, dtype=np.float64),
        draft_ms=draft_ms,
        base_tokens=requests + prefill_tokens,
        sampling=requests,
        caps=limits,
        caps_bind=bool(np.any(limits < gamma)),
        captured_sizes=sizes,
        capture_limit=int(sizes[-1]) if sizes.size else 0,
        host_hidden_ms=0.0,
        host_exposed_ms=0.0,
        step=seen if step is None else step,
        born=np.zeros(requests, dtype=np.int64),
        slo_tpot_ms=slo_tpot_ms,
        produced=np.zeros(requests, dtype=np.int64),
        first_ns=np.zeros(requests, dtype=np.int64),
        queue_length=queue_length,
        time_s=time_s,
        accepted=None if accepted is None else np.asarray(accepted, dtype=np.int64),
    )


def _check_view(
    current: Float32Array,
    past: list[Float32Array],
    verify_ms: npt.ArrayLike,
    prefill_tokens: int,
    draft_ms: float,
    caps: npt.ArrayLike | None,
    captured_sizes: npt.ArrayLike,
    accepted: npt.ArrayLike | None,
) -> None:
    """Refuse what would be an index error, or nonsense, inside a policy."""
    requests, gamma = current.shape

    def need(good: object, field: str, value: object, expected: str) -> None:
        if not good:
            raise InputError(field=field, value=value, expected=expected)

    for field, array in (("confidence", current), *((f"history[{n}]", item) for n, item in enumerate(past))):
        need(array.shape == current.shape, field, array.shape, f"an array {list(current.shape)}, as the current one")
        most = float(array.max(initial=0.0))
        need(most <= 1, field, most, "probabilities of at most 1 (a NaN counts as 0)")
    need(prefill_tokens >= 0, "prefill_tokens", prefill_tokens, "an integer >= 0")
    need(0 <= draft_ms < np.inf, "draft_ms", draft_ms, "a finite number >= 0")
    prices, base = np.asarray(verify_ms, dtype=np.float64), requests + prefill_tokens
    last = base + requests * gamma
    shape = f"one price for each of 0..{last} tokens: {base} without drafts, {requests} x {gamma} drafts"
    need(prices.ndim == 1 and prices.size > last, "verify_ms", list(prices.shape), shape)
    used = prices[max(base, 1) : last + 1]
    wrong = ~(np.isfinite(used) & (used > 0))
    if wrong.any():
        place = max(base, 1) + int(np.argmax(wrong))
        need(False, f"verify_ms[{place}]", float(prices[place]), "a finite number > 0")
    for field, given in (("caps", caps), ("accepted", accepted)):
        if given is not None:
            counts = np.asarray(given)
            fits = counts.shape == (requests,) and (counts.dtype.kind in "iu" or not counts.size)
            fits = fits and bool(((counts >= 0) & (counts <= gamma)).all())
            need(fits, field, counts.tolist(), f"{requests} integers in 0..{gamma}")
    sizes = np.asarray(captured_sizes)
    rising = sizes.ndim == 1 and (not sizes.size or (sizes.dtype.kind in "iu" and sizes[0] >= 1))
    rising = rising and bool((np.diff(sizes) > 0).all())
    need(rising, "captured_sizes", sizes.tolist(), "increasing integers >= 1")


def parse_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """Split ``name:key=value,key=value`` into the name and typed parameters.

    The name may itself hold colons (``path/to/file.py:Class``); values are read as int, float, bool or text.

    >>> parse_spec("dspark:lag=2")
    ('dspark', {'lag': 2})
    >>> parse_spec("my/policy.py:Mine:floor=0.5,on=survival")
    ('my/policy.py:Mine', {'floor': 0.5, 'on': 'survival'})
    """
    head, _, tail = spec.rpartition(":")
    if not head or "=" not in tail:
        if "=" in spec:
            raise InputError(field="policy", value=spec, expected="NAME or NAME:key=value[,key=value]")
        return spec.strip(), {}
    params: dict[str, Any] = {}
    for item in tail.split(","):
        key, equals, text = item.partition("=")
        key = key.strip()
        if not equals or not key.isidentifier() or not text.strip():
            raise InputError(field="policy", value=spec, expected="NAME or NAME:key=value[,key=value]")
        if key in params:
            raise InputError(f"parameter '{key}' is given twice", field="policy", value=spec)
        params[key] = _parse_value(text.strip())
    return head.strip(), params


def _parse_value(text: str) -> int | float | bool | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text


def known_policies() -> dict[str, str]:
    """Names that resolve: built-ins, then what installed packages offer as entry points."""
    found = dict(BUILTIN_POLICIES)
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        found.setdefault(entry.name, entry.value)
    return found


def load_policy(spec: str) -> Policy:
    """Build a policy from a spec.

    Parameters
    ----------
    spec
        ``NAME[:key=value,...]``; NAME is a known name, ``package.module:Class`` or ``path/file.py:Class``.

    Raises
    ------
    InputError
        Unknown name (the known ones are listed), unknown or refused parameter, or not a policy.
    """
    name, params = parse_spec(spec)
    policy_class = _resolve(name)
    try:
        accepted = list(inspect.signature(policy_class).parameters)
    except ValueError as error:  # some built-in types have none
        raise InputError(f"'{name}' is not a policy", field="policy", value=spec) from error
    for key in params:
        if key not in accepted:
            expected = f"one of {', '.join(accepted)}" if accepted else "no parameters"
            raise InputError(f"policy '{name}' has no parameter '{key}'", field="policy", value=spec, expected=expected)
    try:
        policy = policy_class(**params)
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        what = f"policy '{name}' refused its parameters ({type(error).__name__}: {error})"
        raise InputError(what, field="policy", value=spec) from error
    if not isinstance(policy, Policy) or not isinstance(policy.traits, Traits):
        raise InputError(
            f"'{name}' is not a policy",
            field="policy",
            value=spec,
            expected="a class with traits and plan(view)",
        )
    try:
        copy.deepcopy(policy)
    except Exception as error:
        raise InputError(f"policy '{name}' cannot be copied ({error})", field="policy", value=spec) from error
    return policy


def policy_name(policy: object) -> str:
    """`repr` of a policy for messages; its class where that fails."""
    try:
        return repr(policy)
    except Exception:
        return type(policy).__name__


def length_out_of_bounds(policy: object, request: int, length: int, cap: int) -> InputError:
    """The error of a policy that wants more drafts of a request than it may have, or fewer than none."""
    return InputError(
        f"policy {policy_name(policy)} returned a verify length out of bounds for request {request}",
        field="verify length",
        value=length,
        expected=f"0..{cap}",
    )


def policy_module(spec: str) -> ModuleType:
    """The module that a spec names. Its policy's class may be defined elsewhere: what is called may be a function.

    Raises
    ------
    InputError
        As `load_policy`.
    """
    return _place(parse_spec(spec)[0])[0]


def _place(name: str) -> tuple[ModuleType, str, str]:
    """The module that a policy's name stands for, what it is called there, and what in it is meant."""
    # Built-in names come first; looking through all installed packages takes milliseconds.
    target = BUILTIN_POLICIES.get(name) or known_policies().get(name, name)
    module_name, colon, class_name = target.rpartition(":")
    if not colon:
        known = ", ".join(sorted(known_policies()))
        raise InputError(
            f"unknown policy '{name}'",
            field="policy",
            expected=f"one of {known}, package.module:Class or path/file.py:Class",
        )
    module = _load_file(Path(module_name)) if module_name.endswith(".py") else _load_module(module_name, name)
    return module, module_name, class_name


def _resolve(name: str) -> Callable[..., Any]:
    module, module_name, class_name = _place(name)
    try:
        found = getattr(module, class_name)
    except AttributeError:
        raise InputError(f"'{module_name}' has no class '{class_name}'", field="policy", value=name) from None
    if not callable(found):
        raise InputError(f"'{class_name}' is not a class", field="policy", value=name)
    return found  # type: ignore[no-any-return]


def _load_module(module_name: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except (ImportError, TypeError, ValueError) as error:  # the latter two: relative or empty names
        raise InputError(f"cannot import '{module_name}' ({error})", field="policy", value=name) from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError("policy file not found", file=path, field="policy")
    # By content, so that an edited file is loaded again.
    digest = hashlib.sha256(str(path.resolve()).encode() + path.read_bytes()).hexdigest()[:12]
    module_name = f"dsim_policy_{path.stem}_{digest}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise InputError("cannot be read as a Python module", file=path, field="policy")
    module = importlib.util.module_from_spec(spec)
    # Registered so that policy objects from the file can be pickled and copied in this process.
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise InputError(f"raised {type(error).__name__}: {error}", file=path, field="policy") from error
    return module
