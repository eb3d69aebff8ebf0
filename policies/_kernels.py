"""Compiled forms of the built-in policies' `plan` (`dsim.kernel.Kernel`). Each is held against it by the tests."""

from __future__ import annotations

import numpy as np
from numba import cfunc, njit

from dsim import kernel as k
from dsim.kernel.planning import best_count, descending, positive, survival, top_k

_PLAN, _FEEDBACK = k.signature(), k.feedback_signature()
#: Where the lengths begin in the parameters of `trtllm`.
_LADDER = 8


@cfunc(_PLAN, cache=True)
def none(counts, times, confidence, verify_ms, prices, captured, age, caps, accepted, params, state, work, lengths):
    """`policies.none.NoSpeculation`."""
    for r in range(counts[k.REQUESTS]):
        lengths[r] = 0
    return 0


@cfunc(_PLAN, cache=True)
def fixed(counts, times, confidence, verify_ms, prices, captured, age, caps, accepted, params, state, work, lengths):
    """`policies.fixed.Fixed`; params: k."""
    for r in range(counts[k.REQUESTS]):
        lengths[r] = min(caps[r], np.int64(params[0]))
    return 0


@cfunc(_PLAN, cache=True)
def threshold(
    counts, times, confidence, verify_ms, prices, captured, age, caps, accepted, params, state, work, lengths
):
    """`policies.threshold.Threshold`; params: t, whether it looks at survivals."""
    least = np.float32(params[0])
    for r in range(counts[k.REQUESTS]):
        value = np.float32(1.0)
        length = 0
        for j in range(counts[k.BLOCK]):
            if params[1] > 0:
                value = confidence[0, r, j] if j == 0 else value * confidence[0, r, j]
            else:
                value = confidence[0, r, j]
            if not value >= least:
                break
            length += 1
        lengths[r] = min(length, caps[r])
    return 0


@cfunc(_PLAN, cache=True)
def dspark_alg1(
    counts, times, confidence, verify_ms, prices, captured, age, caps, accepted, params, state, work, lengths
):
    """`policies.dspark_alg1.DSparkAlgorithm1`."""
    requests, gamma, base = counts[k.REQUESTS], counts[k.BLOCK], counts[k.BASE]
    size = requests * gamma
    survival(confidence[0], requests, gamma, caps, counts[k.CAPS_BIND], work[0])
    for i in range(size):
        work[1, i] = work[0, i]
    descending(work[1], size, work[2], work[3])
    tau = np.float64(requests)
    rate = tau / verify_ms[base]
    taken = 0
    for b in range(1, positive(work[1], size) + 1):
        tau += np.float64(work[1, b - 1])
        following = tau / verify_ms[base + b]
        if not following > rate:
            break
        rate = following
        taken = b
    top_k(work[0], requests, gamma, taken, work[2], work[3], lengths)
    return 0


@cfunc(_PLAN, cache=True)
def budgeted(counts, times, confidence, verify_ms, prices, captured, age, caps, accepted, params, state, work, lengths):
    """A budget from old confidences, spent by current ones: `policies.dspark.DSpark`, `policies.vllm_adaptive`.

    params: whether prompts that end are worth a token, and whether the draft is in the price. The last of the ages is
    that of the budget's confidences.
    """
    requests, gamma = counts[k.REQUESTS], counts[k.BLOCK]
    size = requests * gamma
    last = confidence.shape[0] - 1
    survival(confidence[last], requests, gamma, caps, counts[k.CAPS_BIND], work[1])
    descending(work[1], size, work[2], work[3])
    start = np.float64(counts[k.SAMPLING] if params[0] > 0 else requests)
    extra = times[k.DRAFT_MS] if params[1] > 0 else 0.0
    budget = best_count(work[1], positive(work[1], size), start, prices, counts[k.BASE], extra)
    survival(confidence[0], requests, gamma, caps, counts[k.CAPS_BIND], work[0])
    top_k(work[0], requests, gamma, budget, work[2], work[3], lengths)
    return 0


