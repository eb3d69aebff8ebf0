"""What a run has to add up to: its records, put together and audited, whichever loop has made them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dsim.cost import StepCost
from dsim.options import ReplicaConfig
from dsim.telemetry import Records
from dsim.workload import ClosedLoop, OpenLoop

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Books:
    """What a loop kept beside its two tables.

    Attributes
    ----------
    end_ns
        When it stopped.
    held
        Requests that replicas and prefill nodes still hold.
    busy_ns
        Time in steps, by replica.
    area_ns
        Requests in the system, integrated over time.
    longest_prefill
        Longest prompt (or recomputed context) that a prefill node was asked for; 0: none.
    left_contexts
        A step's mean context lay outside the profiled ones.
    """

    end_ns: int
    held: int
    busy_ns: tuple[int, ...]
    area_ns: int
    longest_prefill: int
    left_contexts: bool


def records_of(
    books: Books,
    steps: dict[str, IntArray],
    requests: dict[str, IntArray],
    config: ReplicaConfig,
    cost: StepCost,
    load: ClosedLoop | OpenLoop,
    *,
    speculates: bool,
) -> Records:
    """The records of a run that has ended.

    Parameters
    ----------
    steps, requests
        Columns by name, as in `Records`.
    speculates
        A drafter runs.
    """
    first = load.first_scored if isinstance(load, ClosedLoop) else load.warmup
    last = first + load.scored
    start, end = int(requests["arrival_ns"][first]), books.end_ns
    if isinstance(load, OpenLoop) and load.cooldown:
        # Arrivals thin out after the last one: the window ends there, not with the drain.
        end = int(requests["arrival_ns"][last - 1])
    extrapolated = bool(
        np.any(steps["batch_tokens"] > cost.max_tokens)
        or (speculates and np.any(steps["requests"] > cost.max_requests))
        or (cost.depends_on_requests and np.any(steps["requests"] > cost.max_verify_requests))
        or books.longest_prefill > cost.max_prefill_tokens
        or books.left_contexts
        # Below the smallest profiled step its price is held; with captured sizes that is the engine's padding.
        or (not cost.captured_sizes.size and np.any(steps["batch_tokens"] < cost.min_tokens))
    )
    replicas = len(books.busy_ns)
    return Records(
        steps=steps,
        requests=requests,
        scored=(first, last),
        window_ns=(start, max(end, start + 1)),
        end_ns=books.end_ns,
        replicas=replicas,
        colocated=config.colocated,
        gpus=cost.gpus * replicas,
        extrapolated=extrapolated,
    )


def audit(records: Records, books: Books, load: ClosedLoop | OpenLoop) -> None:
    """Tokens in = tokens out, nobody lost, busy time = sum of steps, the laws of Little and of the response time.

    All are exact, and every run of every experiment goes through them.
    """
    steps, requests = records.steps, records.requests

    def check(name: str, left: int, right: int) -> None:
        if left != right:
            raise RuntimeError(f"audit invariant violated: {name} ({left} against {right})")

    produced = int(steps["committed"].sum() + steps["first_tokens"].sum())
    if not records.colocated:
        produced += int(np.count_nonzero(requests["first_ns"] >= 0))
    check("tokens produced in steps = tokens of requests", produced, int(requests["generated_tokens"].sum()))
    finished = requests["finish_ns"] >= 0
    check(
        "finished requests have all their tokens",
        int(requests["generated_tokens"][finished].sum()),
        int(requests["output_tokens"][finished].sum()),
    )
    most = steps["requests"] + steps["accepted"]
    check("steps commit 0 to R + accepted tokens", int(np.count_nonzero(steps["committed"] < 0)), 0)
    check("steps commit no more than R + accepted", int(np.count_nonzero(steps["committed"] > most)), 0)
    late = requests["finish_ns"][finished] < requests["first_ns"][finished]
    check("no request ends before its first token", int(np.count_nonzero(late)), 0)
    check("issued = finished + held", finished.size, int(finished.sum()) + books.held)
    _audit_replicas(steps, books, check)
    ends = np.where(finished, requests["finish_ns"], records.end_ns)
    check("Little's law: requests in the system", books.area_ns, int((ends - requests["arrival_ns"]).sum()))
    _audit_decode(records, check)
    if isinstance(load, ClosedLoop):
        _audit_population(load, requests, check)


def _audit_replicas(steps: dict[str, IntArray], books: Books, check: Callable[[str, int, int], None]) -> None:
    """Each replica takes one step after the other, and was busy for as long as they took."""
    order = np.argsort(steps["replica"], kind="stable")
    replica, ends, lengths = (steps[name][order] for name in ("replica", "end_ns", "step_ns"))
    total = np.concatenate([[0], np.cumsum(lengths)])
    bounds = np.searchsorted(replica, np.arange(len(books.busy_ns) + 1))
    in_steps = np.diff(total[bounds])
    for busy_ns, sum_ns in zip(books.busy_ns, in_steps.tolist(), strict=True):
        check("busy time = sum of steps", busy_ns, sum_ns)
    overlaps = (ends[1:] - lengths[1:] < ends[:-1]) & (replica[1:] == replica[:-1])
    check("steps do not overlap", int(np.count_nonzero(overlaps)), 0)


def _audit_decode(records: Records, check: Callable[[str, int, int], None]) -> None:
    """Little's law for the decode alone, which ties the two tables together.

    The steps' requests, over time, are the times that requests spent in decode: from the first token to the last
    one, or to the last step of a replica that still runs. Waits are in between where a request was preempted, or
    waited for a place after its prefill elsewhere.
    """
    steps, requests = records.steps, records.requests
    last = np.zeros(records.replicas, dtype=np.int64)
    np.maximum.at(last, steps["replica"], steps["end_ns"])
    begun = requests["first_ns"] >= 0
    first, finish, replica = (requests[name][begun] for name in ("first_ns", "finish_ns", "replica"))
    until = np.where(finish >= 0, finish, last[replica])
    in_tables = int(np.maximum(until - first, 0).sum())
    in_steps = int((steps["requests"] * steps["step_ns"]).sum())
    if records.colocated and not requests["preemptions"].any():
        check("Little's law: requests in decode", in_steps, in_tables)
    else:
        check("Little's law: no more requests in decode than had begun", max(in_steps - in_tables, 0), 0)


def _audit_population(load: ClosedLoop, requests: dict[str, IntArray], check: Callable[[str, int, int], None]) -> None:
    """The response time law of a closed loop, N = X (R + Z), as what it counts.

    A request is issued when a user starts, or a think time after a request has ended, and at no other time.
    """
    gap, ended = load.stagger_s / load.users, requests["finish_ns"][requests["finish_ns"] >= 0]
    starts = [max(0, round(user * gap * 1e9)) for user in range(load.users)]
    issued = np.sort(requests["arrival_ns"])
    due = np.sort(np.concatenate([starts, ended + round(load.think_s * 1e9)]))[: issued.size]
    wrong = issued.size if due.size < issued.size else int(np.count_nonzero(issued != due))
    check("response time law: requests not issued by a user's start or a think time after an end", wrong, 0)
