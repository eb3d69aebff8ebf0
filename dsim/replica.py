"""One model replica: continuous batching, speculative steps, KV blocks. The step loop is `Replica.run`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import simpy

from dsim.drafts.source import DraftSource
from dsim.errors import InputError
from dsim.options import ReplicaConfig, blocks_needed, does_not_fit, too_large
from dsim.policy import Policy, PolicyView, length_out_of_bounds, policy_name, without_nan
from dsim.prices import ArmPrices
from dsim.telemetry import RequestLog, StepLog

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

# Rows of the replica's state: one column a request in decode, in order of admission. A request is at output
# position _POSITION; _LEFT is minus the tokens it still has to produce, so one addition advances both.
_ID, _POSITION, _LEFT, _CONTEXT, _BORN, _FIRST = range(6)
# Batches up to this size are summed and checked with Python's own functions.
_FEW = 12
_LENGTH_DTYPE = np.dtype(np.int64)


@dataclass(slots=True)
class _Prompt:
    """A request whose prompt is being processed in chunks."""

    request: int
    left: int


class Replica:
    """A batch of requests and the loop that steps it.

    Parameters
    ----------
    env, index
        SimPy environment, and the replica's number.
    config, prices, drafts, policy
        Engine options; prices; draft source (None: no drafter runs); policy (this replica's own copy).
    steps, requests
        The logs of the run.
    on_finish
        Called with the request's number when its last token is out.
    slo_tpot_ms
        TPOT target that policies may look at; NaN: none.
    on_preempt
        Called with the request's number when it lost its KV blocks (disaggregated: its prompt is processed again
        elsewhere).
    """

    def __init__(
        self,
        env: simpy.Environment,
        index: int,
        config: ReplicaConfig,
        prices: ArmPrices,
        drafts: DraftSource | None,
        policy: Policy,
        steps: StepLog,
        requests: RequestLog,
        on_finish: Callable[[int], None],
        on_preempt: Callable[[int], None],
        slo_tpot_ms: float = math.nan,
    ) -> None:
        self.env, self.index, self.config, self.prices = env, index, config, prices
        self.drafts, self.policy, self.steps, self.requests = drafts, policy, steps, requests
        self.on_finish, self.on_preempt = on_finish, on_preempt
        self.slo_tpot_ms = slo_tpot_ms
        self.gamma = 0 if drafts is None else drafts.gamma
        # Optional method of a draft source: what became of the drafts.
        self._observe: Callable[[IntArray, IntArray, IntArray, IntArray], None] | None
        self._observe = getattr(drafts, "observe", None)
        # The same of a policy: it knows the rows of its own view, not which requests they are.
        self._feedback: Callable[[IntArray, IntArray], None] | None = getattr(policy, "observe", None)
        self.waiting: deque[int] = deque()
        self.prefilling: list[_Prompt] = []
        self.outstanding_tokens = 0  # prompt and output tokens not yet processed, for the router
        self.busy_ns = 0
        self._wake: simpy.Event | None = None
        self._ahead = config.admit_ahead
        self._state = np.zeros((6, config.max_seqs), dtype=np.int64)
        self._seen_state = _frozen(self._state.view())
        self._count = 0
        self._depth = policy.traits.confidence_age
        self._clairvoyant = policy.traits.clairvoyant
        self._unknown = np.ones((1, self.gamma), dtype=np.float32)
        empty = np.ones((0, self.gamma), dtype=np.float32)
        self._history = (empty,) * self._depth  # one step old first, as deep as the policy reads
        self._step = 0
        self._captured_sizes, self._capture_limit = prices.captured_sizes, prices.capture_limit
        self._draft_ms, self._host_hidden_ms, self._host_exposed_ms = (
            [ns * 1e-6 for ns in column] for column in (prices.draft_ns, prices.host_hidden_ns, prices.host_exposed_ns)
        )
        # The prices of all steps, where they depend on neither requests nor context.
        self._table = prices.verify(0, 0.0) if prices.one_table else None
        self._reserved_worst = 0  # KV blocks if every admitted request ran to its end
        # No request ends within this many tokens: the exact check is made only when it runs out.
        self._sure_tokens = 0
        self._full_caps = np.full(config.max_seqs, self.gamma, dtype=np.int64)
        self._full_caps.flags.writeable = False
        self._all_ones = np.ones(config.max_seqs, dtype=np.int64)
        self._reslice()

    # -- what the cluster calls ------------------------------------------------------------------------

    def enqueue(self, request: int, *, front: bool = False) -> None:
        """A request has arrived (disaggregated: with its prompt processed)."""
        log = self.requests
        prompt, output = log.prompt_tokens[request], log.output_tokens[request]
        if self._blocks(prompt + output) > self.config.kv_blocks:
            raise too_large(self.config, request, prompt, output, self.gamma)
        log.replica[request] = self.index
        if front:
            self.waiting.appendleft(request)
        else:
            self.waiting.append(request)
            self.outstanding_tokens += log.output_tokens[request] - log.generated_tokens[request]
            if self.config.colocated:
                self.outstanding_tokens += log.prompt_tokens[request]
        if self._wake is not None and not self._wake.triggered:
            self._wake.succeed()

    def in_flight(self) -> int:
        """Requests that this replica holds."""
        return self._count + len(self.prefilling) + len(self.waiting)

    # -- the step loop ---------------------------------------------------------------------------------

    def run(self) -> Generator[simpy.Event, Any, None]:
        """SimPy process: admit, draft, plan, wait for the step's time, commit."""
        timeout = self.env.timeout
        while True:
            if self.waiting and not (self._ahead and (self._count or self.prefilling)):
                self._admit()
            if not self._count and not self.prefilling:
                self._wake = self.env.event()
                yield self._wake
                self._wake = None
                continue
            if self._reserved_worst > self.config.kv_blocks:
                self._make_room()
            prefill_tokens, finishing = self._chunk() if self.prefilling else (0, 0)
            running = self._count
            base = running + prefill_tokens
            context = self._mean_context()
            verify_ns, verify_ms = self._table or self.prices.verify(running, context)
            accepted: IntArray | None = None
            lengths: IntArray | None = None
            drafts = draft_ns = 0
            if running and self.gamma:
                accepted, lengths, drafts = self._plan(base, running + finishing, verify_ms)
                draft_ns = self.prices.draft_ns[running]
            gpu_ns = draft_ns + verify_ns[base + drafts]
            step_ns = max(gpu_ns, self.prices.host_hidden_ns[running]) + self.prices.host_exposed_ns[running]
            if self._ahead and self.waiting:
                self._admit()  # for the step after this one
            yield timeout(step_ns)
            self._commit(step_ns, context, prefill_tokens, finishing, drafts, accepted, lengths)

    def _plan(self, base: int, sampling: int, verify_ms: FloatArray) -> tuple[IntArray, IntArray, int]:
        """Draft for the requests in decode and ask the policy: accepted int64[R], lengths int64[R], their sum."""
        assert self.drafts is not None
        running = self._count
        confidence, accepted = self.drafts.draft(self._ids, self._positions)
        confidence = without_nan(confidence)
        confidence.flags.writeable = False
        seen = (confidence, *self._history)
        self._history = seen[: self._depth]
        caps, caps_bind = self._caps, False
        if self.config.clip_to_remaining:
            caps, caps_bind = np.minimum(caps, -1 - self._left), True
        view = PolicyView(
            seen,
            verify_ms,
            self._draft_ms[running],
            base,
            sampling,
            caps,
            self._captured_sizes,
            self._capture_limit,
            self._host_hidden_ms[running],
            self._host_exposed_ms[running],
            self._step,
            self._seen_born,
            self.slo_tpot_ms,
            self._seen_positions,
            self._seen_first,
            len(self.waiting),
            self.env.now * 1e-9,
            np.minimum(accepted, -1 - self._left) if self._clairvoyant else None,
            caps_bind,
        )
        try:
            lengths = self.policy.plan(view)
        except InputError as error:
            # A policy knows neither its name nor its arm: a pinned table that is too small, for example.
            what = f"policy {policy_name(self.policy)}" + (f": {error.message}" if error.message else "")
            raise InputError(
                what, file=error.file, line=error.line, field=error.field, value=error.value, expected=error.expected
            ) from error
        except (Exception, SystemExit) as error:
            # A policy that exits would otherwise end the whole run, and successfully.
            raise InputError(
                f"policy {policy_name(self.policy)} raised {type(error).__name__}: {error}", field="plan(view)"
            ) from error
        if type(lengths) is not np.ndarray or lengths.shape != (running,) or lengths.dtype != _LENGTH_DTYPE:
            lengths = self._coerce(lengths, running)
        if running <= _FEW and not caps_bind:
            # Python's own sum and extremes of a short list cost a fifth of three NumPy calls.
            values = lengths.tolist()
            drafts, valid = sum(values), min(values) >= 0 and max(values) <= self.gamma
        else:
            drafts = int(lengths.dot(self._ones))
            # One comparison for both bounds: a negative length is huge as an unsigned number.
            valid = not np.count_nonzero(lengths.view(np.uint64) > caps.view(np.uint64))
        if not valid:
            worst = int(np.flatnonzero((lengths < 0) | (lengths > caps))[0])
            raise length_out_of_bounds(self.policy, int(self._ids[worst]), int(lengths[worst]), int(caps[worst]))
        return accepted, lengths, drafts

    def _coerce(self, lengths: Any, running: int) -> IntArray:
        try:
            array = np.asarray(lengths)
        except ValueError:
            array = np.empty(0)
        if array.shape != (running,) or not np.issubdtype(array.dtype, np.integer):
            raise InputError(
                f"policy {policy_name(self.policy)} returned no verify lengths",
                field="plan(view)",
                value=f"{array.dtype}{list(array.shape)}",
                expected=f"an integer array [{running}]",
            )
        return array.astype(np.int64)

    def _tell(self, verified: IntArray, accepted: IntArray) -> None:
        """Tell the policy what became of the drafts that it had verified."""
        assert self._feedback is not None
        try:
            self._feedback(verified, accepted)
        except InputError:
            raise
        except (Exception, SystemExit) as error:
            raise InputError(
                f"policy {policy_name(self.policy)} raised {type(error).__name__}: {error}",
                field="observe(verified, accepted)",
            ) from error

    def _commit(
        self,
        step_ns: int,
        context: float,
        prefill_tokens: int,
        finishing: int,
        drafts: int,
        accepted: IntArray | None,
        lengths: IntArray | None,
    ) -> None:
        """The step is over: advance every request, cut it at its output length, record."""
        now = int(self.env.now)
        running = self._count
        hits = 0
        committed = running
        done: IntArray | None = None
        if running:
            if accepted is None or lengths is None:
                self._progress += 1
            else:
                gained = np.minimum(accepted, lengths)
                if self._observe is not None:
                    # Copies: the source may keep them, and the state moves on.
                    self._observe(self._ids.copy(), self._positions.copy(), lengths.copy(), gained.copy())
                if self._feedback is not None:
                    self._tell(lengths.copy(), gained.copy())
                hits = sum(gained.tolist()) if running <= _FEW else int(gained.dot(self._ones))
                gained += 1
                committed += hits
                self._progress += gained
            self._step += 1
            self._sure_tokens -= 1 + self.gamma
            if self._sure_tokens <= 0:
                self._sure_tokens = -int(self._left.max())
                if self._sure_tokens <= 0:
                    done = np.flatnonzero(self._left >= 0)
                    committed -= int(self._left[done].sum())  # what lies beyond the cut
        self.busy_ns += step_ns
        self.outstanding_tokens -= committed + prefill_tokens + finishing
        self.steps.append(
            (
                now,
                step_ns,
                self.index,
                running,
                prefill_tokens,
                drafts,
                hits,
                committed,
                finishing,
                running + prefill_tokens + drafts,
                len(self.waiting),
                round(context * running),
            )
        )
        if done is not None:
            self._retire(done, now)
        if finishing:
            self._first_tokens(finishing, now)

    # -- composition of the batch ----------------------------------------------------------------------

    def _reslice(self) -> None:
        """Views of the columns in use; made anew only when the batch changes."""
        n = self._count
        state = self._state
        self._ids, self._positions, self._left = state[_ID, :n], state[_POSITION, :n], state[_LEFT, :n]
        self._progress = state[_POSITION : _LEFT + 1, :n]
        self._contexts = state[_CONTEXT, :n]
        # What policies see of it is read-only.
        seen = self._seen_state
        self._seen_positions, self._seen_born, self._seen_first = seen[_POSITION, :n], seen[_BORN, :n], seen[_FIRST, :n]
        self._caps, self._ones = self._full_caps[:n], self._all_ones[:n]

    def _join(self, request: int) -> None:
        """A request whose prompt is processed starts to decode."""
        log = self.requests
        generated = log.generated_tokens[request]
        column = self._count
        self._state[:, column] = (
            request,
            generated - 1,
            generated - log.output_tokens[request],
            log.prompt_tokens[request],
            self._step,
            log.first_ns[request],
        )
        self._count += 1
        self._sure_tokens = min(self._sure_tokens, log.output_tokens[request] - generated)
        # Nothing old is known of it: c = 1.
        self._history = tuple(_frozen(np.concatenate([past, self._unknown])) for past in self._history)

    def _keep(self, keep: IntArray) -> None:
        self._state[:, : keep.size] = self._state.take(keep, axis=1)
        self._count = keep.size
        self._history = tuple(_frozen(past.take(keep, axis=0)) for past in self._history)
        self._reslice()

    def _retire(self, done: IntArray, now: int) -> None:
        log = self.requests
        finished = self._ids[done].tolist()
        self._keep(np.flatnonzero(self._left < 0))
        for request in finished:
            log.generated_tokens[request] = log.output_tokens[request]
            self._finish(request, now)

    def _finish(self, request: int, now: int) -> None:
        self._reserved_worst -= self._worst(request)
        self.requests.finish_ns[request] = now
        self.on_finish(request)

    def _first_tokens(self, finishing: int, now: int) -> None:
        """Prompts whose last chunk was in the step have their next output token."""
        log = self.requests
        for prompt in self.prefilling[:finishing]:
            request = prompt.request
            log.generated_tokens[request] += 1
            if log.first_ns[request] < 0:
                log.first_ns[request] = now
            if log.generated_tokens[request] >= log.output_tokens[request]:
                self._finish(request, now)
            else:
                self._join(request)
        del self.prefilling[:finishing]
        self._reslice()

    def _chunk(self) -> tuple[int, int]:
        """Give the step's prompt tokens to the prompts, first come first served: prompt tokens, prompts that end.

        Decoding requests come first, with room for their whole blocks: the engine fills the step before the
        policy trims it.
        """
        budget = min(self.config.prefill_chunk, self.config.token_budget - self._count * (1 + self.gamma))
        taken = finishing = 0
        for prompt in self.prefilling:
            chunk = min(prompt.left, budget - taken)
            prompt.left -= chunk
            taken += chunk
            if prompt.left:
                break
            finishing += 1
        return taken, finishing

    # -- KV blocks -------------------------------------------------------------------------------------

    def _blocks(self, tokens: int) -> int:
        return blocks_needed(self.config, tokens, self.gamma)

    def _worst(self, request: int) -> int:
        return self._blocks(self.requests.prompt_tokens[request] + self.requests.output_tokens[request])

    def _used_blocks(self) -> int:
        size, slack = self.config.block_tokens, self.gamma + 1
        tokens = self._contexts + self._positions + (1 + slack + size - 1)
        used = int((tokens // size).sum())
        log = self.requests
        return used + sum(
            self._blocks(log.prompt_tokens[p.request] + log.generated_tokens[p.request]) for p in self.prefilling
        )

    def _admit(self) -> None:
        """Move waiting requests into the batch, first come first served, while sequences and blocks allow."""
        config, log = self.config, self.requests
        joined = False
        while self.waiting and self._count + len(self.prefilling) < config.max_seqs:
            request = self.waiting[0]
            worst = self._worst(request)
            if self._reserved_worst + worst > config.kv_blocks:
                if joined:
                    self._reslice()
                held = log.prompt_tokens[request] + log.generated_tokens[request]
                if self._used_blocks() + self._blocks(held) > config.kv_blocks:
                    break
            self.waiting.popleft()
            self._reserved_worst += worst
            if config.colocated:
                left = log.prompt_tokens[request] + log.generated_tokens[request]
                self.prefilling.append(_Prompt(request, left))
            else:
                self._join(request)
                joined = True
        if joined:
            self._reslice()

    def _make_room(self) -> None:
        """Preempt the latest admitted requests until the step's blocks fit; they recompute later."""
        while self._used_blocks() > self.config.kv_blocks:
            if self.prefilling:
                prompt = self.prefilling.pop()
                request, lost = prompt.request, -prompt.left
            else:
                if self._count <= 1:
                    raise does_not_fit()
                column = self._count - 1
                request = int(self._ids[column])
                self.requests.generated_tokens[request] = int(self._positions[column]) + 1
                self._keep(np.arange(column))
                lost = 0
            self._reserved_worst -= self._worst(request)
            self.requests.preemptions[request] += 1
            if self.config.colocated:
                # Its context is prefilled again: the router's count grows by the work that is lost.
                lost += self.requests.prompt_tokens[request] + self.requests.generated_tokens[request]
                self.outstanding_tokens += lost
                self.waiting.appendleft(request)
            else:
                self.on_preempt(request)

    def _mean_context(self) -> float:
        """Mean context of the batch: of the decoding requests, or of the prompts where nothing decodes yet."""
        if not self.prices.depends_on_context:
            return 0.0
        if self._count:
            return float((self._contexts + self._positions + 1).mean())
        prompts = [self.requests.prompt_tokens[p.request] for p in self.prefilling]
        return sum(prompts) / max(1, len(prompts))

    def close(self) -> None:
        """Write the progress of requests still in decode into the log (the run is over)."""
        for request, position in zip(self._ids.tolist(), self._positions.tolist(), strict=True):
            self.requests.generated_tokens[request] = position + 1


def _frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array, made read-only: policies see it."""
    array.flags.writeable = False
    return array