@cfunc(_PLAN, cache=True)
def oracle(counts, times, confidence, verify_ms, prices, captured, age, caps, accepted, params, state, work, lengths):
    """`policies.oracle.Oracle`; state: tokens, elapsed ms."""
    requests, gamma, base = counts[k.REQUESTS], counts[k.BLOCK], counts[k.BASE]
    total = 0
    for r in range(requests):
        total += min(accepted[r], caps[r])
        lengths[r] = 0
    hidden, exposed = times[k.HOST_HIDDEN_MS], times[k.HOST_EXPOSED_MS]
    sampling = np.float64(counts[k.SAMPLING])
    rate = 0.0
    if state[0] > 0:
        rate = state[0] / state[1]
    else:
        for b in range(total + 1):
            ms = max(times[k.DRAFT_MS] + verify_ms[base + b], hidden) + exposed
            rate = max(rate, (sampling + b) / ms)
    best, drafts, spent = -np.inf, 0, 0.0
    for b in range(total + 1):
        ms = max(times[k.DRAFT_MS] + verify_ms[base + b], hidden) + exposed
        worth = (sampling + b) - rate * ms
        if worth > best:
            best, drafts, spent = worth, b, ms
    state[0] += sampling + drafts
    state[1] += spent
    # First positions in order of request, then the second ones, and so on.
    left = drafts
    for j in range(gamma):
        if left == 0:
            break
        for r in range(requests):
            if left == 0:
                break
            if j < min(accepted[r], caps[r]):
                lengths[r] += 1
                left -= 1
    return 0


@cfunc(_PLAN, cache=True)
def tetris(counts, times, confidence, verify_ms, prices, captured, age, caps, accepted, params, state, work, lengths):
    """`policies.tetris.Tetris`; params: capacity, whether it is one a request."""
    requests, gamma = counts[k.REQUESTS], counts[k.BLOCK]
    capacity = np.int64(params[0]) * (requests if params[1] > 0 else 1)
    survival(confidence[0], requests, gamma, caps, counts[k.CAPS_BIND], work[0])
    top_k(work[0], requests, gamma, capacity, work[2], work[3], lengths)
    return 0


@cfunc(_PLAN, cache=True)
def disco(counts, times, confidence, verify_ms, prices, captured, age, caps, accepted, params, state, work, lengths):
    """`policies.disco.Disco`; params: t."""
    least = np.float32(params[0])
    for r in range(counts[k.REQUESTS]):
        length = 0
        while length < counts[k.BLOCK] and confidence[0, r, length] >= least:
            length += 1
        lengths[r] = min(length + 1, caps[r])
    return 0


@cfunc(_PLAN, cache=True)
def batch_table(
    counts, times, confidence, verify_ms, prices, captured, age, caps, accepted, params, state, work, lengths
):
    """`policies.batch_table.BatchTable`; params: first batch size and drafts of each range, in turn."""
    drafts = np.int64(params[1])
    for i in range(2, params.size, 2):
        if counts[k.REQUESTS] < params[i]:
            break
        drafts = np.int64(params[i + 1])
    for r in range(counts[k.REQUESTS]):
        lengths[r] = min(caps[r], drafts)
    return 0


@cfunc(_PLAN, cache=True)
def marginal(counts, times, confidence, verify_ms, prices, captured, age, caps, accepted, params, state, work, lengths):
    """`policies.marginal.Marginal`; params: the fixed rate (NaN: none), weight; state: tokens, elapsed ms."""
    requests, gamma, base = counts[k.REQUESTS], counts[k.BLOCK], counts[k.BASE]
    size = requests * gamma
    survival(confidence[confidence.shape[0] - 1], requests, gamma, caps, counts[k.CAPS_BIND], work[1])
    descending(work[1], size, work[2], work[3])
    most = positive(work[1], size)
    draft, hidden, exposed = times[k.DRAFT_MS], times[k.HOST_HIDDEN_MS], times[k.HOST_EXPOSED_MS]
    fixed = params[0] == params[0]
    rate = params[0]
    if not fixed:
        if state[0] != 0.0:
            rate = state[0] / state[1]
        else:
            expected = np.float64(requests)
            rate = expected / (max(draft + verify_ms[base], hidden) + exposed)
            for b in range(1, most + 1):
                expected += np.float64(work[1, b - 1])
                rate = max(rate, expected / (max(draft + verify_ms[base + b], hidden) + exposed))
    expected = np.float64(requests)
    best, drafts, gained, spent = -np.inf, 0, 0.0, 0.0
    for b in range(most + 1):
        if b:
            expected += np.float64(work[1, b - 1])
        ms = max(draft + verify_ms[base + b], hidden) + exposed
        worth = expected - rate * ms
        if worth > best:
            best, drafts, gained, spent = worth, b, expected, ms
    if not fixed:
        weight = params[1] if state[0] != 0.0 else 1.0
        state[0] += weight * (gained - state[0])
        state[1] += weight * (spent - state[1])
    survival(confidence[0], requests, gamma, caps, counts[k.CAPS_BIND], work[0])
    top_k(work[0], requests, gamma, drafts, work[2], work[3], lengths)
    return 0


