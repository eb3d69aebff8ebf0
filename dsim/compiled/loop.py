"""The compiled loop: clients, router and replicas of a whole run over plain arrays.

A port, event by event, of `dsim.cluster.Cluster` and `dsim.replica.Replica`, which say what is right: the same events
in the same order give the same bytes. What belongs where is in `dsim.compiled.layout`. The loop stops where it needs
something from Python (a price that was not yet worked out, room for more steps, more requests) and goes on afterwards.
"""

from __future__ import annotations

import numpy as np
from numba import cfunc, njit, types

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
def _find_text(cfg, req, seq, texts, members, r, column):
    """Note where in the bank a request in decode is read from at its position, and up to which position."""
    request, position = seq[r, at.ID, column], seq[r, at.POSITION, column]
    domain = req[request, at.DOMAIN]
    low, high = members[0, domain], members[1, domain]
    of_request = _keyed(np.uint64(cfg[at.SEED]), request)
    segment, base, first, end = 0, 0, 0, 0
    while position >= end:
        first = end
        text = texts[2, low + np.int64(_keyed(of_request, segment) % np.uint64(high - low))]
        base, end = texts[0, text] - first, first + texts[1, text]
        segment += 1
    seq[r, at.ROW_OF_0, column] = base
    seq[r, at.TEXT_END, column] = end


@njit(cache=True)
def _survivors(cfg, limits, row, request, position):
    """Drafts that would be accepted if all were verified, where alphas are tilted."""
    gamma = cfg[at.GAMMA]
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
    return _blocks(cfg, req[request, at.PROMPT] + req[request, at.OUTPUT])


@njit(cache=True)
def _choose(cfg, now, rep, pairs):
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
    a, b = pairs[turn, 0], pairs[turn, 1]
    if rep[b, at.OUTSTANDING] < rep[a, at.OUTSTANDING] or (rep[b, at.OUTSTANDING] == rep[a, at.OUTSTANDING] and b < a):
        return b
    return a


@njit(cache=True)
def _enqueue(cfg, now, rep, req, heap, r, request, front):
    """A request has arrived at a replica. False: it will never fit."""
    if _worst(cfg, req, request) > cfg[at.KV_BLOCKS]:
        now[at.ASKED] = request
        return False
    req[request, at.REPLICA] = r
    if front:
        req[request, at.NEXT] = rep[r, at.HEAD]
        rep[r, at.HEAD] = request
        if rep[r, at.TAIL] < 0:
            rep[r, at.TAIL] = request
    else:
        req[request, at.NEXT] = -1
        if rep[r, at.TAIL] < 0:
            rep[r, at.HEAD] = request
        else:
            req[rep[r, at.TAIL], at.NEXT] = request
        rep[r, at.TAIL] = request
        rep[r, at.OUTSTANDING] += req[request, at.OUTPUT] - req[request, at.GENERATED]
        if cfg[at.COLOCATED]:
            rep[r, at.OUTSTANDING] += req[request, at.PROMPT]
    rep[r, at.WAITING] += 1
    if rep[r, at.IDLE] == 1:
        rep[r, at.IDLE] = 2
        schedule(heap, now, now[at.TIME], at.WAKES, r)
    return True


@njit(cache=True)
def _take_waiting(rep, req, r):
    request = rep[r, at.HEAD]
    rep[r, at.HEAD] = req[request, at.NEXT]
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
def _prefilled(cfg, now, rep, req, pairs, heap, request):
    """Disaggregated prefill is done. 1: the request ended and its user goes on; 0: nothing follows; -1: too large."""
    now[at.IN_PREFILL] -= 1
    if req[request, at.FIRST_NS] >= 0:
        return 0 if _enqueue(cfg, now, rep, req, heap, req[request, at.REPLICA], request, True) else -1
    req[request, at.FIRST_NS] = now[at.TIME]
    req[request, at.GENERATED] = 1
    if req[request, at.OUTPUT] == 1:
        req[request, at.FINISH_NS] = now[at.TIME]
        _score(cfg, now, heap, request)
        return 1 if _end_request(cfg, now, heap) else 0
    return 0 if _enqueue(cfg, now, rep, req, heap, _choose(cfg, now, rep, pairs), request, False) else -1


