"""Set up the compiled loop for one run, give it what it asks for, and make records of what it leaves behind."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dsim.accounts import Books, audit, records_of
from dsim.compiled import layout as at
from dsim.cost import StepCost
from dsim.drafts.source import BankDrafts, DraftSource
from dsim.errors import InputError
from dsim.kernel import Kernel
from dsim.kernel.cache import kernel_cache, kernel_of, note_warm
from dsim.options import ReplicaConfig, check_config, does_not_fit, too_large
from dsim.policy import Policy, length_out_of_bounds, policy_name
from dsim.prices import CONTEXT_STEP, ArmPrices, DraftCost, nanoseconds
from dsim.routing import check_router, replica_pairs
from dsim.telemetry import REQUEST_COLUMNS, STEP_COLUMNS, Records
from dsim.workload import ClosedLoop, OpenLoop, Workload, request_block, scored_too_early

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

_ROUTERS = {"round-robin": at.ROUND_ROBIN, "least-tokens": at.LEAST_TOKENS, "power-of-two": at.POWER_OF_TWO}
_FIRST_LOG, _LARGEST_LOG = 1 << 12, 1 << 16
# Requests that are made known beyond what one event can issue.
_AHEAD = 1024


def why_not(policy: Policy, drafts: DraftSource | None) -> str | None:
    """Why a run with these cannot be compiled; None: it can."""
    if importlib.util.find_spec("numba") is None:
        return "Numba is not installed (extra 'fast')"
    kernel = kernel_of(policy)
    if getattr(policy, "observe", None) is not None and (kernel is None or kernel.observe is None):
        return f"policy {policy_name(policy)} learns from what became of its drafts, and no kernel does"
    if kernel is None:
        return f"policy {policy_name(policy)} has no kernel"
    # A subclass may draft otherwise than its tables say.
    if drafts is not None and type(drafts) is not BankDrafts:
        return f"the drafts of '{drafts.label}' are not replayed from a bank as they are"
    if drafts is not None and kernel.most_gamma is not None and drafts.gamma > kernel.most_gamma:
        return f"policy {policy_name(policy)} has no kernel for blocks of {drafts.gamma} drafts"
    return None


def run_compiled(
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
) -> Records:
    """Run until every scored request has ended. The arguments are those of `dsim.cluster.Cluster`.

    Raises
    ------
    InputError
        Where the reference raises one, and where `why_not` has a reason.
    RuntimeError
        The run does not add up.
    """
    reason = why_not(policy, drafts)
    kernel = kernel_of(policy) if reason is None else None
    if reason is not None or kernel is None or not (drafts is None or isinstance(drafts, BankDrafts)):
        raise InputError(f"this run cannot be compiled: {reason}", field="engine", expected="'auto' or 'step'")
    run = _Run(replicas, config, cost, drafts, draft_cost, policy, kernel, stream, load, router, router_seed)
    run.bounds[at.SLO_TPOT_MS] = slo_tpot_ms
    run.go()
    steps, requests, books = run.tables()
    records = records_of(books, steps, requests, config, cost, load, speculates=drafts is not None)
    audit(records, books, load)
    return records


class _Run:
    """The arrays of one run. `dsim.compiled.layout` says what lies where."""

    def __init__(
        self,
        replicas: int,
        config: ReplicaConfig,
        cost: StepCost,
        drafts: BankDrafts | None,
        draft_cost: DraftCost,
        policy: Policy,
        kernel: Kernel,
        stream: Workload,
        load: ClosedLoop | OpenLoop,
        router: str,
        router_seed: int,
    ) -> None:
        check_router(router)
        self.cost, self.drafts, self.stream, self.load, self.kernel = cost, drafts, stream, load, kernel
        self.policy, self.config = policy, config
        gamma = 0 if drafts is None else drafts.gamma
        check_config(config, gamma)
        users = load.users if isinstance(load, ClosedLoop) else config.max_seqs
        self.prices = ArmPrices(cost, config, gamma, draft_cost, users)
        self.router, self.rng = router, np.random.default_rng(router_seed)
        self.cfg = self._config(replicas, config, gamma)
        self.bounds = np.zeros(at.BOUNDS_SIZE)
        self.bounds[at.CONTEXT_STEP] = CONTEXT_STEP
        if cost.depends_on_context:
            self.bounds[[at.CONTEXT_LOW, at.CONTEXT_HIGH]] = cost.contexts[0], cost.contexts[-1]
        self.now = np.zeros(at.NOW_SIZE, dtype=np.int64)
        self.now[at.RESUME] = -1
        self.now[at.SCORED_LEFT] = load.scored
        self.rep = np.zeros((replicas, at.REP_SIZE), dtype=np.int64)
        self.rep[:, [at.HEAD, at.TAIL]] = -1
        seqs = config.max_seqs
        self.seq = np.zeros((replicas, at.SEQ_SIZE, seqs), dtype=np.int64)
        self.past = np.ones((replicas, max(kernel.ages) + 1, seqs * gamma), dtype=np.float32)
        self.req = np.zeros((0, at.REQ_SIZE), dtype=np.int64)
        self.due, self.pairs = np.zeros(0, dtype=np.int64), np.zeros((0, 2), dtype=np.int64)
        self.heap = np.zeros((0, 4), dtype=np.int64)
        self.prefill_ns = np.full(1, -1, dtype=np.int64)
        self.host = np.array(
            [self.prices.draft_ns, self.prices.host_hidden_ns, self.prices.host_exposed_ns], dtype=np.int64
        )
        self._tables(config)
        self._replay(gamma)
        self.ages = np.array(kernel.ages, dtype=np.int64)
        self.params = np.array(kernel.params, dtype=np.float64)
        self.state = np.tile(kernel.memory(seqs), (replicas, 1))
        self.counts, self.times = np.zeros(8, dtype=np.int64), np.zeros(5)
        self.blocks = np.ones((len(kernel.ages), seqs, gamma), dtype=np.float32)
        self.layers = self.blocks.reshape(len(kernel.ages), seqs * gamma)
        self.captured = np.array(self.prices.captured_sizes, dtype=np.int64)
        self.age = np.zeros(seqs, dtype=np.int64)
        self.caps, self.useful = np.full(seqs, gamma, dtype=np.int64), np.zeros(seqs, dtype=np.int64)
        self.work = np.zeros((6, seqs * gamma + 1024), dtype=np.float32)
        self.lengths, self.ended, self.row = (np.zeros(seqs, dtype=np.int64) for _ in range(3))
        self.columns: list[IntArray] = [np.zeros(0, dtype=np.int64) for _ in STEP_COLUMNS]
        self.log = np.zeros((len(STEP_COLUMNS), _FIRST_LOG), dtype=np.int64)
        self._know(_first_requests(load, config.max_seqs))

    # -- setting up ----------------------------------------------------------------------------------------

    def _config(self, replicas: int, config: ReplicaConfig, gamma: int) -> IntArray:
        cfg = np.zeros(at.CFG_SIZE, dtype=np.int64)
        load, traits = self.load, self.policy.traits
        cfg[at.REPLICAS], cfg[at.MAX_SEQS] = replicas, config.max_seqs
        cfg[at.TOKEN_BUDGET], cfg[at.PREFILL_CHUNK] = config.token_budget, config.prefill_chunk
        cfg[at.COLOCATED], cfg[at.BLOCK_TOKENS], cfg[at.KV_BLOCKS] = (
            config.colocated,
            config.block_tokens,
            config.kv_blocks,
        )
        cfg[at.ADMIT_AHEAD], cfg[at.CLIP], cfg[at.GAMMA] = config.admit_ahead, config.clip_to_remaining, gamma
        cfg[at.AGES], cfg[at.CLAIRVOYANT] = len(self.kernel.ages), traits.clairvoyant
        cfg[at.ROUTER] = _ROUTERS[self.router]
        cfg[at.LEARNS] = self.kernel.observe is not None
        cfg[at.BY_REQUESTS], cfg[at.BY_CONTEXT] = self.cost.depends_on_requests, self.cost.depends_on_context
        cfg[at.CAPTURE_LIMIT], cfg[at.ISSUE_LIMIT] = self.prices.capture_limit, -1
        if isinstance(load, ClosedLoop):
            cfg[at.CLOSED], cfg[at.STEADY], cfg[at.THINK_NS] = True, load.steady, round(load.think_s * 1e9)
            cfg[at.FIRST_SCORED] = load.first_scored
            cfg[at.LAST_START_NS] = load.last_start_ns
            if not load.steady:
                cfg[at.ISSUE_LIMIT] = load.scored
        else:
            cfg[at.FIRST_SCORED], cfg[at.OPEN_REQUESTS] = load.warmup, load.requests
            cfg[at.ISSUE_LIMIT] = load.requests
        cfg[at.END_SCORED] = cfg[at.FIRST_SCORED] + load.scored
        return cfg

    def _tables(self, config: ReplicaConfig) -> None:
        """Room for the price tables; each is made when a step first needs it."""
        requests = len(self.prices.draft_ns) if self.cfg[at.BY_REQUESTS] else 1
        self.table_of = np.full((requests, 1), -1, dtype=np.int64)
        self.verify_ns = np.zeros((1, self.prices.max_tokens + 1), dtype=np.int64)
        self.verify_ms, self.believed = np.zeros(self.verify_ns.shape), np.zeros(self.verify_ns.shape)
        self.made = 0
        if self.prices.one_table:
            self._make_table(0, 0, 0.0)

    def _make_table(self, requests: int, bucket: int, context: float) -> None:
        ns, ms = self.prices.verify(requests, context)
        if self.made == len(self.verify_ns):
            for name in ("verify_ns", "verify_ms", "believed"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros_like(old)]))
        self.verify_ns[self.made], self.verify_ms[self.made] = ns, ms
        prices = self.kernel.prices
        self.believed[self.made] = (
            ms if prices is None else prices(ms, self.prices.captured_sizes, int(self.cfg[at.GAMMA]))
        )
        self.table_of[requests, bucket] = self.made
        self.made += 1

    def _replay(self, gamma: int) -> None:
        rows: npt.NDArray[np.float32] = np.ones((1, max(1, gamma)), dtype=np.float32)
        self.accepted, self.limits = np.zeros(1, dtype=np.uint8), np.zeros((1, 1), dtype=np.uint64)
        self.texts, self.members = np.zeros((3, 1), dtype=np.int64), np.zeros((2, 1), dtype=np.int64)
        if self.drafts is not None:
            tables = self.drafts.replay_tables()
            rows = np.ascontiguousarray(tables.confidence)
            self.accepted = tables.accepted.astype(np.uint8)
            self.texts = np.stack([tables.starts, tables.usable, tables.members])
            places = [self.drafts.domains.index(name) for name in self.stream.domains]
            self.members = np.stack([tables.member_bounds[:-1][places], tables.member_bounds[1:][places]])
            self.cfg[at.SEED] = np.array([tables.seed & ((1 << 64) - 1)], dtype=np.uint64).view(np.int64)[0]
            if tables.limits is not None:
                self.cfg[at.TILTED], self.limits = True, np.ascontiguousarray(tables.limits)
        self.confidence, self.accepted, self.limits = _fixed(rows), _fixed(self.accepted), _fixed(self.limits)

    def _know(self, count: int) -> None:
        """Make the requests up to `count` known."""
        known = len(self.req)
        due = isinstance(self.load, OpenLoop)
        block = request_block(self.stream, known, count, due=due)
        # In place where the system can: the table of a long run is never there twice.
        self.req.resize((count, at.REQ_SIZE), refcheck=False)
        new = self.req[known:]
        new[:, [at.FIRST_NS, at.FINISH_NS, at.REPLICA, at.NEXT]] = -1
        new[:, at.PROMPT], new[:, at.OUTPUT], new[:, at.DOMAIN] = block.prompt_tokens, block.output_tokens, block.domain
        if due:
            self.due = np.concatenate([self.due, block.arrival_ns])
        if self.router == "power-of-two" and len(self.rep) > 1:
            self.pairs = np.concatenate([self.pairs, replica_pairs(self.rng, len(self.rep), len(new))])
        # At most one event a replica or request on its way: a closed loop has as many requests as users.
        waiting = self.load.users if isinstance(self.load, ClosedLoop) else len(self.req)
        places = max(len(self.heap), 2 * len(self.rep) + waiting + 8)
        self.heap = np.concatenate([self.heap, np.zeros((places - len(self.heap), 4), dtype=np.int64)])
        self._reach(block.prompt_tokens, block.output_tokens)

    def _reach(self, prompts: IntArray, outputs: IntArray) -> None:
        """Room for the prices of prompts and contexts that these requests can have."""
        longest = int((prompts + outputs).max(initial=0)) + 1
        if longest >= self.prefill_ns.size:
            grown = np.full(2 * longest + 1, -1, dtype=np.int64)
            grown[: self.prefill_ns.size] = self.prefill_ns
            self.prefill_ns = grown
        if not self.cfg[at.COLOCATED]:
            for tokens in np.unique(prompts).tolist():
                if self.prefill_ns[tokens] < 0:
                    self._price_prefill(tokens)
        if self.cfg[at.BY_CONTEXT]:
            # One bucket for each stretch of contexts, and one at either end for the profile's own limits.
            longest = max(longest + int(self.cfg[at.GAMMA]) + 1, int(self.bounds[at.CONTEXT_HIGH]))
            buckets = longest // CONTEXT_STEP + 4
            if buckets > self.table_of.shape[1]:
                wider = np.full((self.table_of.shape[0], 2 * buckets), -1, dtype=np.int64)
                held = self.table_of.shape[1] - 1
                wider[:, :held], wider[:, -1] = self.table_of[:, :held], self.table_of[:, -1]
                self.table_of = wider
        self.cfg[at.CONTEXT_BUCKETS] = self.table_of.shape[1]

    def _price_prefill(self, tokens: int, *, now: bool = False) -> None:
        try:
            self.prefill_ns[tokens] = nanoseconds(self.cost.prefill_ms(tokens))
        except InputError:
            # Refused only when a request with that prompt really comes.
            if now:
                raise

    # -- running -------------------------------------------------------------------------------------------

    def go(self) -> None:
        """Run to the end."""
        loop = _loop()
        self._start(loop)
        while (status := self._advance(loop)) != at.FINISHED:
            self._provide(status)

    def _start(self, loop: Any) -> None:
        load = self.load
        if isinstance(load, OpenLoop):
            loop.schedule(self.heap, self.now, 0, at.ARRIVES, 0)
            return
        gap = load.stagger_s / load.users
        for user in range(load.users):
            delay = round(user * gap * 1e9)
            if delay > 0:
                loop.schedule(self.heap, self.now, delay, at.ISSUES, 0)
                continue
            while (
                status := loop.issue(self.cfg, self.now, self.rep, self.req, self.pairs, self.heap, self.prefill_ns)
            ) >= 0:
                self._provide(status)

    def _advance(self, loop: Any) -> int:
        arrays = at.Arrays(*(getattr(self, name) for name in at.Arrays._fields))
        status: int = loop.advance(self.kernel.plan, self.kernel.observe or loop.deaf, arrays, self.log)
        return status

    def _provide(self, status: int) -> None:
        """Give the loop what it stopped for, or raise what the reference would."""
        asked, asked_too = int(self.now[at.ASKED]), int(self.now[at.ASKED_TOO])
        if status == at.LOG_FULL:
            self._keep(self.log.shape[1])
            self.log = np.zeros((len(STEP_COLUMNS), min(2 * self.log.shape[1], _LARGEST_LOG)), dtype=np.int64)
            self.now[at.LOGGED] = 0
        elif status == at.NEEDS_TABLE:
            self._make_table(asked, asked_too, float(self.times[0]))
        elif status == at.NEEDS_PREFILL:
            self._price_prefill(asked, now=True)
        elif status == at.NEEDS_REQUESTS:
            self._know(2 * len(self.req) + _AHEAD)
        else:
            self._refuse(status, asked, asked_too)

    def _keep(self, steps: int) -> None:
        """Add the first steps of the log to the columns."""
        for column, new in zip(self.columns, self.log, strict=True):
            # In place where the system can (it moves pages, not bytes), so that no column is ever there twice.
            column.resize(column.size + steps, refcheck=False)
            column[column.size - steps :] = new[:steps]

    def _refuse(self, status: int, asked: int, asked_too: int) -> None:
        if status == at.TOO_LARGE:
            prompt, output = self.req[asked, [at.PROMPT, at.OUTPUT]].tolist()
            raise too_large(self.config, asked, prompt, output, int(self.cfg[at.GAMMA]))
        if status == at.SCORED_TOO_EARLY and isinstance(self.load, ClosedLoop):
            raise scored_too_early(self.load, int(self.now[at.TIME]))
        if status == at.BAD_LENGTH:
            raise length_out_of_bounds(self.policy, asked, asked_too, int(self.counts[0]))
        if status == at.DOES_NOT_FIT:
            raise does_not_fit()
        raise RuntimeError("compiled loop: no event is left, and scored requests are")

    # -- what is left behind -------------------------------------------------------------------------------

    def tables(self) -> tuple[dict[str, IntArray], dict[str, IntArray], Books]:
        """Steps, requests, and the books of the run."""
        now, rep = self.now, self.rep
        for r in range(len(rep)):
            column = self.seq[r, :, : rep[r, at.COUNT]]
            self.req[column[at.ID], at.GENERATED] = column[at.POSITION] + 1
        issued = int(now[at.ISSUED])
        requests = {name: self.req[:issued, i].copy() for i, name in enumerate(REQUEST_COLUMNS)}
        self.req = self.req[:0].copy()
        self._keep(int(now[at.LOGGED]))
        steps = dict(zip(STEP_COLUMNS, self.columns, strict=True))
        area = int(now[at.AREA_NS] + now[at.IN_SYSTEM] * (now[at.TIME] - now[at.AREA_AT]))
        books = Books(
            end_ns=int(now[at.TIME]),
            held=int(now[at.IN_PREFILL] + rep[:, [at.COUNT, at.PREFILLING, at.WAITING]].sum()),
            busy_ns=tuple(rep[:, at.BUSY_NS].tolist()),
            area_ns=area,
            longest_prefill=int(now[at.LONGEST_PREFILL]),
            left_contexts=bool(now[at.LEFT_CONTEXTS]),
        )
        return steps, requests, books


def _fixed(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A view of an array that the loop is compiled to read only."""
    view = array.view()
    view.flags.writeable = False
    return view


def _first_requests(load: ClosedLoop | OpenLoop, max_seqs: int) -> int:
    if isinstance(load, OpenLoop):
        return load.requests
    if not load.steady:
        return load.scored
    return load.first_scored + load.scored + 2 * load.users + 2 * max_seqs + _AHEAD


# -- the cache of compiled code ----------------------------------------------------------------------------


def warm_up() -> None:
    """Compile the loop, or read it from the cache, so that processes started later find it there."""
    _loop()
    note_warm()


@cache
def _loop() -> Any:
    with kernel_cache():
        return importlib.import_module("dsim.compiled.loop")
