"""The compiled loop: clients, router and replicas of a whole run over plain arrays.

A port, event by event, of `dsim.cluster.Cluster` and `dsim.replica.Replica`, which say what is right: the same events
in the same order give the same bytes. What belongs where is in `dsim.compiled.layout`. The loop stops where it needs
something from Python (a price that was not yet worked out, room for more steps, more requests) and goes on afterwards.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types

from dsim import kernel as k
from dsim.compiled import layout as at

# -- events ---------------------------------------------------------------------------------------------------


@njit(cache=True)
def _before(heap, a, b):
    return heap[a, 0] < heap[b, 0] or (heap[a, 0] == heap[b, 0] and heap[a, 1] < heap[b, 1])


@njit(cache=True)
def _swap(heap, a, b):
    for column in range(4):
        heap[a, column], heap[b, column] = heap[b, column], heap[a, column]


@njit(cache=True)
def schedule(heap, now, time, kind, argument):
    """Schedule an event: of two at the same time, the one scheduled first happens first."""
    place = now[at.HEAP_SIZE]
    now[at.HEAP_SIZE] += 1
    heap[place, 0], heap[place, 1], heap[place, 2], heap[place, 3] = time, now[at.TICKET], kind, argument
    now[at.TICKET] += 1
    while place > 0:
        parent = (place - 1) >> 1
        if not _before(heap, place, parent):
            break
        _swap(heap, place, parent)
        place = parent


@njit(cache=True)
def _pop(heap, now):
    """Remove the first event (heap[0]; read it before)."""
    now[at.HEAP_SIZE] -= 1
    size = now[at.HEAP_SIZE]
    for column in range(4):
        heap[0, column] = heap[size, column]
    place = 0
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size and _before(heap, child + 1, child):
            child += 1
        if not _before(heap, child, place):
            break
        _swap(heap, child, place)
        place = child


# -- a request's way along the bank ---------------------------------------------------------------------------


@njit(cache=True)
def _mix(state):
    state ^= state >> np.uint64(30)
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(27)
    state *= np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return state


@njit(cache=True)
def _keyed(state, component):
    """One more component of a key (`dsim.drafts.luck.hash64`)."""
    return _mix(state + np.uint64(0x9E3779B97F4A7C15) * (np.uint64(component) + np.uint64(1)))


@njit(cache=True)
def _enter(cfg, req, texts, members, request, segment, first):
    """The request reads another text from its position `first` on."""
    domain = req[at.DRAFT_DOMAIN, request]
    low, high = members[domain], members[domain + 1]
    key = _keyed(_keyed(np.uint64(cfg[at.SEED]), request), segment)
    text = texts[2, low + np.int64(key % np.uint64(high - low))]
    req[at.BASE, request] = texts[0, text] - first
    req[at.WALK_FIRST, request] = first
    req[at.WALK_END, request] = first + texts[1, text]


@njit(cache=True)
def _row(cfg, req, texts, members, request, position):
    """Row of the bank for a request at a position."""
    if position >= req[at.WALK_END, request] or position < req[at.WALK_FIRST, request]:
        segment, first = 0, 0
        _enter(cfg, req, texts, members, request, segment, first)
        while position >= req[at.WALK_END, request]:
            segment += 1
            first = req[at.WALK_END, request]
            _enter(cfg, req, texts, members, request, segment, first)
    return req[at.BASE, request] + position


@njit(cache=True)
def _accepted(cfg, bank_accepted, limits, row, request, position):
    """Drafts that would be accepted if all were verified."""
    gamma = cfg[at.GAMMA]
    if not cfg[at.TILTED]:
        return min(np.int64(bank_accepted[row]), gamma)
    state = _keyed(_keyed(np.uint64(cfg[at.SEED]) + np.uint64(1), request), position)
    for j in range(gamma):
        if (_keyed(state, j) >> np.uint64(11)) >= limits[row, j]:
            return np.int64(j)
    return gamma


# -- clients and router ---------------------------------------------------------------------------------------


@njit(cache=True)
def _population(now, change):
    now[at.AREA_NS] += now[at.IN_SYSTEM] * (now[at.TIME] - now[at.AREA_AT])
    now[at.AREA_AT] = now[at.TIME]
    now[at.IN_SYSTEM] += change


@njit(cache=True)
def _blocks(cfg, tokens):
    return -(-(tokens + 1 + cfg[at.GAMMA]) // cfg[at.BLOCK_TOKENS])


@njit(cache=True)
def _worst(cfg, req, request):
    return _blocks(cfg, req[at.PROMPT, request] + req[at.OUTPUT, request])


@njit(cache=True)
def _choose(cfg, now, rep, req):
    """The router's choice for the next request."""
    count = cfg[at.REPLICAS]
    if count == 1:
        return 0
    turn = now[at.ROUTED]
    now[at.ROUTED] += 1
    if cfg[at.ROUTER] == at.ROUND_ROBIN:
        return turn % count
    if cfg[at.ROUTER] == at.LEAST_TOKENS:
        best = 0
        for i in range(1, count):
            if rep[i, at.OUTSTANDING] < rep[best, at.OUTSTANDING]:
                best = i
        return best
    a, b = req[at.ROUTE_A, turn], req[at.ROUTE_B, turn]
    if rep[b, at.OUTSTANDING] < rep[a, at.OUTSTANDING] or (rep[b, at.OUTSTANDING] == rep[a, at.OUTSTANDING] and b < a):
        return b
    return a


