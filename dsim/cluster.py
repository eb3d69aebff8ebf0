"""The serving cluster: clients, a router and replicas on a SimPy clock of integer nanoseconds.

One SimPy process a replica and one for open-loop arrivals; requests are rows of arrays. What a run returns is
`Records`; a run that does not add up (`dsim.accounts`) is an error.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import numpy.typing as npt
import simpy

from dsim.accounts import Books, audit, records_of
from dsim.cost import StepCost
from dsim.drafts.source import DraftSource
from dsim.errors import InputError
from dsim.options import ReplicaConfig, check_config
from dsim.policy import Policy
from dsim.prices import ArmPrices, DraftCost, nanoseconds
from dsim.replica import Replica
from dsim.routing import check_router, replica_pairs
from dsim.telemetry import Records, RequestLog, StepLog
from dsim.workload import ClosedLoop, OpenLoop, Workload, scored_too_early

IntArray = npt.NDArray[np.int64]


class _Router:
    """Chooses a replica for each request."""

    def __init__(self, kind: str, replicas: list[Replica], seed: int) -> None:
        check_router(kind)
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
        pair = replica_pairs(self._rng, len(replicas), 1)[0]
        return min((replicas[int(i)] for i in pair), key=lambda r: (r.outstanding_tokens, r.index))


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
        self._count(0)
        books, steps, requests = self._books(), self.steps.table(), self.requests.table()
        speculates = self.drafts is not None
        records = records_of(books, steps, requests, self.config, self.cost, self.load, speculates=speculates)
        audit(records, books, self.load)
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
            if number == load.first_scored and load.steady and self._now < load.last_start_ns:
                raise scored_too_early(load, self._now)
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
            ns = self._prefill_cache[tokens] = nanoseconds(self.cost.prefill_ms(tokens))
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

    def _books(self) -> Books:
        return Books(
            end_ns=self._now,
            held=self._in_prefill + sum(replica.in_flight() for replica in self.replicas),
            busy_ns=tuple(replica.busy_ns for replica in self.replicas),
            area_ns=self._area_ns,
            longest_prefill=max(self._prefill_cache, default=0),
            left_contexts=self.prices.left_contexts,
        )


def run_cluster(**options: Any) -> Records:
    """Build a `Cluster` and run it; the arguments are those of `Cluster`."""
    return Cluster(**options).run()