@cfunc(_PLAN, cache=True)
def whole(counts, times, confidence, verify_ms, prices, captured, age, caps, accepted, params, state, work, lengths):
    """Whole blocks, as far as the caps go."""
    for r in range(counts[k.REQUESTS]):
        lengths[r] = caps[r]
    return 0


@cfunc(_PLAN, cache=True)
def sglang(counts, times, confidence, verify_ms, prices, captured, age, caps, accepted, params, state, work, lengths):
    """`policies.sglang.Sglang` with a table of its own; params: whether the draft is in the price, fill, least gain."""
    requests, gamma = counts[k.REQUESTS], counts[k.BLOCK]
    size = requests * gamma
    survival(confidence[confidence.shape[0] - 1], requests, gamma, caps, counts[k.CAPS_BIND], work[1])
    descending(work[1], size, work[2], work[3])
    most = positive(work[1], size)
    extra = times[k.DRAFT_MS] if params[0] > 0 else 0.0
    tau = np.float64(requests)
    rate = tau / (extra + prices[requests])
    best, budget = rate, 0
    for b in range(1, most + 1):
        tau += np.float64(work[1, b - 1])
        rate = tau / (extra + prices[requests + b])
        if rate > best:
            best, budget = rate, b
    if best < rate * (1 + params[2]):
        budget = most
    if captured.size:
        tier = np.searchsorted(captured, requests + budget)
        if tier == captured.size:
            for r in range(requests):
                lengths[r] = caps[r]
            return 0
        if params[1] > 0:
            budget = captured[tier] - requests
    survival(confidence[0], requests, gamma, caps, counts[k.CAPS_BIND], work[0])
    top_k(work[0], requests, gamma, budget, work[2], work[3], lengths)
    return 0


@njit(cache=True)
def _known(counts, confidence, caps, age, lag, out):
    """Survivals of the requests that have blocks `lag` steps old, one after the other; how many they are."""
    gamma, known = counts[k.BLOCK], 0
    for r in range(counts[k.REQUESTS]):
        if age[r] < lag:
            continue
        place, product = known * gamma, np.float32(1.0)
        for j in range(gamma):
            product = confidence[r, j] if j == 0 else product * confidence[r, j]
            out[place + j] = np.float32(0.0) if counts[k.CAPS_BIND] and j >= caps[r] else product
        known += 1
    return known


@njit(cache=True)
def _spread(counts, known, caps, age, lag, lengths):
    """Lengths of the known requests, so far in the first rows, to their own rows; whole blocks for the others."""
    place = known - 1
    for r in range(counts[k.REQUESTS] - 1, -1, -1):
        if age[r] < lag:
            lengths[r] = caps[r]
        else:
            lengths[r] = lengths[place]
            place -= 1


#: `policies.atom`: where its query lengths begin in the parameters, and the outcomes of a step in the state.
_QUERIES, _OUTCOMES = 5, 2


@njit(cache=True)
def _rounded_up(params, drafts, gamma):
    """Drafts of everybody in ATOM's smallest graph that has room for so many; the whole block where none has."""
    if params.size == _QUERIES:
        return min(drafts, gamma)
    for i in range(_QUERIES, params.size):
        if params[i] > drafts:
            return min(np.int64(params[i]) - 1, gamma)
    return gamma


