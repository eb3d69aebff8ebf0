"""A batched speculative-decoding engine that runs on this machine: what the simulator's replica is a model of.

Requests join and leave the batch between steps. A step admits who waits, drafts for all requests in decode, asks a
dsim policy how many drafts of each to verify, and runs the target *once*, over the anchors, the verified drafts (of
each request its own number) and a chunk of the prompts; nothing is padded. Then rejection sampling decides
(`dsim.drafter.sampling.speculate`): drafts that were not verified decide about nothing, so the text has the target's
law under every policy that keeps to the rule of `dsim.drafter.live`.

The clock is read between the parts of every step (`PARTS`). What comes out are the simulator's own records
(`dsim.telemetry`), audited like those of a simulation and read by the same metrics.

Every random number is keyed by (seed, request, output position), never by when it is drawn: the same requests under the
same policy make the same steps again, however long they take.
"""

from __future__ import annotations

import copy
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dsim.accounts import Books, audit
from dsim.drafter.build import Drafter, check_target
from dsim.drafter.drafter import FINAL
from dsim.drafter.llama import Segment
from dsim.drafter.rows import CacheRows
from dsim.drafter.sampling import Drafts, Drawn, speculate
from dsim.drafter.target import LlamaTarget
from dsim.drafter.vocabulary import Vocabulary, batch_vocabulary, vocabulary_of
from dsim.drafts.calibrate import checked_temperatures
from dsim.drafts.luck import hash64_int, uniform
from dsim.errors import InputError
from dsim.policy import Policy, PolicyView, length_out_of_bounds, policy_name, without_nan
from dsim.prices import ArmPrices
from dsim.telemetry import Records, RequestLog, StepLog
from dsim.workload import ClosedLoop

Float32Array = npt.NDArray[np.float32]
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

#: Parts of a step. Every nanosecond of a run lies in one of them.
PARTS = (
    "draft",  # what the last pass said of the new text into the drafter's context, and the new blocks
    "plan",  # the policy, and what it looks at
    "verify",  # the target's pass (prompt chunks are in it) and rejection sampling
    "prefill",  # the prompts' chunks into the drafter's context
    "rest",  # admission, bookkeeping, the client
)