@njit(cache=True)
def issue(cfg, now, rep, req, pairs, heap, prefill_ns):
    """The next request, and where it ends at once, those that follow. Status, or -1."""
    while True:
        number = now[at.ISSUED]
        if cfg[at.ISSUE_LIMIT] >= 0 and number >= cfg[at.ISSUE_LIMIT]:
            return -1
        if number >= req.shape[0]:
            return at.STARVED
        if (
            cfg[at.CLOSED]
            and cfg[at.STEADY]
            and number == cfg[at.FIRST_SCORED]
            and now[at.TIME] < cfg[at.LAST_START_NS]
        ):
            return at.SCORED_TOO_EARLY
        if not cfg[at.COLOCATED] and prefill_ns[req[number, at.PROMPT]] < 0:
            # Prices of prompts are worked out when requests become known: this one was refused.
            now[at.ASKED] = req[number, at.PROMPT]
            return at.NEEDS_PREFILL
        now[at.ISSUED] += 1
        req[number, at.ARRIVAL_NS] = now[at.TIME]
        _population(now, 1)
        if cfg[at.COLOCATED]:
            if not _enqueue(cfg, now, rep, req, heap, _choose(cfg, now, rep, pairs), number, False):
                return at.TOO_LARGE
            return -1
        now[at.IN_PREFILL] += 1
        prompt = req[number, at.PROMPT]
        now[at.LONGEST_PREFILL] = max(now[at.LONGEST_PREFILL], prompt)
        if prefill_ns[prompt] > 0:
            schedule(heap, now, now[at.TIME] + prefill_ns[prompt], at.PREFILLED, number)
            return -1
        goes_on = _prefilled(cfg, now, rep, req, pairs, heap, number)
        if goes_on < 0:
            return at.TOO_LARGE
        if goes_on == 0:
            return -1


# -- a replica ------------------------------------------------------------------------------------------------


@njit(cache=True)
def _join(cfg, rep, req, seq, past, texts, members, r, request):
    column = rep[r, at.COUNT]
    seq[r, at.ID, column] = request
    seq[r, at.POSITION, column] = req[request, at.GENERATED] - 1
    seq[r, at.LEFT, column] = req[request, at.GENERATED] - req[request, at.OUTPUT]
    seq[r, at.CONTEXT, column] = req[request, at.PROMPT]
    seq[r, at.BORN, column] = rep[r, at.STEP]
    gamma = cfg[at.GAMMA]
    if gamma:
        _find_text(cfg, req, seq, texts, members, r, column)
        for n in range(past.shape[1]):
            for j in range(column * gamma, (column + 1) * gamma):
                past[r, n, j] = np.float32(1.0)  # nothing old is known of it
    rep[r, at.COUNT] += 1


@njit(cache=True)
def _used_blocks(cfg, rep, req, seq, r):
    used = 0
    for i in range(rep[r, at.COUNT]):
        used += _blocks(cfg, seq[r, at.CONTEXT, i] + seq[r, at.POSITION, i] + 1)
    for i in range(rep[r, at.PREFILLING]):
        request = seq[r, at.PROMPT_ID, i]
        used += _blocks(cfg, req[request, at.PROMPT] + req[request, at.GENERATED])
    return used


@njit(cache=True)
def _admit(cfg, rep, req, seq, past, texts, members, r):
    while rep[r, at.WAITING] and rep[r, at.COUNT] + rep[r, at.PREFILLING] < cfg[at.MAX_SEQS]:
        request = rep[r, at.HEAD]
        worst = _worst(cfg, req, request)
        if rep[r, at.RESERVED] + worst > cfg[at.KV_BLOCKS]:
            held = _blocks(cfg, req[request, at.PROMPT] + req[request, at.GENERATED])
            if _used_blocks(cfg, rep, req, seq, r) + held > cfg[at.KV_BLOCKS]:
                break
        _take_waiting(rep, req, r)
        rep[r, at.RESERVED] += worst
        if cfg[at.COLOCATED]:
            place = rep[r, at.PREFILLING]
            seq[r, at.PROMPT_ID, place] = request
            seq[r, at.PROMPT_LEFT, place] = req[request, at.PROMPT] + req[request, at.GENERATED]
            rep[r, at.PREFILLING] += 1
        else:
            _join(cfg, rep, req, seq, past, texts, members, r, request)