@njit(cache=True)
def _enqueue(cfg, now, rep, req, heap, r, request, front):
    """A request has arrived at a replica. False: it will never fit."""
    if _worst(cfg, req, request) > cfg[at.KV_BLOCKS]:
        now[at.ASKED] = request
        return False
    req[at.REPLICA, request] = r
    if front:
        req[at.NEXT, request] = rep[r, at.HEAD]
        rep[r, at.HEAD] = request
        if rep[r, at.TAIL] < 0:
            rep[r, at.TAIL] = request
    else:
        req[at.NEXT, request] = -1
        if rep[r, at.TAIL] < 0:
            rep[r, at.HEAD] = request
        else:
            req[at.NEXT, rep[r, at.TAIL]] = request
        rep[r, at.TAIL] = request
        rep[r, at.OUTSTANDING] += req[at.OUTPUT, request] - req[at.GENERATED, request]
        if cfg[at.COLOCATED]:
            rep[r, at.OUTSTANDING] += req[at.PROMPT, request]
    rep[r, at.WAITING] += 1
    if rep[r, at.IDLE] == 1:
        rep[r, at.IDLE] = 2
        schedule(heap, now, now[at.TIME], at.WAKES, r)
    return True


@njit(cache=True)
def _take_waiting(rep, req, r):
    request = rep[r, at.HEAD]
    rep[r, at.HEAD] = req[at.NEXT, request]
    if rep[r, at.HEAD] < 0:
        rep[r, at.TAIL] = -1
    rep[r, at.WAITING] -= 1
    return request


@njit(cache=True)
def _end_request(cfg, now, heap):
    """A request has its last token. True: its user issues the next one at once."""
    _population(now, -1)
    if not cfg[at.CLOSED]:
        return False
    if cfg[at.THINK_NS] > 0:
        schedule(heap, now, now[at.TIME] + cfg[at.THINK_NS], at.ISSUES, 0)
        return False
    return True


@njit(cache=True)
def _score(cfg, now, heap, request):
    if cfg[at.FIRST_SCORED] <= request < cfg[at.END_SCORED]:
        now[at.SCORED_LEFT] -= 1
        if now[at.SCORED_LEFT] == 0:
            schedule(heap, now, now[at.TIME], at.ENDS, 0)


