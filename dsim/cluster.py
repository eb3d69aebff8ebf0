"""The serving cluster: clients, a router and replicas on a SimPy clock of integer nanoseconds.

One SimPy process a replica and one for open-loop arrivals; requests are rows of arrays. What a run returns is
`Records`; a run that does not add up (`_audit`) is an error.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import simpy

from dsim.cost import StepCost
from dsim.drafts.source import DraftSource
from dsim.errors import InputError
from dsim.policy import Policy
from dsim.replica import HostCost, Replica, ReplicaConfig, check_config
from dsim.telemetry import Records, RequestLog, StepLog
from dsim.workload import ClosedLoop, OpenLoop, Workload

__all__ = ["ROUTERS", "ArmPrices", "DraftCost", "HostCost", "ReplicaConfig", "run_cluster"]

NS_PER_MS = 1_000_000
ROUTERS = ("round-robin", "least-tokens", "power-of-two")
# Prices that depend on the batch's mean context are made once for each stretch of this many tokens.
_CONTEXT_STEP = 64


@dataclass(frozen=True)
class DraftCost:
    """What a draft costs, in passes of the profile's measured drafter.

    Parameters
    ----------
    scale
        Cost of one pass relative to the measured drafter (a one-layer head against a three-layer one: 1/3).
    per_token
        True: autoregressive, one pass a drafted token; False: one pass drafts the block.
    """

    scale: float = 1.0
    per_token: bool = False


class ArmPrices:
    """A cost model's prices in whole nanoseconds, rounded once, for one arm.

    Parameters
    ----------
    cost
        The fitted cost model.
    config
        Engine options.
    gamma
        Drafts a request (0: no drafter).
    draft
        Draft cost; ignored where gamma is 0.
    max_running
        Most requests that can ever be in the batch.
    """

    def __init__(self, cost: StepCost, config: ReplicaConfig, gamma: int, draft: DraftCost, max_running: int) -> None:
        self._cost = cost
        running = min(config.max_seqs, max_running)
        self.max_tokens = running * (1 + gamma) + (config.token_budget if config.colocated else 0)
        self.max_tokens = min(self.max_tokens, max(config.token_budget, running * (1 + gamma)))
        self.depends_on_context = cost.depends_on_context
        self.captured_sizes = cost.captured_sizes
        self.capture_limit = cost.capture_limit
        passes = gamma if draft.per_token else 1
        self.draft_ns = [0]
        if gamma:
            self.draft_ns += [_ns(draft.scale * cost.draft_ms(r, passes)) for r in range(1, running + 1)]
        else:
            self.draft_ns += [0] * running
        host = [_ns(config.host.ms(r)) for r in range(running + 1)]
        hidden = [round(h * config.host.hidden_fraction) if config.overlapped else 0 for h in host]
        self.host_hidden_ns = hidden
        self.host_exposed_ns = [h - x for h, x in zip(host, hidden, strict=True)]
        self.left_contexts = False  # a step's mean context lay outside the profiled ones
        self.one_table = not (cost.depends_on_context or cost.depends_on_requests)
        self._tables: dict[tuple[int, float | None], tuple[list[int], npt.NDArray[np.float64]]] = {}

    def verify(self, requests: int, context: float) -> tuple[list[int], npt.NDArray[np.float64]]:
        """Nanoseconds and milliseconds of the target's pass by tokens in the step."""
        mean = self._context(context) if self.depends_on_context else None
        key = (requests if self._cost.depends_on_requests else 0, mean)
        table = self._tables.get(key)
        if table is None:
            ms = self._cost.verify_table(max(1, requests), self.max_tokens, mean)
            ns = np.rint(ms * NS_PER_MS).astype(np.int64)
            rounded = ns / NS_PER_MS
            rounded.flags.writeable = False
            table = self._tables[key] = (ns.tolist(), rounded)
        return table

    def _context(self, mean: float) -> float:
        """The mean context to price: rounded, but never out of the profiled contexts by the rounding."""
        rounded = round(mean / _CONTEXT_STEP) * _CONTEXT_STEP
        low, high = float(self._cost.contexts[0]), float(self._cost.contexts[-1])
        if low <= mean <= high:
            return min(max(rounded, low), high)
        self.left_contexts = True
        return float(rounded)


def _ns(ms: float) -> int:
    return round(ms * NS_PER_MS)


