"""The checks of a price table: each looks at one thing that has gone wrong in the field, with its numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from dsim.lint.case import Case, priced
from dsim.lint.decision import FloatArray, best_budget, loss_of
from dsim.lint.experts import dummy_tokens
from dsim.lint.finding import LOSS_NOTHING, Finding, graded, lost
from dsim.lookup import LOOKUP_RULES, sampled
from dsim.profile import IntArray
from dsim.wording import counted, percent

#: A policy that verifies this share of all worthwhile drafts "verifies everything".
EVERYTHING = 0.95


# -- the table's shape -----------------------------------------------------------------------------------


def flat_table(case: Case) -> list[Finding]:
    """A table that does not rise: a planner that believes it verifies everything, at every load."""
    setting, sample = case.setting, case.setting.sample
    rises, shares = [], []
    limit = case.profile.capture_limit or case.setting.reach
    for requests in setting.loads:
        ms = case.step_ms(requests)
        inside = ms[: max(1, limit - requests + 1)]  # the cliff is another check's
        rises.append(float(inside[-1] / inside[0]) - 1.0)
        shares.append(case.chosen(requests) / max(sample.worthwhile * requests, 1e-12))
    rise, load = max(rises), setting.loads[int(np.argmax(rises))]
    everything = min(shares) >= EVERYTHING
    if rise >= setting.noise and not everything:
        return []
    evidence = (
        f"verifying all {counted(setting.gamma, 'draft')} of everybody costs at most {percent(rise)} more than "
        f"verifying none (at {counted(load, 'request')}; up to {setting.concurrency} looked at)"
    )
    if rise < setting.noise:
        return [
            Finding(
                "flat-table",
                "error",
                f"{evidence}; that is less than the noise of {percent(setting.noise)}. A policy verifies everything at "
                "every load and looks as if it worked",
                "time the step at several sizes up to concurrency x (gamma + 1), with real text; until then use a "
                "fixed number of drafts",
                (1, setting.reach),
            )
        ]
    return [
        Finding(
            "flat-table",
            "warning",
            f"{evidence}; at every load that is cheap enough for {percent(min(shares))} of the drafts worth having",
            "nothing is left to decide: a fixed number of drafts does the same without a planner. If that surprises "
            "you, time larger steps or more requests",
            (1, setting.reach),
        )
    ]


def resolution(case: Case) -> list[Finding]:
    """Too few sizes where the decision falls: between two of them the planner sees one slope, or one price."""
    setting = case.setting
    low, high = setting.at, setting.at * (1 + setting.gamma)
    sizes = np.unique(case.points.tokens)
    inside = sizes[(sizes > low) & (sizes < high)]
    marks = np.concatenate([[low], inside, [high]])
    gaps = np.diff(marks)
    gap = int(gaps.max())
    where = int(np.argmax(gaps))
    if gap <= setting.at:
        return []
    return [
        Finding(
            "resolution",
            "error" if inside.size == 0 else "warning",
            f"at {counted(setting.at, 'request')} the decision lies between {low} and {high} tokens, with "
            f"{counted(inside.size, 'timed size')} in between: from {marks[where]} to {marks[where + 1]} tokens "
            f"({gap / setting.at:.2g} drafts a request) everything is guessed from two points",
            f"time sizes no more than {counted(max(1, setting.at // 2), 'token')} apart from {low} to {high}, or every "
            "captured size there",
            (int(marks[where]), int(marks[where + 1])),
        )
    ]


def beyond_table(case: Case) -> list[Finding]:
    """Steps that the table does not reach: whatever is said about them is a straight line."""
    setting, sizes = case.setting, case.points.tokens
    found = []
    if setting.reach > sizes[-1]:
        most = int(sizes[-1]) // (1 + setting.gamma)
        usual = setting.at * (1 + setting.gamma) > sizes[-1]
        found.append(
            Finding(
                "beyond-table",
                "error" if usual else "warning",
                f"{counted(setting.concurrency, 'request')} x {1 + setting.gamma} = {counted(setting.reach, 'token')}, "
                f"and the largest timed step has {int(sizes[-1]):,}: whole blocks of more than "
                f"{counted(most, 'request')} have no timed price (dsim continues the last slope; where an engine holds "
                "the last price, everything beyond looks free)",
                f"time steps up to {counted(setting.reach, 'token')}, or limit the batch to {counted(most, 'request')}",
                (int(sizes[-1]), setting.reach),
            )
        )
    if sizes[0] > setting.at and not case.profile.capture_limit:
        found.append(
            Finding(
                "beyond-table",
                "warning",
                f"the smallest timed step has {counted(int(sizes[0]), 'token')}, and one without drafts has "
                f"{setting.at} at {counted(setting.at, 'request')}: steps in between are priced like the smallest, so "
                "their drafts look free",
                f"time steps from {counted(setting.at, 'token')} (one a request) upwards",
                (1, int(sizes[0])),
            )
        )
    return found


def captured_sizes(case: Case) -> list[Finding]:
    """A profile that does not say which graphs the engine holds."""
    if case.profile.capture_limit:
        return []
    return [
        Finding(
            "captured-sizes",
            "warning",
            "the profile names no captured graph sizes: if the engine pads steps to captured sizes, the real curve is "
            "a staircase, and neither this table nor a planner that reads it sees the stairs",
            "add captured_sizes and capture_limit (the engine prints them at start-up), and time those sizes; leave "
            "them empty only where nothing is captured",
        )
    ]


def hidden_stair(case: Case) -> list[Finding]:
    """A look-up rule that does not see what the law sees: the steps of captured graphs, or the slope between sizes."""
    setting, stepped = case.setting, case.profile.capture_limit > 0
    own = "next" if stepped else "linear"
    rules = (setting.lookup,) if setting.lookup is not None else LOOKUP_RULES if stepped else ()
    found = []
    for rule in rules:
        if rule == own:
            continue
        read = _reader(case, rule)
        loss = loss_of(
            setting.sample,
            setting.loads,
            setting.at,
            lambda requests, read=read: (  # type: ignore[misc]
                case.draft_ms(requests) + read(requests)[requests : requests * (1 + setting.gamma) + 1]
            ),
            case.step_ms,
        )
        if loss.worst < LOSS_NOTHING:
            continue
        where = _wrong_step(case, read, loss.worst_at)
        believed, charged = read(loss.worst_at), case.table(case.law, loss.worst_at)
        sizes = case.points.tokens
        size = int(sizes[min(int(np.searchsorted(sizes, where)), sizes.size - 1)])
        runs = "on the straight line between the timed sizes it costs"
        if stepped:
            runs = f"it {'runs eagerly' if where > case.profile.capture_limit else f'runs as {size:,}'} and costs"
        severity, how = graded(max(loss.at, loss.mean)), "the table is read"
        if setting.lookup is None:  # nobody said that it is read like this
            severity, how = "warning" if severity == "error" else severity, "if the table is read"
        found.append(
            Finding(
                "hidden-stair",
                severity,
                f"{how} by '{rule}' ({_WORDS[rule]}), a step of {counted(where, 'token')} "
                f"({counted(loss.worst_at, 'request')}) is believed to cost {believed[where]:.2f} ms; {runs} "
                f"{charged[where]:.2f} ms. {lost(loss, setting.at)}",
                "price a step at the next captured size ('next')"
                if stepped
                else "put more sizes into the table, at least where the decision falls",
                (min(where, size), max(where, size)),
                loss,
                f"if read by '{rule}'" if setting.lookup is None else "",
            )
        )
    return found


_WORDS = {
    "floor": "the price of the last size passed",
    "linear": "a straight line between sizes",
    "next": "the price of the next size",
}


def _wrong_step(case: Case, read: Callable[[int], FloatArray], requests: int) -> int:
    """Tokens of the step behind so many requests' wrong decision: the chosen one or the best, by the larger error."""
    first, gamma = requests, case.setting.gamma
    true, draft = case.step_ms(requests), case.draft_ms(requests)
    believed = draft + read(requests)[first : first * (1 + gamma) + 1]
    tokens = case.setting.sample.step_tokens(requests)
    steps = [best_budget(tokens, prices) for prices in (believed, true)]
    return first + max(steps, key=lambda drafts: abs(float(np.log(true[drafts] / believed[drafts]))))