@njit(cache=True)
def _prefilled(cfg, now, rep, req, heap, request):
    """Disaggregated prefill is done. 1: the request ended and its user goes on; 0: nothing follows; -1: too large."""
    now[at.IN_PREFILL] -= 1
    if req[at.FIRST_NS, request] >= 0:
        return 0 if _enqueue(cfg, now, rep, req, heap, req[at.REPLICA, request], request, True) else -1
    req[at.FIRST_NS, request] = now[at.TIME]
    req[at.GENERATED, request] = 1
    if req[at.OUTPUT, request] == 1:
        req[at.FINISH_NS, request] = now[at.TIME]
        _score(cfg, now, heap, request)
        return 1 if _end_request(cfg, now, heap) else 0
    return 0 if _enqueue(cfg, now, rep, req, heap, _choose(cfg, now, rep, req), request, False) else -1


@njit(cache=True)
def issue(cfg, now, rep, req, heap, prefill_ns, texts, members):
    """The next request, and where it ends at once, those that follow. Status, or -1."""
    while True:
        number = now[at.ISSUED]
        if cfg[at.ISSUE_LIMIT] >= 0 and number >= cfg[at.ISSUE_LIMIT]:
            return -1
        if number >= req.shape[1]:
            return at.STARVED
        if (
            cfg[at.CLOSED]
            and cfg[at.STEADY]
            and number == cfg[at.FIRST_SCORED]
            and now[at.TIME] < cfg[at.LAST_START_NS]
        ):
            return at.SCORED_TOO_EARLY
        if not cfg[at.COLOCATED] and prefill_ns[req[at.PROMPT, number]] < 0:
            # Prices of prompts are worked out when requests become known: this one was refused.
            now[at.ASKED] = req[at.PROMPT, number]
            return at.NEEDS_PREFILL
        now[at.ISSUED] += 1
        req[at.ARRIVAL_NS, number] = now[at.TIME]
        if cfg[at.GAMMA]:
            _enter(cfg, req, texts, members, number, 0, 0)
        _population(now, 1)
        if cfg[at.COLOCATED]:
            if not _enqueue(cfg, now, rep, req, heap, _choose(cfg, now, rep, req), number, False):
                return at.TOO_LARGE
            return -1
        now[at.IN_PREFILL] += 1
        prompt = req[at.PROMPT, number]
        now[at.LONGEST_PREFILL] = max(now[at.LONGEST_PREFILL], prompt)
        if prefill_ns[prompt] > 0:
            schedule(heap, now, now[at.TIME] + prefill_ns[prompt], at.PREFILLED, number)
            return -1
        goes_on = _prefilled(cfg, now, rep, req, heap, number)
        if goes_on < 0:
            return at.TOO_LARGE
        if goes_on == 0:
            return -1


# -- a replica ------------------------------------------------------------------------------------------------


@njit(cache=True)
def _join(rep, req, seq, rows, r, request):
    column = rep[r, at.COUNT]
    seq[r, at.ID, column] = request
    seq[r, at.POSITION, column] = req[at.GENERATED, request] - 1
    seq[r, at.LEFT, column] = req[at.GENERATED, request] - req[at.OUTPUT, request]
    seq[r, at.CONTEXT, column] = req[at.PROMPT, request]
    seq[r, at.BORN, column] = rep[r, at.STEP]
    seq[r, at.FIRST, column] = req[at.FIRST_NS, request]
    rows[r, :, column] = -1  # nothing old is known of it
    rep[r, at.COUNT] += 1


@njit(cache=True)
def _used_blocks(cfg, rep, req, seq, r):
    used = 0
    for i in range(rep[r, at.COUNT]):
        used += _blocks(cfg, seq[r, at.CONTEXT, i] + seq[r, at.POSITION, i] + 1)
    for i in range(rep[r, at.PREFILLING]):
        request = seq[r, at.PROMPT_ID, i]
        used += _blocks(cfg, req[at.PROMPT, request] + req[at.GENERATED, request])
    return used


