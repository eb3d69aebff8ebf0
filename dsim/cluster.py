"""The serving cluster: clients, a router and replicas on a SimPy clock of integer nanoseconds.

One SimPy process a replica and one for open-loop arrivals; requests are rows of arrays. What a run returns is
`Records`; a run that does not add up (`_audit`) is an error.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import numpy.typing as npt
import simpy

from dsim.cost import StepCost
from dsim.drafts.source import DraftSource
from dsim.errors import InputError
from dsim.options import ReplicaConfig, check_config
from dsim.policy import Policy
from dsim.prices import ArmPrices, DraftCost, nanoseconds
from dsim.replica import Replica
from dsim.telemetry import Records, RequestLog, StepLog
from dsim.workload import ClosedLoop, OpenLoop, Workload

IntArray = npt.NDArray[np.int64]

ROUTERS = ("round-robin", "least-tokens", "power-of-two")


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
            last_start = load.stagger_s * (load.users - 1) / load.users
            if number == load.first_scored and self._now < round(last_start * 1e9) and load.steady:
                raise InputError(
                    f"the first scored request comes at {self._now / 1e9:g} s, before the last of {load.users} users "
                    f"starts at {last_start:g} s",
                    field="load.stagger_s",
                    value=load.stagger_s,
                    expected="less, or more load.warmup_per_user",
                )
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
            # Below the smallest profiled step its price is held; with captured sizes that is the engine's padding.
            or (not cost.captured_sizes.size and np.any(steps["batch_tokens"] < cost.min_tokens))
        )
        return Records(
            steps=steps,
            requests=requests,
            scored=self._scored,
            window_ns=(start, max(end, start + 1)),
            end_ns=int(self._now),
            replicas=len(self.replicas),
            colocated=self.config.colocated,
            gpus=cost.gpus * len(self.replicas),
            extrapolated=extrapolated,
        )

    def _audit(self, records: Records) -> None:
        """Tokens in = tokens out, nobody lost, busy time = sum of steps, the laws of Little and of the response time.

        All are exact, and every run of every experiment goes through them.
        """
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
        most = steps["requests"] + steps["accepted"]
        check("steps commit 0 to R + accepted tokens", int(np.count_nonzero(steps["committed"] < 0)), 0)
        check("steps commit no more than R + accepted", int(np.count_nonzero(steps["committed"] > most)), 0)
        late = requests["finish_ns"][finished] < requests["first_ns"][finished]
        check("no request ends before its first token", int(np.count_nonzero(late)), 0)
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
        self._audit_decode(records, check)
        if isinstance(self.load, ClosedLoop):
            self._audit_population(self.load, requests, check)

    def _audit_decode(self, records: Records, check: Callable[[str, int, int], None]) -> None:
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

    def _audit_population(
        self, load: ClosedLoop, requests: dict[str, IntArray], check: Callable[[str, int, int], None]
    ) -> None:
        """The response time law of a closed loop, N = X (R + Z), as what it counts.

        A request is issued when a user starts, or a think time after a request has ended, and at no other time.
        """
        gap, ended = load.stagger_s / load.users, requests["finish_ns"][requests["finish_ns"] >= 0]
        starts = [max(0, round(user * gap * 1e9)) for user in range(load.users)]
        issued = np.sort(requests["arrival_ns"])
        due = np.sort(np.concatenate([starts, ended + round(load.think_s * 1e9)]))[: issued.size]
        wrong = issued.size if due.size < issued.size else int(np.count_nonzero(issued != due))
        check("response time law: requests not issued by a user's start or a think time after an end", wrong, 0)


def run_cluster(**options: Any) -> Records:
    """Build a `Cluster` and run it; the arguments are those of `Cluster`."""
    return Cluster(**options).run()