@njit(cache=True)
def _make_room(cfg, now, rep, req, pairs, seq, heap, prefill_ns, r):
    """Preempt the latest admitted requests until the step's blocks fit. Status, or -1."""
    while _used_blocks(cfg, rep, req, seq, r) > cfg[at.KV_BLOCKS]:
        if rep[r, at.PREFILLING]:
            place = rep[r, at.PREFILLING] - 1
            request, lost = seq[r, at.PROMPT_ID, place], -seq[r, at.PROMPT_LEFT, place]
            generated = req[request, at.GENERATED]
        else:
            if rep[r, at.COUNT] <= 1:
                return at.DOES_NOT_FIT
            place = rep[r, at.COUNT] - 1
            request, lost = seq[r, at.ID, place], 0
            generated = seq[r, at.POSITION, place] + 1
        context = req[request, at.PROMPT] + generated
        if not cfg[at.COLOCATED] and prefill_ns[context] < 0:
            now[at.ASKED] = context
            return at.NEEDS_PREFILL
        req[request, at.GENERATED] = generated
        if rep[r, at.PREFILLING]:
            rep[r, at.PREFILLING] = place
        else:
            rep[r, at.COUNT] = place
        rep[r, at.RESERVED] -= _worst(cfg, req, request)
        req[request, at.PREEMPTIONS] += 1
        if cfg[at.COLOCATED]:
            rep[r, at.OUTSTANDING] += lost + context
            req[request, at.NEXT] = rep[r, at.HEAD]
            rep[r, at.HEAD] = request
            if rep[r, at.TAIL] < 0:
                rep[r, at.TAIL] = request
            rep[r, at.WAITING] += 1
        else:
            now[at.IN_PREFILL] += 1
            now[at.LONGEST_PREFILL] = max(now[at.LONGEST_PREFILL], context)
            if prefill_ns[context] > 0:
                schedule(heap, now, now[at.TIME] + prefill_ns[context], at.PREFILLED, request)
            elif _prefilled(cfg, now, rep, req, pairs, heap, request) < 0:
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
        total += req[seq[r, at.PROMPT_ID, i], at.PROMPT]
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


@njit(cache=True, forceinline=True)
def _draft(cfg, rep, req, seq, past, texts, members, bank, outcomes, limits, ages, layers, row, r):
    """Draft for all requests of a replica: what would be accepted, and the confidences that the policy looks at."""
    gamma, running = cfg[at.GAMMA], rep[r, at.COUNT]
    for i in range(running):
        position = seq[r, at.POSITION, i]
        if position >= seq[r, at.TEXT_END, i]:
            _find_text(cfg, req, seq, texts, members, r, i)
        place = seq[r, at.ROW_OF_0, i] + position
        row[i] = place
        if cfg[at.TILTED]:
            seq[r, at.ACCEPTED, i] = _survivors(cfg, limits, place, seq[r, at.ID, i], position)
        else:
            seq[r, at.ACCEPTED, i] = min(np.int64(outcomes[place]), gamma)
    # The blocks of the last steps, one layer a step, over and over.
    kept = past.shape[1]
    newest = rep[r, at.NEWEST] + 1
    if newest == kept:
        newest = 0
    rep[r, at.NEWEST] = newest
    # Position by position: in a large fleet the bank's rows come from far memory, and so many are on their way at once.
    for j in range(gamma):
        for i in range(running):
            value = bank[row[i], j]
            past[r, newest, i * gamma + j] = value if value > np.float32(0.0) else np.float32(0.0)
    for n in range(cfg[at.AGES]):
        layer = newest - ages[n]
        if layer < 0:
            layer += kept
        for j in range(running * gamma):
            layers[n, j] = past[r, layer, j]