@njit(cache=True)
def _admit(cfg, rep, req, seq, rows, r):
    while rep[r, at.WAITING] and rep[r, at.COUNT] + rep[r, at.PREFILLING] < cfg[at.MAX_SEQS]:
        request = rep[r, at.HEAD]
        worst = _worst(cfg, req, request)
        if rep[r, at.RESERVED] + worst > cfg[at.KV_BLOCKS]:
            held = _blocks(cfg, req[at.PROMPT, request] + req[at.GENERATED, request])
            if _used_blocks(cfg, rep, req, seq, r) + held > cfg[at.KV_BLOCKS]:
                break
        _take_waiting(rep, req, r)
        rep[r, at.RESERVED] += worst
        if cfg[at.COLOCATED]:
            place = rep[r, at.PREFILLING]
            seq[r, at.PROMPT_ID, place] = request
            seq[r, at.PROMPT_LEFT, place] = req[at.PROMPT, request] + req[at.GENERATED, request]
            rep[r, at.PREFILLING] += 1
        else:
            _join(rep, req, seq, rows, r, request)


@njit(cache=True)
def _make_room(cfg, now, rep, req, seq, rows, heap, prefill_ns, r):
    """Preempt the latest admitted requests until the step's blocks fit. Status, or -1."""
    while _used_blocks(cfg, rep, req, seq, r) > cfg[at.KV_BLOCKS]:
        if rep[r, at.PREFILLING]:
            place = rep[r, at.PREFILLING] - 1
            request, lost = seq[r, at.PROMPT_ID, place], -seq[r, at.PROMPT_LEFT, place]
            generated = req[at.GENERATED, request]
        else:
            if rep[r, at.COUNT] <= 1:
                return at.DOES_NOT_FIT
            place = rep[r, at.COUNT] - 1
            request, lost = seq[r, at.ID, place], 0
            generated = seq[r, at.POSITION, place] + 1
        context = req[at.PROMPT, request] + generated
        if not cfg[at.COLOCATED] and prefill_ns[context] < 0:
            now[at.ASKED] = context
            return at.NEEDS_PREFILL
        req[at.GENERATED, request] = generated
        if rep[r, at.PREFILLING]:
            rep[r, at.PREFILLING] = place
        else:
            rep[r, at.COUNT] = place
        rep[r, at.RESERVED] -= _worst(cfg, req, request)
        req[at.PREEMPTIONS, request] += 1
        if cfg[at.COLOCATED]:
            rep[r, at.OUTSTANDING] += lost + context
            req[at.NEXT, request] = rep[r, at.HEAD]
            rep[r, at.HEAD] = request
            if rep[r, at.TAIL] < 0:
                rep[r, at.TAIL] = request
            rep[r, at.WAITING] += 1
        else:
            now[at.IN_PREFILL] += 1
            now[at.LONGEST_PREFILL] = max(now[at.LONGEST_PREFILL], context)
            if prefill_ns[context] > 0:
                schedule(heap, now, now[at.TIME] + prefill_ns[context], at.PREFILLED, request)
            elif _prefilled(cfg, now, rep, req, heap, request) < 0:
                return at.TOO_LARGE
    return -1


@njit(cache=True)
def _chunk(cfg, rep, seq, r):
    """Give the step's prompt tokens to the prompts: prompt tokens, prompts that end."""
    budget = min(cfg[at.PREFILL_CHUNK], cfg[at.TOKEN_BUDGET] - rep[r, at.COUNT] * (1 + cfg[at.GAMMA]))
    taken, finishing = 0, 0
    for i in range(rep[r, at.PREFILLING]):
        chunk = min(seq[r, at.PROMPT_LEFT, i], budget - taken)
        seq[r, at.PROMPT_LEFT, i] -= chunk
        taken += chunk
        if seq[r, at.PROMPT_LEFT, i]:
            break
        finishing += 1
    return taken, finishing