@dataclass(frozen=True)
class EngineOptions:
    """What an engine can hold, and how it samples.

    Parameters
    ----------
    max_requests
        Requests in the engine at once, decoding or prefilling.
    max_prompt, max_tokens
        Longest prompt; answers are cut at the second.
    prefill_chunk
        Prompt tokens in a step, of all prompts together; first come, first served.
    temperature
        Of target and drafter, > 0.
    seed
        Of all sampling.
    """

    max_requests: int
    max_prompt: int
    max_tokens: int
    prefill_chunk: int = 128
    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise InputError where a value makes no sense."""
        for name in ("max_requests", "max_prompt", "max_tokens", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise InputError(field=name, value=getattr(self, name), expected="an integer >= 1")
        if not 0 < self.temperature < math.inf:
            raise InputError(field="temperature", value=self.temperature, expected="a finite number > 0")
        if self.seed < 0:
            raise InputError(field="seed", value=self.seed, expected="an integer >= 0")


@dataclass(frozen=True)
class EngineRequest:
    """A prompt (in the target's tokens) with the number that its random numbers are keyed by, and its domain."""

    number: int
    prompt: tuple[int, ...]
    domain: int = 0


@dataclass(frozen=True)
class StepReport:
    """What a step did.

    Attributes
    ----------
    requests, prefill_tokens, drafts, accepted, committed, context_tokens
        As in `dsim.telemetry.STEP_COLUMNS`; `drafts` are the verified ones.
    first, finished
        Requests that got their first token, and their last one.
    ns
        Nanoseconds by part, in the order of `PARTS`.
    """

    requests: int
    prefill_tokens: int
    drafts: int
    accepted: int
    committed: int
    context_tokens: int
    first: tuple[int, ...]
    finished: tuple[int, ...]
    ns: tuple[int, ...]


class _Text:
    """A request in the engine: its text, and how far the caches are."""

    def __init__(self, request: EngineRequest, extra: Tensor) -> None:
        self.number = request.number
        self.tokens = list(request.prompt)
        self.prompt = len(request.prompt)
        self.extra = extra  # tokens of its prompt outside the drafter's own vocabulary
        self.done = 0  # prompt tokens processed
        #: States [gamma + 1, taps, H] of the latest pass from position `since` on; None: the context has them.
        self.states: Tensor | None = None
        self.since = 0
        self.past: tuple[Float32Array, ...] = ()  # its confidences, one step old first
        self.born = 0
        self.first_ns = 0

    @property
    def produced(self) -> int:
        """Output tokens."""
        return len(self.tokens) - self.prompt


class _Laps:
    """A stopwatch: every nanosecond goes to one part."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self.now = clock()
        self.ns = dict.fromkeys(PARTS, 0)

    def lap(self, part: str) -> None:
        """The time since the last lap was `part`."""
        now = self._clock()
        self.ns[part] += now - self.now
        self.now = now

    def take(self) -> tuple[int, ...]:
        """Nanoseconds by part since the last `take`."""
        found = tuple(self.ns.values())
        self.ns = dict.fromkeys(PARTS, 0)
        return found


class Engine:
    """The batch and its step. `serve_closed_loop` feeds it.

    Parameters
    ----------
    target
        Run by this project's own `Llama`, in float32.
    drafter
        For this target; None: no speculation.
    policy
        Decides the verify lengths; this engine works on its own copy. Ignored without a drafter.
    prices
        What the policy is told that steps cost; None: nothing is known, and policies that ask are refused.
    options
        Sizes and sampling.
    temperatures
        Divisors of the confidence logits by position (Sequential Temperature Scaling); none: 1.
    clock
        Nanoseconds.

    Raises
    ------
    InputError
        A drafter of another target, a policy that no real engine can run, or one without what it needs.
    """

    def __init__(
        self,
        target: LlamaTarget,
        drafter: Drafter | None,
        *,
        policy: Policy,
        prices: ArmPrices | None,
        options: EngineOptions,
        temperatures: Sequence[float] = (),
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        if target.head.dtype != torch.float32:
            raise InputError("the engine computes in float32", field="target", value=str(target.head.dtype))
        self.options, self.clock = options, clock
        self.gamma = 0 if drafter is None else drafter.config.gamma
        self._target, self._drafter = target, None if drafter is None else drafter.eval()
        self._first_policy, self._prices = copy.deepcopy(policy), prices
        if drafter is not None:
            check_target(drafter.config, target, "drafter")
            _check_policy(policy, self.gamma, prices)
        divisors = checked_temperatures(list(temperatures), self.gamma) if len(temperatures) else (1.0,) * self.gamma
        self._divisors = torch.tensor(divisors[: self.gamma], device=target.device)
        taps = () if drafter is None else drafter.config.taps
        self._layers = tuple(dict.fromkeys(tap for tap in taps if tap != FINAL))
        self._columns = [len(self._layers) if tap == FINAL else self._layers.index(tap) for tap in taps]
        self._own = torch.empty(0, dtype=torch.int64) if drafter is None else drafter.vocabulary_head.tokens
        self._static = vocabulary_of(self._own, target.vocab_size)
        self._draft_seed, self._accept_seed, self._next_seed = (hash64_int(options.seed, n) for n in range(3))
        # A block is written behind the longest text.
        capacity = options.max_prompt + options.max_tokens + self.gamma + 1
        self._rows = CacheRows(target, capacity, options.max_requests)
        self._rows.place(range(options.max_requests))  # all of its memory at once
        for number in range(options.max_requests):
            self._rows.release(number)
        self._waiting: deque[EngineRequest] = deque()
        self._prefilling: list[_Text] = []
        self._running: list[_Text] = []  # in the order of their rows
        self._vocabulary: tuple[Vocabulary, Tensor | None] | None = None
        #: Output tokens of the requests that have ended.
        self.texts: dict[int, list[int]] = {}
        self.clear()

    def clear(self) -> None:
        """Forget all requests and start the clock; what the policy remembers goes too."""
        for text in [*self._running, *self._prefilling]:
            self._rows.release(text.number)
        self._waiting.clear()
        self._prefilling, self._running = [], []
        self._vocabulary, self._step = None, 0
        self._policy = copy.deepcopy(self._first_policy)
        self._laps = _Laps(self.clock)
        self.texts = {}

    def fill(self, requests: Sequence[EngineRequest], context: int) -> None:
        """Clear, and put these requests into decode, with texts of so many tokens: to time a step of a given size.

        The texts repeat the prompts. What stands in the caches is left there: no time depends on its values.

        Raises
        ------
        InputError
            More requests than the engine holds, or texts that its caches do not hold.
        """
        self.clear()
        longest = self.options.max_prompt + self.options.max_tokens - 1
        for name, value, low, most in (
            ("requests", len(requests), 1, self.options.max_requests),
            ("context", context, 2, longest),
        ):
            if not low <= value <= most:
                raise InputError(field=name, value=value, expected=f"{low} to {most}")
        for request in requests:
            text = self._placed(request)
            text.tokens = [request.prompt[i % len(request.prompt)] for i in range(context)]
            text.prompt = text.done = context - 1
            if self._drafter is not None:
                shape = (self.gamma + 1, len(self._columns), self._target.hidden_size)
                text.states, text.since = torch.ones(shape, device=self._target.device), context - 2
            self._prefilling.append(text)
        joined, self._prefilling = self._prefilling, []
        self._recompose(joined, (), ())
        if self._drafter is not None:
            self._vocabulary = self._batch_vocabulary()
        self._laps = _Laps(self.clock)

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._waiting or self._prefilling or self._running)

    @property
    def now_ns(self) -> int:
        """When the last step ended (or the engine was cleared), on its clock."""
        return self._laps.now

    def submit(self, request: EngineRequest) -> None:
        """A request has arrived; it joins before the next step that has room.

        Raises
        ------
        InputError
            An empty prompt, or one that is longer than the engine holds.
        """
        if not 1 <= len(request.prompt) <= self.options.max_prompt:
            raise InputError(
                f"request {request.number} does not fit",
                field="prompt",
                value=f"{len(request.prompt)} tokens",
                expected=f"1 to max_prompt = {self.options.max_prompt}",
            )
        self._waiting.append(request)

    # -- the step --------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> StepReport:
        """Admit, draft, plan, verify, commit."""
        laps = self._laps
        self._admit()
        chunks = self._chunks()
        running = self._running
        context = self._mean_context()
        laps.lap("rest")
        drafts, lengths = None, [0] * len(running)
        prompt_tokens = sum(length for _, length in chunks)
        if running and self._drafter is not None:
            drafts, confidence = self._draft(self._drafter)
            laps.lap("draft")
            finishing = sum(text.done + length == text.prompt for text, length in chunks)
            lengths = self._plan(confidence, len(running) + prompt_tokens, len(running) + finishing, context)
            laps.lap("plan")
        accepted, following, states = self._verify(drafts, lengths, chunks)
        laps.lap("verify")
        joining = self._end_chunks(chunks, following[len(running) :], states)
        laps.lap("prefill")
        if drafts is not None:
            self._tell(lengths, accepted)
        return self._commit(drafts, lengths, accepted, following, joining, prompt_tokens, context)

    def _admit(self) -> None:
        while self._waiting and len(self._running) + len(self._prefilling) < self.options.max_requests:
            self._prefilling.append(self._placed(self._waiting.popleft()))

    def _placed(self, request: EngineRequest) -> _Text:
        """A request with a row of the caches."""
        self._rows.place([request.number])
        prompt = self._ids(request.prompt)
        return _Text(request, torch.unique(prompt[self._static.local[prompt] >= self._static.static]))

    def _chunks(self) -> list[tuple[_Text, int]]:
        """The step's prompt tokens: prompts in their order, each as much as is left of the chunk."""
        left, chunks = self.options.prefill_chunk, []
        for text in self._prefilling:
            length = min(text.prompt - text.done, left)
            if length == 0:
                break
            chunks.append((text, length))
            left -= length
        return chunks

    def _mean_context(self) -> float:
        texts = self._running or self._prefilling
        return sum(len(text.tokens) for text in texts) / max(1, len(texts))

    def _draft(self, drafter: Drafter) -> tuple[Drafts, Float32Array]:
        """A block for every request in decode: the drafts, and float32[R, gamma] confidences."""
        running, gamma = self._running, self.gamma
        pending = [text for text in running if text.states is not None]
        if pending:
            states = torch.stack([text.states for text in pending if text.states is not None])
            tokens = [(text.tokens[text.since :] + [0] * (gamma + 2))[: gamma + 2] for text in pending]
            self._remember(drafter, pending, states, tokens, [text.since for text in pending])
            for text in pending:
                text.states = None
        if self._vocabulary is None:
            self._vocabulary = self._batch_vocabulary()
        vocabulary, allowed = self._vocabulary
        number = np.array([text.number for text in running])[:, None]
        position = np.array([text.produced for text in running])[:, None]
        u = torch.from_numpy(uniform(self._draft_seed, number, position, np.arange(gamma)[None]))
        drawn = Drawn(u.to(self._target.device), allowed)
        anchors = self._ids([text.tokens[-1] for text in running])
        seen = self._ids([len(text.tokens) - 1 for text in running])
        context = self._rows.read([self._rows[text.number] for text in running], int(seen.max()))
        block = drafter.draft(context, anchors, seen, vocabulary, self.options.temperature, drawn)
        confidence = torch.sigmoid(block.confidence_logit.float() / self._divisors)
        return Drafts(block.tokens, block.local, drawn.laws, vocabulary.tokens), confidence.cpu().numpy()

    def _batch_vocabulary(self) -> tuple[Vocabulary, Tensor | None]:
        return batch_vocabulary(self._own, self._target.vocab_size, [text.extra for text in self._running])

    def _plan(self, confidence: Float32Array, base: int, sampling: int, context: float) -> list[int]:
        """The policy's verify lengths."""
        running, depth = self._running, self._policy.traits.confidence_age
        current = without_nan(confidence)
        history = [current]
        for age in range(depth):
            history.append(np.stack([text.past[age] for text in running]))
        for text, now in zip(running, current, strict=True):
            text.past = (now, *text.past)[:depth]
        for item in history:
            item.flags.writeable = False
        prices, count = self._prices, len(running)
        view = PolicyView(
            history=tuple(history),
            verify_ms=_UNKNOWN if prices is None else prices.verify(count, context)[1],
            draft_ms=0.0 if prices is None else prices.draft_ns[count] * 1e-6,
            base_tokens=base,
            sampling=sampling,
            caps=np.full(count, self.gamma, dtype=np.int64),
            captured_sizes=np.empty(0, dtype=np.int64) if prices is None else prices.captured_sizes,
            capture_limit=0 if prices is None else prices.capture_limit,
            host_hidden_ms=0.0 if prices is None else prices.host_hidden_ns[count] * 1e-6,
            host_exposed_ms=0.0 if prices is None else prices.host_exposed_ns[count] * 1e-6,
            step=self._step,
            born=np.array([text.born for text in running], dtype=np.int64),
            slo_tpot_ms=math.nan,
            produced=np.array([text.produced - 1 for text in running], dtype=np.int64),
            first_ns=np.array([text.first_ns for text in running], dtype=np.int64),
            queue_length=len(self._waiting),
            time_s=self._laps.now * 1e-9,
            caps_bind=False,
        )
        return _checked_lengths(self._policy.plan(view), self._policy, [text.number for text in running], self.gamma)

    def _verify(
        self, drafts: Drafts | None, lengths: list[int], chunks: Sequence[tuple[_Text, int]]
    ) -> tuple[list[int], list[int], Tensor]:
        """The target's pass and what it accepts.

        Returns
        -------
        accepted, following
            By request in decode, then (of `following`) by chunk: accepted drafts, and the token after them. That of a
            chunk which does not end its prompt means nothing.
        states
            [prompt tokens, taps, H]: of the chunks. Those of the requests in decode are put beside their texts.
        """
        running = self._running
        segments = [
            Segment(self._rows[text.number], len(text.tokens) - 1, 1 + length)
            for text, length in zip(running, lengths, strict=True)
        ] + [Segment(self._rows[text.number], text.done, length) for text, length in chunks]
        blocks = [] if drafts is None else drafts.tokens.tolist()
        tokens = [
            token
            for index, (text, length) in enumerate(zip(running, lengths, strict=True))
            for token in (text.tokens[-1], *(blocks[index][:length] if length else ()))
        ]
        decoded = len(tokens)
        for text, length in chunks:
            tokens += text.tokens[text.done : text.done + length]
        features, hidden = self._target.packed(self._ids(tokens), segments, self._rows.cache, self._layers)
        # No logits for a prompt's tokens but its last one's.
        ends = decoded - 1 + np.cumsum([length for _, length in chunks], dtype=np.int64)
        scored = torch.cat([hidden[:decoded], hidden[torch.from_numpy(ends)]]) if chunks else hidden
        logits = self._target.logits(scored).div_(self.options.temperature)
        number = np.array([text.number for text in [*running, *(text for text, _ in chunks)]])
        position = np.array([text.produced for text in running] + [0] * len(chunks))
        u_next = torch.from_numpy(uniform(self._next_seed, number, position))
        count, k = len(running), np.arange(self.gamma)[None]
        u_accept = torch.from_numpy(uniform(self._accept_seed, number[:count, None], position[:count, None], k))
        accepted, following = speculate(logits, [*lengths, *([0] * len(chunks))], drafts, u_accept, u_next)
        if self._drafter is not None:
            features = torch.cat([features, hidden[:, None]], dim=1)[:, self._columns]
            if running:
                self._keep_states(features, lengths)
        return accepted[:count].tolist(), following.tolist(), features[decoded:]

    def _keep_states(self, features: Tensor, lengths: list[int]) -> None:
        """Beside each text, what the pass said of its anchor and drafts; always gamma + 1, the last ones repeated."""
        count = np.array(lengths)
        first = np.cumsum(1 + count) - 1 - count
        index = first[:, None] + np.minimum(np.arange(self.gamma + 1)[None], count[:, None])
        for text, states in zip(self._running, features[torch.from_numpy(index)], strict=True):
            text.states, text.since = states, len(text.tokens) - 1

    def _end_chunks(
        self, chunks: Sequence[tuple[_Text, int]], following: Sequence[int], states: Tensor
    ) -> list[tuple[_Text, int]]:
        """The drafter's context of the chunks; prompts that are processed, each with its first token."""
        joining, at = [], 0
        for (text, length), token in zip(chunks, following, strict=True):
            whole = text.done + length == text.prompt
            if self._drafter is not None:
                seen = [*text.tokens, token][text.done : text.done + length + 1]
                self._remember(self._drafter, [text], states[None, at : at + length], [seen], [text.done])
            text.done += length
            at += length
            if whole:
                joining.append((text, token))
        return joining

    def _remember(
        self, drafter: Drafter, texts: Sequence[_Text], states: Tensor, tokens: list[list[int]], since: list[int]
    ) -> None:
        """The drafter's context from states [R, S, taps, H] at positions `since` on, and tokens [R, S + 1]."""
        start = self._ids(since)
        rows = self._ids([self._rows[text.number] for text in texts])
        self._rows.write(rows, start, drafter.prepare(states, self._ids(tokens), first=start))

    def _tell(self, lengths: list[int], accepted: list[int]) -> None:
        feedback = getattr(self._policy, "observe", None)
        if feedback is not None:
            feedback(np.array(lengths, dtype=np.int64), np.array(accepted, dtype=np.int64))

    def _commit(
        self,
        drafts: Drafts | None,
        lengths: list[int],
        accepted: list[int],
        following: list[int],
        joining: list[tuple[_Text, int]],
        prompt_tokens: int,
        context: float,
    ) -> StepReport:
        running = self._running
        blocks = [[] for _ in running] if drafts is None else drafts.tokens.tolist()
        committed, finished = 0, []
        for text, block, gained, token in zip(running, blocks, accepted, following, strict=False):
            before = len(text.tokens)
            if self._extend(text, [*block[:gained], token]):
                finished.append(text)
            committed += len(text.tokens) - before
        decoding = len(running)
        if running:
            self._step += 1
        joined = [text for text, token in joining if not self._extend(text, [token])]
        finished += [text for text, _ in joining if text not in joined]
        first = tuple(text.number for text, _ in joining)
        if finished or joining:
            self._recompose(joined, finished, first)
        self._laps.lap("rest")
        for text in joined:
            text.first_ns = self._laps.now
        return StepReport(
            requests=decoding,
            prefill_tokens=prompt_tokens,
            drafts=sum(lengths),
            accepted=sum(accepted),
            committed=committed,
            context_tokens=round(context * decoding),
            first=first,
            finished=tuple(text.number for text in finished),
            ns=self._laps.take(),
        )

    def _extend(self, text: _Text, tokens: Sequence[int]) -> bool:
        """More of a text, up to its end; whether it has ended."""
        for token in tokens:
            text.tokens.append(token)
            if token in self._target.eos or text.produced >= self.options.max_tokens:
                return True
        return False

    def _recompose(self, joined: Sequence[_Text], finished: Sequence[_Text], first: Sequence[int]) -> None:
        gone = {text.number for text in finished}
        self._prefilling = [text for text in self._prefilling if text.number not in first]
        unknown = np.ones(self.gamma, dtype=np.float32)
        for text in joined:
            text.born = self._step
            text.past = (unknown,) * self._policy.traits.confidence_age
        together = [text for text in [*self._running, *joined] if text.number not in gone]
        self._running = sorted(together, key=lambda text: self._rows[text.number])
        self._vocabulary = None
        for text in finished:
            self._rows.release(text.number)
            self.texts[text.number] = text.tokens[text.prompt :]

    def _ids(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._target.device)


#: Prices of an engine that knows none; no policy that is let in looks at them.
_UNKNOWN: FloatArray = np.full(1 << 16, np.nan)
_UNKNOWN.flags.writeable = False


def _check_policy(policy: Policy, gamma: int, prices: ArmPrices | None) -> None:
    traits, name = policy.traits, policy_name(policy)
    if traits.clairvoyant:
        raise InputError(f"policy {name} knows what will be accepted: no real engine does", field="policy")
    if gamma < traits.needs_gamma:
        raise InputError(
            f"policy {name} needs longer blocks", field="gamma", value=gamma, expected=f">= {traits.needs_gamma}"
        )
    if traits.cost_driven and prices is None:
        raise InputError(f"policy {name} decides by prices", field="prices", expected="those of a profile")


def _checked_lengths(lengths: object, policy: Policy, numbers: Sequence[int], gamma: int) -> list[int]:
    array = np.asarray(lengths)
    if array.shape != (len(numbers),) or not np.issubdtype(array.dtype, np.integer):
        raise InputError(
            f"policy {policy_name(policy)} returned no verify lengths",
            field="plan(view)",
            value=f"{array.dtype}{list(array.shape)}",
            expected=f"an integer array [{len(numbers)}]",
        )
    found: list[int] = array.tolist()
    for number, length in zip(numbers, found, strict=True):
        if not 0 <= length <= gamma:
            raise length_out_of_bounds(policy, number, length, gamma)
    return found


# -- a closed loop ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineRun:
    """A measured run.

    Attributes
    ----------
    records
        As of a simulated one; all requests are scored, ramp and drain are inside.
    parts
        By name of `PARTS`: int64[steps], nanoseconds.
    texts
        Output tokens of the requests, in the order in which they were asked.
    """

    records: Records
    parts: dict[str, IntArray]
    texts: tuple[tuple[int, ...], ...]


def serve_closed_loop(
    engine: Engine,
    requests: Sequence[EngineRequest],
    users: int,
    *,
    progress: Callable[[int, int], object] = lambda tokens, answered: None,
) -> EngineRun:
    """A benchmark client: `users` requests at once until all are answered, the next one when one ends.

    Parameters
    ----------
    engine
        Is cleared first.
    requests
        In the order in which they are asked; their numbers are distinct.
    users
        At most the engine's requests.
    progress
        Called after every step with the output tokens that it made, and the requests answered so far. What it takes is
        time of the next step, unless the engine's clock is stopped for it.

    Raises
    ------
    InputError
        More users than the engine or the requests allow, or a number twice.
    RuntimeError
        The records do not add up.
    """
    most = min(engine.options.max_requests, len(requests))
    if not 1 <= users <= most:
        raise InputError(field="users", value=users, expected=f"1 to {most} (max_requests, and the requests)")
    index = {request.number: i for i, request in enumerate(requests)}
    if len(index) < len(requests):
        raise InputError("a request number stands there twice", field="requests", expected="distinct numbers")
    engine.clear()
    steps, log, rows = StepLog(), RequestLog(), []
    start = engine.now_ns
    busy = area = asked = 0

    def issue(now: int) -> None:
        nonlocal asked
        if asked < len(requests):
            engine.submit(requests[asked])
            log.add(now, len(requests[asked].prompt), 0, requests[asked].domain)
            log.replica[asked] = 0
            asked += 1

    for _ in range(users):
        issue(0)
    ended = now = 0
    while engine.busy:
        held = asked - ended
        report = engine.step()
        before, now = now, engine.now_ns - start
        step_ns = sum(report.ns)
        busy, area = busy + step_ns, area + held * (now - before)
        tokens = report.requests + report.prefill_tokens + report.drafts
        steps.append(
            (
                now, step_ns, 0, report.requests, report.prefill_tokens, report.drafts, report.accepted,
                report.committed, len(report.first), tokens, 0, report.context_tokens,
            )
        )  # fmt: skip
        rows.append(report.ns)
        for number in report.first:
            log.first_ns[index[number]] = now
        for number in report.finished:
            i = index[number]
            log.finish_ns[i] = now
            log.output_tokens[i] = log.generated_tokens[i] = len(engine.texts[number])
            ended += 1
            issue(now)
        progress(report.committed + len(report.first), ended)
    books = Books(end_ns=now, held=0, busy_ns=(busy,), area_ns=area, longest_prefill=0, left_contexts=False)
    records = Records(
        steps=steps.table(),
        requests=log.table(),
        scored=(0, len(requests)),
        window_ns=(0, now),
        end_ns=now,
        replicas=1,
        gpus=1,
        colocated=True,
        extrapolated=False,
    )
    audit(records, books, ClosedLoop(users=users, scored=len(requests), steady=False))
    table = np.array(rows, dtype=np.int64).reshape(-1, len(PARTS))
    texts = tuple(tuple(engine.texts[request.number]) for request in requests)
    return EngineRun(records, {name: table[:, i] for i, name in enumerate(PARTS)}, texts)