def _reader(case: Case, rule: str) -> Callable[[int], FloatArray]:
    """What a table at the timed sizes says of every step up to the largest, given the number of requests."""
    sizes = np.unique(case.points.tokens)
    place = int(np.searchsorted(sizes, case.setting.reach))
    top = int(max(case.setting.reach, sizes[min(place, sizes.size - 1)]))

    @cache
    def table(requests: int) -> FloatArray:
        return sampled(priced(case.law, requests, np.arange(top + 1)), sizes, rule).prices(case.setting.reach)

    return table if case.law.depends_on_requests else lambda _requests: table(0)


def flattened_dips(case: Case) -> list[Finding]:
    """Sizes that were measured cheaper than smaller ones, which a running maximum charges too much for."""
    points, setting = case.points, case.setting
    if case.raw is case.law:
        return []
    charged = np.maximum.accumulate(points.ms)
    here = points.tokens <= max(setting.reach, int(points.tokens[0]))
    dips = np.flatnonzero((charged > points.ms * (1 + 1e-12)) & here)
    if not dips.size:
        return []
    loss = loss_of(
        setting.sample, setting.loads, setting.at, case.step_ms, lambda requests: case.step_ms(requests, case.raw)
    )
    deepest = int(dips[np.argmax(charged[dips] / points.ms[dips])])
    real, timed = _real_dips(case, points.tokens[dips], charged[dips])
    size = int(points.tokens[deepest])
    repeats = (
        f"at {real} of {timed} of them every warm pass is cheaper than what is charged, so the dip is the machine's"
        if timed
        else "each was timed once, so nothing tells a dip from noise"
    )
    return [
        Finding(
            "flattened-dips",
            graded(max(loss.at, loss.mean)),
            f"{dips.size} of {np.count_nonzero(here)} sizes cost less than a smaller one; a running maximum charges "
            f"{percent(charged[deepest] / points.ms[deepest] - 1)} too much at {size} tokens "
            f"({charged[deepest]:.2f} ms for {points.ms[deepest]:.2f}); {repeats}. {lost(loss, setting.at)}",
            "keep the measured prices where the dips are the machine's (cost.running_max = false here); capture only "
            "sizes that are worth it (experiments/capture_sizes.py)",
            (int(points.tokens[dips[0]]), int(points.tokens[dips[-1]])),
            loss,
        )
    ]