@njit(cache=True)
def _mean_context(rep, req, seq, r):
    total = 0
    if rep[r, at.COUNT]:
        for i in range(rep[r, at.COUNT]):
            total += seq[r, at.CONTEXT, i] + seq[r, at.POSITION, i] + 1
        return np.float64(total) / np.float64(rep[r, at.COUNT])
    for i in range(rep[r, at.PREFILLING]):
        total += req[at.PROMPT, seq[r, at.PROMPT_ID, i]]
    return np.float64(total) / np.float64(max(1, rep[r, at.PREFILLING]))


@njit(cache=True)
def _context_bucket(cfg, bounds, mean):
    """Where the prices at a mean context are kept (`dsim.prices.ArmPrices`), and whether it was not profiled."""
    low, high, step = bounds[at.CONTEXT_LOW], bounds[at.CONTEXT_HIGH], bounds[at.CONTEXT_STEP]
    bucket = np.int64(np.rint(mean / step))
    inside = low <= mean <= high
    if inside and bucket * step < low:
        return 0, False
    if inside and bucket * step > high:
        return cfg[at.CONTEXT_BUCKETS] - 1, False
    return bucket + 1, not inside


@njit(cache=True)
def _start_step(plan, arrays, r, resumed):
    """What a replica does between two steps: admit, draft, plan, and wait for the step's time. Status, or -1."""
    cfg, bounds, now, rep, req, seq = arrays.cfg, arrays.bounds, arrays.now, arrays.rep, arrays.req, arrays.seq
    rows, heap, host, prefill_ns = arrays.rows, arrays.heap, arrays.host, arrays.prefill_ns
    counts, times, blocks, age, caps = arrays.counts, arrays.times, arrays.blocks, arrays.age, arrays.caps
    lengths = arrays.lengths
    if not resumed and rep[r, at.WAITING] and not (cfg[at.ADMIT_AHEAD] and (rep[r, at.COUNT] or rep[r, at.PREFILLING])):
        _admit(cfg, rep, req, seq, rows, r)
    if not rep[r, at.COUNT] and not rep[r, at.PREFILLING]:
        rep[r, at.IDLE] = 1
        return -1
    if rep[r, at.RESERVED] > cfg[at.KV_BLOCKS]:
        status = _make_room(cfg, now, rep, req, seq, rows, heap, prefill_ns, r)
        if status >= 0:
            return status
    running = rep[r, at.COUNT]
    gamma = cfg[at.GAMMA]
    context = 0.0
    bucket = 0
    if cfg[at.BY_CONTEXT]:
        context = _mean_context(rep, req, seq, r)
        bucket, outside = _context_bucket(cfg, bounds, context)
        if outside:
            now[at.LEFT_CONTEXTS] = 1
    by_requests = running if cfg[at.BY_REQUESTS] else 0
    table = arrays.table_of[by_requests, bucket]
    if table < 0:
        now[at.ASKED] = by_requests
        now[at.ASKED_TOO] = bucket
        times[0] = context
        return at.NEEDS_TABLE
    prefill_tokens, finishing = 0, 0
    if rep[r, at.PREFILLING]:
        prefill_tokens, finishing = _chunk(cfg, rep, seq, r)
    base = running + prefill_tokens
    drafts, draft_ns, planned = 0, 0, 0
    if running and gamma:
        depth = cfg[at.DEPTH]
        tight = 0
        for i in range(running):
            request, position = seq[r, at.ID, i], seq[r, at.POSITION, i]
            row = _row(cfg, req, arrays.texts, arrays.members, request, position)
            seq[r, at.ROW, i] = row
            accepted = _accepted(cfg, arrays.accepted, arrays.limits, row, request, position)
            seq[r, at.ACCEPTED, i] = accepted
            for n in range(cfg[at.AGES]):
                past = arrays.ages[n]
                old = row if past == 0 else rows[r, past - 1, i]
                if old < 0:
                    for j in range(gamma):
                        blocks[n, i, j] = np.float32(1.0)
                else:
                    for j in range(gamma):
                        value = arrays.confidence[old, j]
                        blocks[n, i, j] = value if value > np.float32(0.0) else np.float32(0.0)
            age[i] = rep[r, at.STEP] - seq[r, at.BORN, i]
            left = -1 - seq[r, at.LEFT, i]
            caps[i] = gamma
            if cfg[at.CLIP]:
                caps[i] = min(gamma, left)
                tight = 1
            if cfg[at.CLAIRVOYANT]:
                arrays.useful[i] = min(accepted, left)
        # The blocks of this step are one step old in the next one.
        for n in range(depth - 1, 0, -1):
            for i in range(running):
                rows[r, n, i] = rows[r, n - 1, i]
        if depth:
            for i in range(running):
                rows[r, 0, i] = seq[r, at.ROW, i]
        counts[k.REQUESTS] = running
        counts[k.BLOCK] = gamma
        counts[k.BASE] = base
        counts[k.SAMPLING] = running + finishing
        counts[k.CAPS_BIND] = tight
        counts[k.QUEUE] = rep[r, at.WAITING]
        counts[k.AGE] = rep[r, at.STEP]
        counts[k.CAPTURED] = cfg[at.CAPTURE_LIMIT]
        times[k.DRAFT_MS] = np.float64(host[at.DRAFT_NS, running]) * 1e-6
        times[k.HOST_HIDDEN_MS] = np.float64(host[at.HIDDEN_NS, running]) * 1e-6
        times[k.HOST_EXPOSED_MS] = np.float64(host[at.EXPOSED_NS, running]) * 1e-6
        times[k.SLO_MS] = bounds[at.SLO_TPOT_MS]
        times[k.TIME_S] = np.float64(now[at.TIME]) * 1e-9
        plan(
            counts,
            times,
            blocks,
            arrays.verify_ms[table],
            arrays.believed[table],
            arrays.captured,
            age,
            caps,
            arrays.useful,
            arrays.params,
            arrays.state[r],
            arrays.work,
            lengths,
        )
        for i in range(running):
            length = lengths[i]
            if length < 0 or length > caps[i]:
                now[at.ASKED] = seq[r, at.ID, i]
                now[at.ASKED_TOO] = length
                counts[0] = caps[i]
                return at.BAD_LENGTH
            seq[r, at.LENGTH, i] = length
            drafts += length
        draft_ns = host[at.DRAFT_NS, running]
        planned = 1
    gpu_ns = draft_ns + arrays.verify_ns[table, base + drafts]
    step_ns = max(gpu_ns, host[at.HIDDEN_NS, running]) + host[at.EXPOSED_NS, running]
    if cfg[at.ADMIT_AHEAD] and rep[r, at.WAITING]:
        _admit(cfg, rep, req, seq, rows, r)
    rep[r, at.STEP_NS] = step_ns
    rep[r, at.STEP_PREFILL] = prefill_tokens
    rep[r, at.STEP_FINISHING] = finishing
    rep[r, at.STEP_DRAFTS] = drafts
    rep[r, at.STEP_PLANNED] = planned
    rep[r, at.STEP_CONTEXT] = np.int64(np.rint(context * np.float64(running)))
    schedule(heap, now, now[at.TIME] + step_ns, at.STEP_ENDS, r)
    return -1