@cfunc(_PLAN, cache=True)
def atom(counts, times, confidence, verify_ms, prices, captured, age, caps, accepted, params, state, work, lengths):
    """`policies.atom.Atom` with the captured table; prices are steps a second.

    params: lag, ragged, full on change, anchor, floor, query lengths. state: requests of the step before (-1: a prompt
    was in it), the most that one had accepted (-1: not told), and what each had.
    """
    requests, gamma, lag = counts[k.REQUESTS], counts[k.BLOCK], np.int64(params[0])
    ragged, floor, prompts = params[1] > 0, np.int64(params[4]), counts[k.BASE] > requests
    same = not prompts and state[0] == requests
    for r in range(requests):
        same = same and age[r] > 0
        lengths[r] = caps[r]
    most = state[1] if params[3] > 0 else -1.0
    state[0], state[1] = -1.0 if prompts else np.float64(requests), -1.0
    if prompts or (ragged and params[2] > 0 and not same):
        return 0
    known = _known(counts, confidence[0], caps, age, lag, work[0])
    if known == 0 or (not ragged and known < requests):
        return 0
    size = known * gamma
    for i in range(size):
        work[1, i] = work[0, i]
    descending(work[1], size, work[2], work[3])
    taken = 0
    tau = np.float64(known)
    rate = tau * prices[known]
    for b in range(1, positive(work[1], size) + 1):
        tau += np.float64(work[1, b - 1])
        following = tau * prices[known + b]
        if not following > rate:
            break
        rate, taken = following, b
    top_k(work[0], known, gamma, taken, work[2], work[3], lengths)
    _spread(counts, known, caps, age, lag, lengths)
    if ragged:
        anchored = same and most >= 0
        for r in range(requests):
            length = max(lengths[r], floor)
            if anchored:
                length = max(length, np.int64(state[_OUTCOMES + r]))
            lengths[r] = min(length, caps[r])
        return 0
    longest = max(floor, np.int64(most))
    for r in range(requests):
        longest = max(longest, lengths[r])
    longest = _rounded_up(params, longest, gamma)
    for r in range(requests):
        lengths[r] = min(caps[r], longest)
    return 0


@cfunc(_FEEDBACK, cache=True)
def atom_observe(requests, verified, accepted, params, state):
    """`policies.atom.Atom.observe`."""
    most = 0
    for r in range(requests):
        state[_OUTCOMES + r] = np.float64(accepted[r])
        most = max(most, accepted[r])
    state[1] = np.float64(most)
    return 0


