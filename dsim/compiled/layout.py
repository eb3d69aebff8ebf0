"""Where things lie in the arrays that the compiled loop works on. Numbers only: nothing here needs Numba."""

from __future__ import annotations

from typing import Any, NamedTuple

# -- cfg: int64, what a run does not change ------------------------------------------------------------------
(
    REPLICAS,
    MAX_SEQS,
    TOKEN_BUDGET,
    PREFILL_CHUNK,
    COLOCATED,
    BLOCK_TOKENS,
    KV_BLOCKS,
    ADMIT_AHEAD,
    CLIP,
    GAMMA,
    AGES,  # how many ages of confidences the policy reads
    CLAIRVOYANT,
    ROUTER,
    CLOSED,
    STEADY,
    THINK_NS,
    FIRST_SCORED,
    END_SCORED,
    LAST_START_NS,
    ISSUE_LIMIT,  # a client that issues so many and no more; -1: no limit
    OPEN_REQUESTS,
    BY_REQUESTS,  # prices depend on the number of requests
    BY_CONTEXT,
    TILTED,  # what is accepted is worked out from the luck
    RECORDED_GAMMA,
    SEED,  # of the trajectories, as its 64 bits; the luck's is one more
    CAPTURE_LIMIT,
    CONTEXT_BUCKETS,
    LEARNS,  # the policy is told what became of its drafts
    CFG_SIZE,
) = range(30)

# Routers by number.
ROUND_ROBIN, LEAST_TOKENS, POWER_OF_TWO = range(3)

# -- bounds: float64 --------------------------------------------------------------------------------------------
CONTEXT_LOW, CONTEXT_HIGH, CONTEXT_STEP, SLO_TPOT_MS, BOUNDS_SIZE = range(5)

# -- now: int64, the whole run's changing numbers ---------------------------------------------------------------
(
    TIME,
    TICKET,  # events scheduled so far: those of equal time happen in that order
    HEAP_SIZE,
    ISSUED,
    SCORED_LEFT,
    IN_SYSTEM,
    AREA_NS,
    AREA_AT,
    IN_PREFILL,
    ROUTED,
    LOGGED,
    LEFT_CONTEXTS,
    LONGEST_PREFILL,
    RESUME,  # replica whose step waits for what was asked for; -1: none
    ASKED,  # what a status is about
    ASKED_TOO,
    STARTED,
    NOW_SIZE,
) = range(18)

# -- rep: int64[replicas, REP_SIZE] ------------------------------------------------------------------------------
(
    COUNT,
    STEP,
    BUSY_NS,
    OUTSTANDING,
    RESERVED,
    HEAD,  # of the waiting requests, a linked list; -1: empty
    TAIL,
    WAITING,
    PREFILLING,
    IDLE,  # 0 stepping, 1 asleep, 2 woken
    STEP_NS,
    STEP_PREFILL,
    STEP_FINISHING,
    STEP_DRAFTS,
    STEP_PLANNED,
    STEP_CONTEXT,  # mean context times requests, rounded
    NEWEST,  # of the layers of `past`
    REP_SIZE,
) = range(18)

# -- seq: int64[replicas, SEQ_SIZE, max_seqs]: one column a request in decode, in order of admission -------------
# All that a step looks up of a request is here, side by side: in a large fleet nothing of a replica is in a near cache
# when its turn comes, and what lies in a row is fetched ahead.
(
    ID,
    POSITION,
    LEFT,  # minus the tokens it still has to produce
    CONTEXT,
    BORN,
    ROW_OF_0,  # of the bank: where position 0 would lie in the text that it reads
    TEXT_END,  # the first position that does not lie in that text
    LENGTH,  # drafts verified in the step
    ACCEPTED,
    PROMPT_ID,  # the prompts in chunks: another list in the same columns
    PROMPT_LEFT,
    SEQ_SIZE,
) = range(12)
KEPT = LENGTH  # what a request takes along from step to step

# -- req: int64[requests, REQ_SIZE] --------------------------------------------------------------------------------
(
    ARRIVAL_NS,
    FIRST_NS,
    FINISH_NS,
    PROMPT,
    OUTPUT,
    GENERATED,
    DOMAIN,
    REPLICA,
    PREEMPTIONS,
    NEXT,  # the request behind it in a waiting list
    REQ_SIZE,
) = range(11)

# -- heap: int64[capacity, 4] of (time, ticket, kind, argument) ---------------------------------------------------
STEP_ENDS, WAKES, ISSUES, ARRIVES, PREFILLED, ENDS = range(6)

# -- host: int64[4, running + 1] nanoseconds by requests in decode -------------------------------------------------
DRAFT_NS, HIDDEN_NS, EXPOSED_NS = range(3)

# -- what `advance` returns ----------------------------------------------------------------------------------------
(
    FINISHED,
    LOG_FULL,
    NEEDS_TABLE,
    NEEDS_PREFILL,
    NEEDS_REQUESTS,
    TOO_LARGE,
    SCORED_TOO_EARLY,
    BAD_LENGTH,
    DOES_NOT_FIT,
    STARVED,
) = range(10)


class Arrays(NamedTuple):
    """What `dsim.compiled.loop.advance` works on, but for the log, which is changed when it is full.

    S is `ReplicaConfig.max_seqs`, G gamma, T the largest step; tables are one row a price table, see `table_of`.
    """

    cfg: Any
    bounds: Any
    now: Any
    rep: Any
    req: Any
    due: Any  # int64[requests]: when the trace has it arrive, nanoseconds; empty in a closed loop
    pairs: Any  # int64[requests, 2]: the two replicas that power-of-two looks at, for the n-th routing
    seq: Any
    past: Any  # float32[replicas, depth + 1, S * G]: confidences of the last steps; 1 where a request is younger
    heap: Any
    host: Any
    prefill_ns: Any  # int64[tokens]; -1: not priced yet
    table_of: Any  # int64[requests, context buckets]; -1: not made yet
    verify_ns: Any  # int64[tables, T + 1]
    verify_ms: Any  # float64[tables, T + 1]
    believed: Any  # float64[tables, T + 1]: what the policy takes it for
    confidence: Any  # float32[rows of the bank, >= G]
    accepted: Any  # uint8[rows of the bank]
    limits: Any  # uint64[rows of the bank, G], where alphas are tilted
    texts: Any  # int64[3, texts]: first row, usable rows, and the texts by domain
    members: Any  # int64[2, domains of the workload]: where a domain's texts begin and end in that third row
    ages: Any
    params: Any
    state: Any
    # One policy's view at a time (`dsim.kernel.Kernel`).
    counts: Any
    times: Any
    blocks: Any
    layers: Any  # the same memory as `blocks`: float32[ages, S * G]
    captured: Any
    age: Any
    caps: Any
    useful: Any
    work: Any
    lengths: Any
    ended: Any  # int64[S]: requests that ended in the step
    row: Any  # int64[S]: scratch: rows of the bank, accepted drafts, columns