@njit(cache=True)
def _finish(cfg, now, rep, req, heap, prefill_ns, texts, members, r, request):
    """A request's last token came out of a step. Status, or -1."""
    rep[r, at.RESERVED] -= _worst(cfg, req, request)
    req[at.FINISH_NS, request] = now[at.TIME]
    _score(cfg, now, heap, request)
    if _end_request(cfg, now, heap):
        return issue(cfg, now, rep, req, heap, prefill_ns, texts, members)
    return -1


@njit(cache=True)
def _commit(cfg, now, rep, req, seq, rows, heap, prefill_ns, texts, members, log, ended, r):
    """The step is over: advance every request, cut it at its output length, record. Status, or -1."""
    running = rep[r, at.COUNT]
    hits, ends = 0, 0
    committed = running
    for i in range(running):
        gained = 1
        if rep[r, at.STEP_PLANNED]:
            kept = min(seq[r, at.ACCEPTED, i], seq[r, at.LENGTH, i])
            hits += kept
            gained += kept
        seq[r, at.POSITION, i] += gained
        left = seq[r, at.LEFT, i] + gained
        seq[r, at.LEFT, i] = left
        if left >= 0:
            ended[ends] = seq[r, at.ID, i]
            ends += 1
            committed -= left  # what lies beyond the cut
    committed += hits
    if running:
        rep[r, at.STEP] += 1
    finishing, prefill_tokens = rep[r, at.STEP_FINISHING], rep[r, at.STEP_PREFILL]
    rep[r, at.BUSY_NS] += rep[r, at.STEP_NS]
    rep[r, at.OUTSTANDING] -= committed + prefill_tokens + finishing
    line = now[at.LOGGED]
    now[at.LOGGED] += 1
    log[0, line] = now[at.TIME]
    log[1, line] = rep[r, at.STEP_NS]
    log[2, line] = r
    log[3, line] = running
    log[4, line] = prefill_tokens
    log[5, line] = rep[r, at.STEP_DRAFTS]
    log[6, line] = hits
    log[7, line] = committed
    log[8, line] = finishing
    log[9, line] = running + prefill_tokens + rep[r, at.STEP_DRAFTS]
    log[10, line] = rep[r, at.WAITING]
    log[11, line] = rep[r, at.STEP_CONTEXT]
    if ends:
        kept = 0
        for i in range(running):
            if seq[r, at.LEFT, i] < 0:
                if kept != i:
                    for row in range(at.FIRST + 1):
                        seq[r, row, kept] = seq[r, row, i]
                    for n in range(cfg[at.DEPTH]):
                        rows[r, n, kept] = rows[r, n, i]
                kept += 1
        rep[r, at.COUNT] = kept
        for i in range(ends):
            request = ended[i]
            req[at.GENERATED, request] = req[at.OUTPUT, request]
            status = _finish(cfg, now, rep, req, heap, prefill_ns, texts, members, r, request)
            if status >= 0:
                return status
    if finishing:
        for i in range(finishing):
            request = seq[r, at.PROMPT_ID, i]
            req[at.GENERATED, request] += 1
            if req[at.FIRST_NS, request] < 0:
                req[at.FIRST_NS, request] = now[at.TIME]
            if req[at.GENERATED, request] >= req[at.OUTPUT, request]:
                status = _finish(cfg, now, rep, req, heap, prefill_ns, texts, members, r, request)
                if status >= 0:
                    return status
            else:
                _join(rep, req, seq, rows, r, request)
        for i in range(finishing, rep[r, at.PREFILLING]):
            seq[r, at.PROMPT_ID, i - finishing] = seq[r, at.PROMPT_ID, i]
            seq[r, at.PROMPT_LEFT, i - finishing] = seq[r, at.PROMPT_LEFT, i]
        rep[r, at.PREFILLING] -= finishing
    return -1