def _real_dips(case: Case, sizes: IntArray, charged: FloatArray) -> tuple[int, int]:
    """Of the dips timed more than twice: those in which every warm pass is cheaper than the charge; and how many."""
    samples = case.profile.samples.of("verify")
    contexts = np.unique(samples.context_tokens)
    here = samples.context_tokens == contexts[case.context]
    real = timed = 0
    for size, price in zip(sizes.tolist(), charged.tolist(), strict=True):
        of_size = here & (samples.tokens == size)
        if np.count_nonzero(of_size) < 3:
            continue
        warm = of_size & (samples.repeat > samples.repeat[of_size].min())
        timed += 1
        real += bool((samples.ms[warm] < price).all())
    return real, timed


def cliff(case: Case) -> list[Finding]:
    """The end of the captured graphs, and whether the batch can get there."""
    setting, limit = case.setting, case.profile.capture_limit
    if not limit or setting.reach <= limit:
        return []
    most = limit // (1 + setting.gamma)
    blocks = (
        f"{counted(setting.concurrency, 'request')} x {1 + setting.gamma} = {counted(setting.reach, 'token')}, and "
        f"graphs end at {limit:,}: whole blocks leave them above {counted(most, 'request')}"
    )
    advice = (
        f"capture up to {counted(setting.reach, 'token')}, or keep whole blocks to {counted(most, 'request')}; above "
        "that only a policy that prices the cliff, never a fixed number of drafts. Prompt chunks in the step bring the "
        "cliff nearer"
    )
    if not case.points.eager.any():
        return [
            Finding(
                "cliff",
                "error",
                f"{blocks}, and no larger step was timed: the table goes on in a straight line where the engine runs "
                "eagerly",
                f"time steps above {limit:,} tokens, or {advice}",
                (limit, setting.reach),
            )
        ]
    table = case.table(case.law, setting.at)
    jump = float(table[limit + 1] / table[limit])
    bare = setting.concurrency > limit
    return [
        Finding(
            "cliff",
            "error" if bare else "warning",
            f"{limit:,} -> eager: a step of {limit:,} tokens costs {table[limit]:.1f} ms, one of {limit + 1:,} runs "
            f"eagerly and costs {table[limit + 1]:.1f} ms ({jump:.1f}x). {blocks}"
            + ("; the largest batches are beyond it without any draft" if bare else ""),
            advice,
            (limit, setting.reach),
        )
    ]