@njit(cache=True, forceinline=True)
def _start_step(plan, arrays, r, resumed):
    """What a replica does between two steps: admit, draft, plan, and wait for the step's time. Status, or -1."""
    cfg, bounds, now, rep, req, seq = arrays.cfg, arrays.bounds, arrays.now, arrays.rep, arrays.req, arrays.seq
    heap, host, prefill_ns, pairs = arrays.heap, arrays.host, arrays.prefill_ns, arrays.pairs
    past, texts, members = arrays.past, arrays.texts, arrays.members
    counts, times, blocks, age, caps = arrays.counts, arrays.times, arrays.blocks, arrays.age, arrays.caps
    lengths = arrays.lengths
    if not resumed and rep[r, at.WAITING] and not (cfg[at.ADMIT_AHEAD] and (rep[r, at.COUNT] or rep[r, at.PREFILLING])):
        _admit(cfg, rep, req, seq, past, texts, members, r)
    if not rep[r, at.COUNT] and not rep[r, at.PREFILLING]:
        rep[r, at.IDLE] = 1
        return -1
    if rep[r, at.RESERVED] > cfg[at.KV_BLOCKS]:
        status = _make_room(cfg, now, rep, req, pairs, seq, heap, prefill_ns, r)
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
        bank, outcomes, limits = arrays.confidence, arrays.accepted, arrays.limits
        layers, row = arrays.layers, arrays.row
        _draft(cfg, rep, req, seq, past, texts, members, bank, outcomes, limits, arrays.ages, layers, row, r)
        tight = 0
        for i in range(running):
            age[i] = rep[r, at.STEP] - seq[r, at.BORN, i]
            caps[i] = gamma
        if cfg[at.CLIP]:
            tight = 1
            for i in range(running):
                caps[i] = min(gamma, -1 - seq[r, at.LEFT, i])
        if cfg[at.CLAIRVOYANT]:
            for i in range(running):
                arrays.useful[i] = min(seq[r, at.ACCEPTED, i], -1 - seq[r, at.LEFT, i])
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
        _admit(cfg, rep, req, seq, past, texts, members, r)
    rep[r, at.STEP_NS] = step_ns
    rep[r, at.STEP_PREFILL] = prefill_tokens
    rep[r, at.STEP_FINISHING] = finishing
    rep[r, at.STEP_DRAFTS] = drafts
    rep[r, at.STEP_PLANNED] = planned
    rep[r, at.STEP_CONTEXT] = np.int64(np.rint(context * np.float64(running)))
    schedule(heap, now, now[at.TIME] + step_ns, at.STEP_ENDS, r)
    return -1


@njit(cache=True)
def _finish(cfg, now, rep, req, pairs, heap, prefill_ns, r, request):
    """A request's last token came out of a step. Status, or -1."""
    rep[r, at.RESERVED] -= _worst(cfg, req, request)
    req[request, at.FINISH_NS] = now[at.TIME]
    _score(cfg, now, heap, request)
    if _end_request(cfg, now, heap):
        return issue(cfg, now, rep, req, pairs, heap, prefill_ns)
    return -1


@njit(cache=True)
def _close_up(cfg, seq, past, row, r, running):
    """Close the gaps of the requests that have ended; how many there are now."""
    kept = 0
    for i in range(running):
        row[kept] = i
        kept += seq[r, at.LEFT, i] < 0
    first = 0
    while first < kept and row[first] == first:
        first += 1
    for field in range(at.KEPT):
        for i in range(first, kept):
            seq[r, field, i] = seq[r, field, row[i]]
    gamma = cfg[at.GAMMA]
    for n in range(past.shape[1]):
        for i in range(first, kept):
            for j in range(gamma):
                past[r, n, i * gamma + j] = past[r, n, row[i] * gamma + j]
    return kept