# -- the run --------------------------------------------------------------------------------------------------

_I1 = types.Array(types.int64, 1, "C")
_I2 = types.Array(types.int64, 2, "C")
_I3 = types.Array(types.int64, 3, "C")
_F1 = types.Array(types.float64, 1, "C")
_F2 = types.Array(types.float64, 2, "C")

_ARRAYS = types.NamedTuple(
    (
        _I1,  # cfg
        _F1,  # bounds
        _I1,  # now
        _I2,  # rep
        _I2,  # req
        _I3,  # seq
        _I3,  # rows
        _I2,  # heap
        _I2,  # host
        _I1,  # prefill_ns
        _I2,  # table_of
        _I2,  # verify_ns
        _F2,  # verify_ms
        _F2,  # believed
        types.Array(types.float32, 2, "C", readonly=True),  # confidence
        types.Array(types.int64, 1, "C", readonly=True),  # accepted
        types.Array(types.uint64, 2, "C", readonly=True),  # limits
        _I2,  # texts
        _I1,  # members
        _I1,  # ages
        _F1,  # params
        _F2,  # state
        _I1,  # counts
        _F1,  # times
        types.Array(types.float32, 3, "C"),  # blocks
        _I1,  # captured
        _I1,  # age
        _I1,  # caps
        _I1,  # useful
        types.Array(types.float32, 2, "C"),  # work
        _I1,  # lengths
        _I1,  # ended
    ),
    at.Arrays,
)