class _Router:
    """Chooses a replica for each request."""

    def __init__(self, kind: str, replicas: list[Replica], seed: int) -> None:
        if kind not in ROUTERS:
            raise InputError(field="router", value=kind, expected=f"one of {', '.join(ROUTERS)}")
        self._kind, self._replicas = kind, replicas
        self._turn = 0
        self._rng = np.random.default_rng(seed)

    def choose(self) -> Replica:
        replicas = self._replicas
        if len(replicas) == 1:
            return replicas[0]
        if self._kind == "round-robin":
            self._turn += 1
            return replicas[(self._turn - 1) % len(replicas)]
        if self._kind == "least-tokens":
            return min(replicas, key=lambda r: (r.outstanding_tokens, r.index))
        first, second = self._rng.choice(len(replicas), size=2, replace=False)
        return min(replicas[int(first)], replicas[int(second)], key=lambda r: (r.outstanding_tokens, r.index))


class Cluster:
    """Clients, router, replicas. Build one a run; `run` returns its records."""

    def __init__(
        self,
        *,
        replicas: int,
        config: ReplicaConfig,
        cost: StepCost,
        drafts: DraftSource | None,
        draft_cost: DraftCost,
        policy: Policy,
        stream: Workload,
        load: ClosedLoop | OpenLoop,
        router: str = "round-robin",
        router_seed: int = 0,
        slo_tpot_ms: float = float("nan"),
    ) -> None:
        self.env = simpy.Environment(initial_time=0)
        self.config, self.cost, self.drafts, self.stream, self.load = config, cost, drafts, stream, load
        gamma = 0 if drafts is None else drafts.gamma
        users = load.users if isinstance(load, ClosedLoop) else config.max_seqs
        check_config(config, gamma)
        self.prices = ArmPrices(cost, config, gamma, draft_cost, users)
        self.steps = StepLog()
        self.requests = RequestLog()
        self.replicas = [
            Replica(
                self.env,
                index,
                config,
                self.prices,
                drafts,
                copy.deepcopy(policy),
                self.steps,
                self.requests,
                self._finished,
                self._preempted,
                slo_tpot_ms,
            )
            for index in range(replicas)
        ]
        self._router = _Router(router, self.replicas, router_seed)
        self._done = self.env.event()
        self._prefill_cache: dict[int, int] = {}
        # The stream's domains by the numbers that the draft source gives them.
        self._draft_domain = [] if drafts is None else [drafts.domains.index(name) for name in stream.domains]
        self._in_prefill = 0
        first = load.first_scored if isinstance(load, ClosedLoop) else load.warmup
        self._scored = (first, first + load.scored)
        self._scored_left = load.scored
        # Little's law, kept as an integral beside the request table: requests in the system, over time.
        self._in_system = 0
        self._area_ns = 0
        self._area_at = 0

    def run(self) -> Records:
        """Run until every scored request has ended.

        Raises
        ------
        InputError
            From a policy or an option, with its own message.
        RuntimeError
            The run does not add up.
        """
        for replica in self.replicas:
            self.env.process(replica.run())
        if isinstance(self.load, ClosedLoop):
            self._start_users(self.load)
        else:
            self.env.process(self._arrivals(self.load))
        try:
            self.env.run(until=self._done)
        except (InputError, RuntimeError) as error:
            # SimPy raises a copy made from the arguments; the original has the attributes.
            if isinstance(error.__cause__, type(error)):
                raise error.__cause__ from None
            raise
        for replica in self.replicas:
            replica.close()
        records = self._records()
        self._audit(records)
        return records

    @property
    def _now(self) -> int:
        return int(self.env.now)

    # -- clients ---------------------------------------------------------------------------------------

    def _start_users(self, load: ClosedLoop) -> None:
        gap = load.stagger_s / load.users
        for user in range(load.users):
            self._later(round(user * gap * 1e9), self._issue_next)

    def _issue_next(self) -> None:
        """A user's next request (closed loop)."""
        load = self.load
        number = len(self.requests)
        if isinstance(load, ClosedLoop) and (load.steady or number < load.scored):
            self._issue(number)

    def _arrivals(self, load: OpenLoop) -> Generator[simpy.Event, Any, None]:
        for i in range(load.requests):
            delay = self.stream.arrival_ns(i) - self._now
            if delay > 0:
                yield self.env.timeout(delay)
            self._issue(i)

    def _issue(self, i: int) -> None:
        prompt, output = self.stream.lengths(i)
        domain = self.stream.domain(i)
        request = self.requests.add(self._now, prompt, output, domain)
        if self.drafts is not None:
            self.drafts.open(request, self._draft_domain[domain], output)
        self._count(+1)
        if self.config.colocated:
            self._router.choose().enqueue(request)
        else:
            self._in_prefill += 1
            self._later(self._prefill_ns(prompt), lambda: self._prefilled(request))

    def _prefilled(self, request: int) -> None:
        """Disaggregated prefill is done: the first token is out, decode begins."""
        log, now = self.requests, self._now
        self._in_prefill -= 1
        if log.first_ns[request] < 0:
            log.first_ns[request] = now
            log.generated_tokens[request] = 1
            if log.output_tokens[request] == 1:
                log.finish_ns[request] = now
                self._finished(request)
                return
            self._router.choose().enqueue(request)
        else:
            self.replicas[log.replica[request]].enqueue(request, front=True)

    def _preempted(self, request: int) -> None:
        """Disaggregated recompute: the context is processed again on a prefill node."""
        self._in_prefill += 1
        log = self.requests
        context = log.prompt_tokens[request] + log.generated_tokens[request]
        self._later(self._prefill_ns(context), lambda: self._prefilled(request))

    def _prefill_ns(self, tokens: int) -> int:
        ns = self._prefill_cache.get(tokens)
        if ns is None:
            ns = self._prefill_cache[tokens] = _ns(self.cost.prefill_ms(tokens))
        return ns

    def _finished(self, request: int) -> None:
        self._count(-1)
        low, high = self._scored
        if low <= request < high:
            self._scored_left -= 1
            if not self._scored_left:
                self._done.succeed()
        if isinstance(self.load, ClosedLoop):
            if self.load.think_s > 0:
                self._later(round(self.load.think_s * 1e9), self._issue_next)
            else:
                self._issue_next()

    def _later(self, delay_ns: int, call: Callable[[], None]) -> None:
        if delay_ns <= 0:
            call()
            return
        self.env.timeout(delay_ns).callbacks.append(lambda _event: call())

    # -- accounts --------------------------------------------------------------------------------------

    def _count(self, change: int) -> None:
        now = self._now
        self._area_ns += self._in_system * (now - self._area_at)
        self._area_at = now
        self._in_system += change

    def _records(self) -> Records:
        steps, requests = self.steps.table(), self.requests.table()
        first, last = self._scored
        start = int(requests["arrival_ns"][first])
        if isinstance(self.load, OpenLoop):
            # Arrivals thin out after the last one: the window ends there, not with the drain.
            end = int(requests["arrival_ns"][last - 1]) if self.load.cooldown else self._now
        else:
            end = self._now
        cost = self.cost
        extrapolated = bool(
            np.any(steps["batch_tokens"] > cost.max_tokens)
            or (self.drafts is not None and np.any(steps["requests"] > cost.max_requests))
            or (cost.depends_on_requests and np.any(steps["requests"] > cost.max_verify_requests))
            or max(self._prefill_cache, default=0) > cost.max_prefill_tokens
            or self.prices.left_contexts
        )
        return Records(
            steps=steps,
            requests=requests,
            scored=self._scored,
            window_ns=(start, max(end, start + 1)),
            end_ns=int(self._now),
            replicas=len(self.replicas),
            gpus=cost.gpus * len(self.replicas),
            extrapolated=extrapolated,
        )

    def _audit(self, records: Records) -> None:
        """Tokens in = tokens out, nobody lost, busy time = sum of steps, Little's law (all exact)."""
        steps, requests = records.steps, records.requests

        def check(name: str, left: int, right: int) -> None:
            if left != right:
                raise RuntimeError(f"audit invariant violated: {name} ({left} against {right})")

        produced = int(steps["committed"].sum() + steps["first_tokens"].sum())
        if not self.config.colocated:
            produced += int(np.count_nonzero(requests["first_ns"] >= 0))
        check("tokens produced in steps = tokens of requests", produced, int(requests["generated_tokens"].sum()))
        finished = requests["finish_ns"] >= 0
        check(
            "finished requests have all their tokens",
            int(requests["generated_tokens"][finished].sum()),
            int(requests["output_tokens"][finished].sum()),
        )
        held = self._in_prefill + sum(replica.in_flight() for replica in self.replicas)
        check("issued = finished + held", len(self.requests), int(finished.sum()) + held)
        for replica in self.replicas:
            mine = steps["replica"] == replica.index
            check("busy time = sum of steps", replica.busy_ns, int(steps["step_ns"][mine].sum()))
            ends, lengths = steps["end_ns"][mine], steps["step_ns"][mine]
            check("steps do not overlap", int(np.count_nonzero(ends[1:] - lengths[1:] < ends[:-1])), 0)
        self._count(0)
        ends = np.where(finished, requests["finish_ns"], records.end_ns)
        check("Little's law: requests in the system", self._area_ns, int((ends - requests["arrival_ns"]).sum()))


def run_cluster(**options: Any) -> Records:
    """Build a `Cluster` and run it; the arguments are those of `Cluster`."""
    return Cluster(**options).run()