@njit(cache=True, forceinline=True)
def _commit(
    cfg, now, rep, req, pairs, seq, past, heap, prefill_ns, texts, members, observe, params, state, kept, ended, log, r
):
    """The step is over: advance every request, cut it at its output length, tell, record. Status, or -1."""
    running = rep[r, at.COUNT]
    hits, ends = 0, 0
    committed = running
    for i in range(running):
        gained = 1
        if rep[r, at.STEP_PLANNED]:
            kept[i] = min(seq[r, at.ACCEPTED, i], seq[r, at.LENGTH, i])
            hits += kept[i]
            gained += kept[i]
        seq[r, at.POSITION, i] += gained
        left = seq[r, at.LEFT, i] + gained
        seq[r, at.LEFT, i] = left
        if left >= 0:
            ended[ends] = seq[r, at.ID, i]
            ends += 1
            committed -= left  # what lies beyond the cut
    committed += hits
    if cfg[at.LEARNS] and rep[r, at.STEP_PLANNED]:
        observe(running, seq[r, at.LENGTH], kept, params, state[r])
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
        rep[r, at.COUNT] = _close_up(cfg, seq, past, kept, r, running)
        for i in range(ends):
            request = ended[i]
            req[request, at.GENERATED] = req[request, at.OUTPUT]
            status = _finish(cfg, now, rep, req, pairs, heap, prefill_ns, r, request)
            if status >= 0:
                return status
    if finishing:
        for i in range(finishing):
            request = seq[r, at.PROMPT_ID, i]
            req[request, at.GENERATED] += 1
            if req[request, at.FIRST_NS] < 0:
                req[request, at.FIRST_NS] = now[at.TIME]
            if req[request, at.GENERATED] >= req[request, at.OUTPUT]:
                status = _finish(cfg, now, rep, req, pairs, heap, prefill_ns, r, request)
                if status >= 0:
                    return status
            else:
                _join(cfg, rep, req, seq, past, texts, members, r, request)
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
        _I1,  # due
        _I2,  # pairs
        _I3,  # seq
        types.Array(types.float32, 3, "C"),  # past
        _I2,  # heap
        _I2,  # host
        _I1,  # prefill_ns
        _I2,  # table_of
        _I2,  # verify_ns
        _F2,  # verify_ms
        _F2,  # believed
        types.Array(types.float32, 2, "C", readonly=True),  # confidence
        types.Array(types.uint8, 1, "C", readonly=True),  # accepted
        types.Array(types.uint64, 2, "C", readonly=True),  # limits
        _I2,  # texts
        _I2,  # members
        _I1,  # ages
        _F1,  # params
        _F2,  # state
        _I1,  # counts
        _F1,  # times
        types.Array(types.float32, 3, "C"),  # blocks
        types.Array(types.float32, 2, "C"),  # layers
        _I1,  # captured
        _I1,  # age
        _I1,  # caps
        _I1,  # useful
        types.Array(types.float32, 2, "C"),  # work
        _I1,  # lengths
        _I1,  # ended
        _I1,  # row
    ),
    at.Arrays,
)


@cfunc(k.feedback_signature(), cache=True)
def deaf(requests, verified, accepted, params, state):
    """The `Kernel.observe` of a policy without one; never called."""
    return 0


@njit(
    [types.int64(types.FunctionType(k.signature()), types.FunctionType(k.feedback_signature()), _ARRAYS, _I2)],
    cache=True,
)
def advance(plan, observe, arrays, log):
    """Run until the last scored request has ended, or until something is needed. A status of the layout."""
    cfg, now, rep, req, seq, past = arrays.cfg, arrays.now, arrays.rep, arrays.req, arrays.seq, arrays.past
    due, pairs, heap, prefill_ns = arrays.due, arrays.pairs, arrays.heap, arrays.prefill_ns
    texts, members, params, state = arrays.texts, arrays.members, arrays.params, arrays.state
    kept, ended = arrays.row, arrays.ended
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
        if cfg[at.ISSUE_LIMIT] < 0 and now[at.ISSUED] + 2 * cfg[at.MAX_SEQS] + 2 > req.shape[0]:
            return at.NEEDS_REQUESTS
        time, kind, argument = heap[0, 0], heap[0, 2], heap[0, 3]
        _pop(heap, now)
        now[at.TIME] = time
        if kind == at.STEP_ENDS:
            # One by one: to hand over all arrays together costs 0.1 us a step, as calls do that are not inlined.
            status = _commit(
                cfg,
                now,
                rep,
                req,
                pairs,
                seq,
                past,
                heap,
                prefill_ns,
                texts,
                members,
                observe,
                params,
                state,
                kept,
                ended,
                log,
                argument,
            )
            if status >= 0:
                return status
            turn = argument
        elif kind == at.WAKES:
            rep[argument, at.IDLE] = 0
            turn = argument
        elif kind == at.ISSUES:
            status = issue(cfg, now, rep, req, pairs, heap, prefill_ns)
            if status >= 0:
                return status
        elif kind == at.ARRIVES:
            while now[at.ISSUED] < cfg[at.OPEN_REQUESTS] and due[now[at.ISSUED]] <= now[at.TIME]:
                status = issue(cfg, now, rep, req, pairs, heap, prefill_ns)
                if status >= 0:
                    return status
            if now[at.ISSUED] < cfg[at.OPEN_REQUESTS]:
                schedule(heap, now, due[now[at.ISSUED]], at.ARRIVES, 0)
        elif kind == at.PREFILLED:
            goes_on = _prefilled(cfg, now, rep, req, pairs, heap, argument)
            if goes_on < 0:
                return at.TOO_LARGE
            if goes_on > 0:
                status = issue(cfg, now, rep, req, pairs, heap, prefill_ns)
                if status >= 0:
                    return status
        else:
            return at.FINISHED