@cfunc(_PLAN, cache=True)
def verify_adaptive(
    counts, times, confidence, verify_ms, prices, captured, age, caps, accepted, params, state, work, lengths
):
    """`policies.vllm_verify_adaptive.VllmVerifyAdaptive`; params: lag, steps of batch and query, largest batch or 0."""
    gamma, lag = counts[k.BLOCK], np.int64(params[0])
    known = _known(counts, confidence[0], caps, age, lag, work[0])
    size = known * gamma
    for i in range(size):
        work[1, i] = work[0, i]
    descending(work[1], size, work[2], work[3])
    most = positive(work[1], size)
    step = np.int64(params[1])
    batch = -(-known // step) * step
    if params[3] > 0:
        batch = min(batch, np.int64(params[3]))
    tau, added, best, budget = np.float64(known), 0, -np.inf, 0
    query = 1
    while known:
        tokens = batch * query
        if tokens >= known:
            drafts = min(tokens - known, most)
            while added < drafts:
                tau += np.float64(work[1, added])
                added += 1
            rate = tau / verify_ms[min(tokens, verify_ms.size - 1)]
            if rate > best:
                best, budget = rate, drafts
        if query == gamma + 1:
            break
        query = min(2 if query == 1 else query + np.int64(params[2]), gamma + 1)
    top_k(work[0], known, gamma, budget, work[2], work[3], lengths)
    _spread(counts, known, caps, age, lag, lengths)
    return 0


@cfunc(_PLAN, cache=True)
def lab(counts, times, confidence, verify_ms, prices, captured, age, caps, accepted, params, state, work, lengths):
    """`policies.lab.Lab`; params: whether it stops early, what is in the price (0 target, 1 and draft, 2 the step).

    The first of the ages is that of the capacity, the last that of the allocation.
    """
    requests, gamma, base = counts[k.REQUESTS], counts[k.BLOCK], counts[k.BASE]
    size = requests * gamma
    hidden, exposed = times[k.HOST_HIDDEN_MS], times[k.HOST_EXPOSED_MS]
    survival(confidence[0], requests, gamma, caps, counts[k.CAPS_BIND], work[1])
    descending(work[1], size, work[2], work[3])
    tau, best, capacity = np.float64(requests), -np.inf, 0
    for b in range(positive(work[1], size) + 1):
        if b:
            tau += np.float64(work[1, b - 1])
        ms = prices[base + b]
        if params[1] > 0:
            ms = times[k.DRAFT_MS] + ms
        if params[1] > 1:
            ms = max(ms, hidden) + exposed
        rate = tau / ms
        if rate > best:
            best, capacity = rate, b
        elif params[0] > 0:
            break
    survival(confidence[confidence.shape[0] - 1], requests, gamma, caps, counts[k.CAPS_BIND], work[0])
    top_k(work[0], requests, gamma, capacity, work[2], work[3], lengths)
    return 0


@cfunc(_PLAN, cache=True)
def ascend(counts, times, confidence, verify_ms, prices, captured, age, caps, accepted, params, state, work, lengths):
    """`policies.vllm_ascend.VllmAscend`; params: threshold, interval, floor; state: steps, K."""
    requests, gamma = counts[k.REQUESTS], counts[k.BLOCK]
    floor = np.int64(params[2])
    survival(confidence[0], requests, gamma, caps, counts[k.CAPS_BIND], work[0])
    state[0] += 1
    if state[0] >= params[1] and gamma:
        state[0] = 0
        promising = 0
        for i in range(requests * gamma):
            promising += work[0, i] >= np.float32(params[0])
        length = -(-promising // requests)
        state[1] = max(floor, min(length + (1 if length % 2 == 0 else 0), gamma))
    granted, beyond = 0, gamma - floor
    for r in range(requests):
        granted += min(caps[r], floor)
        for j in range(beyond):
            work[1, r * beyond + j] = work[0, r * gamma + floor + j]
    budget = requests * np.int64(state[1]) - granted
    top_k(work[1], requests, beyond, budget, work[2], work[3], lengths)
    for r in range(requests):
        lengths[r] += min(caps[r], floor)
    return 0


@cfunc(_PLAN, cache=True)
def goodput(counts, times, confidence, verify_ms, prices, captured, age, caps, accepted, params, state, work, lengths):
    """`policies.goodput.Goodput`; params: weight, interval, margin, whether it stops early; state: alpha, k, steps."""
    requests, base = counts[k.REQUESTS], counts[k.BASE]
    if state[2] == 0:
        draft, hidden, exposed = times[k.DRAFT_MS], times[k.HOST_HIDDEN_MS], times[k.HOST_EXPOSED_MS]
        best = np.float64(requests) / (max(draft + verify_ms[base], hidden) + exposed) * (1 + params[2])
        power, gained, drafts, length = 1.0, 0.0, 0, 0
        before = best
        for j in range(counts[k.BLOCK]):
            reach = 0
            for r in range(requests):
                reach += caps[r] > j
            drafts += reach
            power *= state[0]
            gained += reach * power
            rate = (requests + gained) / (max(draft + verify_ms[base + drafts], hidden) + exposed)
            if params[3] > 0 and not rate > before:
                break
            before = rate
            if rate > best:
                best, length = rate, j + 1
        state[1] = length
        state[2] = params[1]
    state[2] -= 1
    for r in range(requests):
        lengths[r] = min(caps[r], np.int64(state[1]))
    return 0


@cfunc(_FEEDBACK, cache=True)
def goodput_observe(requests, verified, accepted, params, state):
    """`policies.goodput.Goodput.observe`."""
    hits, tried = 0, 0
    for r in range(requests):
        hits += accepted[r]
        tried += min(accepted[r] + 1, verified[r])
    if tried:
        state[0] += params[0] * (np.float64(hits) / np.float64(tried) - state[0])
    return 0


@njit(cache=True)
def _choice(params, i, requests, gamma, caps, granted):
    """Drafts above the floor's of TensorRT-LLM's i-th choice: i, or what its ladder's i-th length gives; -1: none."""
    if params[3] > 0:
        return i
    floor = np.int64(params[1])
    if params.size > _LADDER:
        length = np.int64(params[_LADDER + i])
    elif i == 0:
        length = floor
    else:
        length = (gamma + 1) // 2 if i == 1 else gamma
    if length < floor or length > gamma:
        return -1
    drafts = 0
    for r in range(requests):
        drafts += min(caps[r], length)
    return drafts - granted


@njit(cache=True)
def _spread_evenly(values, requests, width, count, worst, lengths):
    """Add the `count` best of float32[R * width] to the lengths, ties by position, then request.

    `worst` is the last of the best; of value 0 are no candidates.
    """
    above = 0
    for r in range(requests):
        for j in range(width):
            if not values[r * width + j] > worst:
                break
            lengths[r] += 1
            above += 1
    left = count - above if worst > np.float32(0.0) else 0
    for j in range(width):
        if left == 0:
            break
        for r in range(requests):
            if left and values[r * width + j] == worst:
                lengths[r] += 1
                left -= 1


@cfunc(_PLAN, cache=True)
def trtllm(counts, times, confidence, verify_ms, prices, captured, age, caps, accepted, params, state, work, lengths):
    """`policies.trtllm.Trtllm` with the profiled table.

    params: lag, floor, least gain, whether every number counts, the drain guard (how much later steps count or 0,
    tokens a step, least value, requests in the tail), and lengths of a ladder of its own.
    """
    requests, gamma = counts[k.REQUESTS], counts[k.BLOCK]
    floor, every, draft = np.int64(params[1]), params[3] > 0, times[k.DRAFT_MS]
    granted, spare = 0, 0
    for r in range(requests):
        lengths[r] = caps[r]
        granted += min(caps[r], floor)
        spare += max(0, caps[r] - floor)
    if spare == 0 or counts[k.AGE] < params[0]:
        return 0
    first = requests + granted
    flat = True
    for b in range(1, spare + 1):
        if draft + prices[first + b] != draft + prices[first]:
            flat = False
            break
    if flat:
        return 0
    survival(confidence[0], requests, gamma, caps, counts[k.CAPS_BIND], work[2])
    width = gamma - floor
    size = requests * width
    start = np.float64(requests)
    for r in range(requests):
        for j in range(floor):
            start += np.float64(work[2, r * gamma + j])
        for j in range(width):
            value = work[2, r * gamma + floor + j]
            work[0, r * width + j] = value
            work[1, r * width + j] = value
    descending(work[1], size, work[2], work[3])
    choices = spare + 1
    if not every:
        choices = params.size - _LADDER if params.size > _LADDER else 3
    # The best ratio, and (the largest number comes last) what there is without trimming.
    tau, added, rate, last = start, 0, 0.0, 0
    best, best_rate = 0, -1.0
    for i in range(choices):
        b = _choice(params, i, requests, gamma, caps, granted)
        if b < 0:
            continue
        while added < b:
            tau += np.float64(work[1, added])
            added += 1
        rate = tau / (draft + prices[first + b])
        if rate > best_rate or (rate == best_rate and not every):
            best, best_rate = b, rate
        last = b
    if last == spare:
        wanted = rate * (1 + params[2])
        if best_rate < wanted:
            best = spare
        elif params[4] > 0:
            # Of those that gain enough, the one of most value to the batch; everything where none is.
            all_tau, all_rate, all_ms = tau, rate, draft + prices[first + spare]
            tail_ms = draft + prices[min(np.int64(params[7]) * (1 + gamma), prices.size - 1)]
            dear = params[4] * tail_ms / params[5] / np.float64(requests)
            tau, added = start, 0
            best, best_rate, most = spare, -1.0, -1.0
            for i in range(choices):
                b = _choice(params, i, requests, gamma, caps, granted)
                if b < 0:
                    continue
                while added < b:
                    tau += np.float64(work[1, added])
                    added += 1
                ms = draft + prices[first + b]
                rate = tau / ms
                if rate < wanted or not rate > all_rate:
                    continue
                value = (all_ms - ms) - (all_tau - tau) * dear
                if value > params[6] and (value > most or (value == most and rate >= best_rate)):
                    best, best_rate, most = b, rate, value
    for r in range(requests):
        lengths[r] = min(caps[r], floor)
    if best:
        _spread_evenly(work[0], requests, width, best, work[1, best - 1], lengths)
    return 0
