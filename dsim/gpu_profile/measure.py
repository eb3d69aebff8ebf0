"""The run: cases timed one after the other, and the profile that they make."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import torch

from dsim.errors import InputError
from dsim.gpu_profile.decoder import Maker, TimedDecoder, graphable, make_batch
from dsim.gpu_profile.drafter import TimedDrafter
from dsim.gpu_profile.grid import Case, Memory
from dsim.gpu_profile.shapes import DecoderShape, DrafterShape
from dsim.gpu_profile.timers import Run, Timer
from dsim.profile import MISSING, SAMPLE_KINDS, Profile, Samples

#: The first case is timed again after so many others, to see whether the machine drifts.
DRIFT_EVERY = 20


@dataclass(frozen=True)
class Step:
    """A case ready to run.

    Parameters
    ----------
    run
        One pass.
    refresh
        Puts other random tokens into the pass's inputs; done before each repeat and not timed.
    """

    run: Callable[[], object]
    refresh: Callable[[], None]


class Bench:
    """Target and drafter on a device.

    Parameters
    ----------
    target, drafter
        Their shapes.
    memory
        What is allocated.
    device, dtype, seed
        Where, of which type, and of the random numbers.
    fused
        Grouped products as one kernel; None: where `graphable` says so.
    """

    def __init__(
        self,
        target: DecoderShape,
        drafter: DrafterShape,
        memory: Memory,
        *,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
        fused: bool | None = None,
    ) -> None:
        self.maker = Maker(device, dtype, seed)
        self.target = TimedDecoder(
            target,
            self.maker,
            held_layers=memory.held_layers,
            cache_elements=memory.cache_elements,
            fused=graphable(device) if fused is None else fused,
        )
        self.drafter = TimedDrafter(drafter, self.target)

    def step(self, case: Case) -> Step:
        """The pass of a case, with fixed inputs: distinct random tokens."""
        vocabulary = self.target.shape.vocabulary
        count = case.requests if case.kind == "draft" else case.tokens
        ids = self.maker.distinct(count, vocabulary)

        def refresh() -> None:
            ids.copy_(self.maker.distinct(count, vocabulary))

        gamma = self.drafter.drafter.gamma
        if case.kind == "draft":
            draft = self.drafter.batch(case.requests, case.context, min(gamma + 1, case.context))
            return Step(lambda: self.drafter.step(ids, draft), refresh)
        prefill = case.kind == "prefill"
        batch = make_batch(
            self.target.shape,
            self.maker,
            tokens=case.tokens,
            requests=case.requests,
            context=case.context,
            scored=1 if prefill else gamma + 1,
            causal=prefill,
        )
        return Step(lambda: self.target.step(ids, batch), refresh)


@dataclass(frozen=True)
class Timed:
    """A case and the milliseconds of its repeats; the first is the cold one."""

    case: Case
    ms: tuple[float, ...]


@dataclass
class Drift:
    """The first case, timed again and again during the run.

    Attributes
    ----------
    case, ms
        Which, and its milliseconds, warm.
    """

    case: Case | None = None
    ms: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        if self.case is None or not self.ms:
            return "no step was timed again"
        middle = float(np.median(self.ms))
        low, high = (100 * (one / middle - 1) for one in (min(self.ms), max(self.ms)))
        return (
            f"the {self.case} was timed {len(self.ms)} times over the run: median {middle:.4f} ms, "
            f"{low:+.1f} to {high:+.1f} %"
        )


def measure(
    cases: Sequence[Case],
    step: Callable[[Case], Step],
    timer: Timer,
    *,
    repeats: int,
    drift: Drift,
    deadline: float = float("inf"),
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Timed]:
    """Time the cases in their order, inside `Timer.session`.

    Parameters
    ----------
    cases
        What is timed; the first stays ready until the end (see `dsim.gpu_profile.timers.CudaTimer`).
    step
        Makes a case's pass.
    timer
        The clock of the device.
    repeats
        Passes of each case.
    drift
        Is filled with repeats of the first case.
    deadline
        Of `clock`, seconds: no case is begun that would end after it if it took as long as the longest so far.

    Yields
    ------
    Timed
        One a case.

    Raises
    ------
    InputError
        A case that needs more memory than there is.
    """
    longest = 0.0
    with ExitStack() as kept:
        again: Run | None = None
        for index, case in enumerate(cases):
            began = clock()
            if began + longest > deadline:
                break
            with ExitStack() as own:
                try:
                    made = step(case)
                    # The first one is given back when all are done; until then `ready` holds its step, and so the
                    # tensors that its graph reads.
                    run = (own if index else kept).enter_context(timer.ready(made.run, graph=case.graph))
                    ms = [_once(made, run, cold=repeat == 0) for repeat in range(repeats)]
                except torch.OutOfMemoryError:
                    raise InputError(
                        "the device ran out of memory",
                        field="memory",
                        value=str(case),
                        expected="fewer requests, shorter contexts or a smaller shape; other programs off the device",
                    ) from None
            if again is None:
                again, drift.case = run, case
            if index % DRIFT_EVERY == 0 or index == len(cases) - 1:
                drift.ms.append(again(False))
            longest = max(longest, clock() - began)
            yield Timed(case, tuple(ms))


def _once(step: Step, run: Run, *, cold: bool) -> float:
    step.refresh()
    return run(cold)


def samples_of(timed: Iterable[Timed]) -> Samples:
    """The repeats as a profile's samples: by kind, context and size."""

    def place(item: Timed) -> tuple[int, int, int, int]:
        case = item.case
        sizes = (case.requests, case.tokens) if case.kind == "draft" else (case.tokens, case.requests)
        return (SAMPLE_KINDS.index(case.kind), case.context, *sizes)

    ordered = sorted(timed, key=place)
    rows = [(item.case, ms, repeat) for item in ordered for repeat, ms in enumerate(item.ms)]
    return Samples(
        kind=np.array([case.kind for case, _, _ in rows], dtype=np.str_),
        tokens=np.array([case.tokens for case, _, _ in rows], dtype=np.int64),
        requests=np.array([case.requests for case, _, _ in rows], dtype=np.int64),
        context_tokens=np.array([case.context or MISSING for case, _, _ in rows], dtype=np.int64),
        ms=np.array([ms for _, ms, _ in rows]),
        repeat=np.array([repeat for _, _, repeat in rows], dtype=np.int64),
    )


def profile_of(
    timed: Sequence[Timed], *, name: str, hardware: str, model: str, engine: str, source: str, notes: str
) -> Profile:
    """The profile of what was timed so far; its captured sizes are those that ran as graphs.

    Raises
    ------
    InputError
        No verify step was timed.
    """
    captured = sorted({item.case.tokens for item in timed if item.case.graph and item.case.kind == "verify"})
    return Profile(
        name=name,
        hardware=hardware,
        gpus=1,
        model=model,
        engine=engine,
        captured_sizes=np.array(captured, dtype=np.int64),
        capture_limit=captured[-1] if captured else 0,
        source=source,
        license="figures only (facts, not copyrightable)",
        kind="measured",
        samples=samples_of(timed),
        notes=notes,
    )