# -- the drafter -----------------------------------------------------------------------------------------


def draft_cost(case: Case) -> list[Finding]:
    """What drafting costs, and what a planner that does not count it loses."""
    setting, profile, curve = case.setting, case.profile, case.cost.draft
    if profile.draft_included:
        return [
            Finding(
                "draft-cost",
                "info",
                "the verify times are whole steps with the drafter in them: what not drafting would save cannot be "
                "told, and another drafter has no price",
                "time the drafter by itself, by number of requests, if speculation may be switched off",
            )
        ]
    if curve is None:
        tokens, ms = setting.sample.step_tokens(setting.at), case.verify_ms(setting.at)
        # Drafting pays while tokens(b) / (draft + ms(b)) beats R / ms(0).
        allowed = float((tokens[1:] * ms[0] / setting.at - ms[1:]).max())
        pays = (
            f"speculation pays for a draft of up to {allowed:.2f} ms there"
            if allowed > 0
            else "speculation does not pay there even if drafting is free"
        )
        return [
            Finding(
                "draft-cost",
                "error",
                f"the profile has no draft samples: at {counted(setting.at, 'request')} a step without drafts takes "
                f"{ms[0]:.2f} ms; {pays}, and nothing says whether yours takes less. The other checks count it as free",
                "add draft samples (kind 'draft', by number of requests), or set draft_included where the verify times "
                "hold the draft",
            )
        ]
    found = []
    known = int(curve.sizes[-1])
    if known < setting.concurrency:
        found.append(
            Finding(
                "draft-cost",
                "warning",
                f"the drafter was timed for up to {counted(known, 'request')}, and there may be {setting.concurrency}: "
                + ("its last price is held" if curve.sizes.size < 2 else "beyond that its price is a straight line"),
                f"time the drafter up to {counted(setting.concurrency, 'request')}",
            )
        )
    loss = loss_of(setting.sample, setting.loads, setting.at, case.verify_ms, case.step_ms)
    if loss.worst >= LOSS_NOTHING:
        share = case.draft_ms(setting.at) / float(case.step_ms(setting.at)[0])
        found.append(
            Finding(
                "draft-unpriced",
                graded(max(loss.at, loss.mean)),
                f"drafting takes {case.draft_ms(setting.at):.2f} ms at {counted(setting.at, 'request')}, "
                f"{percent(share)} of a step without verified drafts. A planner that prices the target's pass alone "
                f"takes too few drafts. {lost(loss, setting.at)}",
                "put the draft into the price: tokens / (draft + verify), as vLLM does; in a table of steps a second "
                "fold it into every entry",
                None,
                loss,
            )
        )
    return found


# -- is it to be believed? -------------------------------------------------------------------------------


def thin_evidence(case: Case) -> list[Finding]:
    """Computed prices, or one timed pass a size."""
    if case.profile.kind == "derived":
        return [
            Finding(
                "thin-evidence",
                "info",
                "the prices are computed from published components, not timed steps",
                "compare a few sizes with timed steps before relying on it",
            )
        ]
    samples = case.profile.samples.of("verify")
    sizes, counts = np.unique(
        np.stack([samples.tokens, samples.requests, samples.context_tokens]), axis=1, return_counts=True
    )
    single = int(np.count_nonzero(counts < 3))
    if not single:
        return []
    return [
        Finding(
            "thin-evidence",
            "info",
            f"{single} of {sizes.shape[1]} sizes have fewer than three passes: the first, cold pass cannot be told "
            "from the others, nor noise from shape (unless the source gives medians)",
            "time each size five times and keep all passes",
        )
    ]


#: All checks, in the order of the docs.
CHECKS: tuple[Callable[[Case], list[Finding]], ...] = (
    flat_table,
    beyond_table,
    resolution,
    captured_sizes,
    hidden_stair,
    flattened_dips,
    cliff,
    draft_cost,
    dummy_tokens,
    thin_evidence,
)