@njit([types.int64(types.FunctionType(k.signature()), _ARRAYS, _I2)], cache=True)
def advance(plan, arrays, log):
    """Run until the last scored request has ended, or until something is needed. A status of the layout."""
    cfg, now, rep, req, seq = arrays.cfg, arrays.now, arrays.rep, arrays.req, arrays.seq
    rows, heap, prefill_ns, texts, members = arrays.rows, arrays.heap, arrays.prefill_ns, arrays.texts, arrays.members
    ended = arrays.ended
    turn = now[at.RESUME]  # the replica whose turn it is to start a step; -1: none
    resumed = turn >= 0
    now[at.RESUME] = -1
    # At the start all replicas are looked at in order, before any event.
    while True:
        if turn < 0 and now[at.STARTED] < cfg[at.REPLICAS]:
            turn = now[at.STARTED]
            now[at.STARTED] += 1
        if turn >= 0:
            status = _start_step(plan, arrays, turn, resumed)
            resumed = False
            if status >= 0:
                now[at.RESUME] = turn
                return status
            turn = -1
            continue
        if now[at.HEAP_SIZE] == 0:
            return at.STARVED
        if now[at.LOGGED] >= log.shape[1]:
            return at.LOG_FULL
        # Enough requests are known, and places for their events, for whatever one event can set off.
        if cfg[at.ISSUE_LIMIT] < 0 and now[at.ISSUED] + 2 * cfg[at.MAX_SEQS] + 2 > req.shape[1]:
            return at.NEEDS_REQUESTS
        time, kind, argument = heap[0, 0], heap[0, 2], heap[0, 3]
        _pop(heap, now)
        now[at.TIME] = time
        if kind == at.STEP_ENDS:
            status = _commit(cfg, now, rep, req, seq, rows, heap, prefill_ns, texts, members, log, ended, argument)
            if status >= 0:
                return status
            turn = argument
        elif kind == at.WAKES:
            rep[argument, at.IDLE] = 0
            turn = argument
        elif kind == at.ISSUES:
            status = issue(cfg, now, rep, req, heap, prefill_ns, texts, members)
            if status >= 0:
                return status
        elif kind == at.ARRIVES:
            while now[at.ISSUED] < cfg[at.OPEN_REQUESTS] and req[at.DUE_NS, now[at.ISSUED]] <= now[at.TIME]:
                status = issue(cfg, now, rep, req, heap, prefill_ns, texts, members)
                if status >= 0:
                    return status
            if now[at.ISSUED] < cfg[at.OPEN_REQUESTS]:
                schedule(heap, now, req[at.DUE_NS, now[at.ISSUED]], at.ARRIVES, 0)
        elif kind == at.PREFILLED:
            goes_on = _prefilled(cfg, now, rep, req, heap, argument)
            if goes_on < 0:
                return at.TOO_LARGE
            if goes_on > 0:
                status = issue(cfg, now, rep, req, heap, prefill_ns, texts, members)
                if status >= 0:
                    return status
        else:
            return at.FINISHED
