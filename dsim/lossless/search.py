"""Looking for a counterexample, and for the smallest one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from dsim.errors import InputError
from dsim.lossless.case import Case, Context, Distribution, Tables, distribution
from dsim.lossless.cases import SIZES, Size, random_case
from dsim.lossless.law import Audit, World, audit
from dsim.policy import Policy

#: Random cases tried in each size, smallest first, when the smallest counterexample is looked for.
TRIES = 50
#: Passes over all simplifications; each ends with the first that leads somewhere.
_ROUNDS = 400


@dataclass(frozen=True)
class Counterexample:
    """A case in which a policy changes the outputs, and by how much."""

    case: Case
    distance: Fraction


def numbered_case(seed: int, number: int, *, own_token: bool = False) -> Case:
    """Case `number` of the endless list that `seed` stands for; the same in every process."""
    return random_case(np.random.default_rng([seed, number, own_token]), own_token=own_token)


def examine(
    policies: Sequence[Policy], seed: int, numbers: Iterable[int], *, own_token: bool = False
) -> list[list[Audit | None]]:
    """Audit policies in the same random cases.

    Parameters
    ----------
    policies
        Objects; each case starts with a fresh copy.
    seed, numbers, own_token
        Which cases, as in `numbered_case`.

    Returns
    -------
    list of list
        By policy and case; None where the block is too short for the policy (`Traits.needs_gamma`).

    Examples
    --------
    >>> from dsim.policy import load_policy
    >>> ((found,),) = examine([load_policy("threshold")], 0, [3])
    >>> found.distance
    Fraction(0, 1)
    """
    found: list[list[Audit | None]] = [[] for _ in policies]
    for number in numbers:
        world = World(numbered_case(seed, number, own_token=own_token))
        for policy, own in zip(policies, found, strict=True):
            fits = policy.traits.needs_gamma <= world.case.gamma
            own.append(audit(world, policy) if fits else None)
    return found


def smallest_counterexample(policy: Policy, cases: Iterable[Case], seed: int, *, tries: int = TRIES) -> Counterexample:
    """The smallest counterexample that can be found, starting from known ones.

    Small is, in this order: few requests, a short block, a small vocabulary, few tokens; of that size the largest
    distance found; then plain tables. Known cases are shrunk step by step; each smaller size is then tried with
    random cases, and so is the one found, for a larger distance. Nothing proves that there is no smaller one.

    Parameters
    ----------
    cases
        At least one case with a distance above 0.
    seed, tries
        Of the random cases; `tries` in each size.

    Raises
    ------
    InputError
        No case with a distance above 0 is among `cases`.
    """
    known = [Counterexample(case, _distance(policy, case)) for case in cases]
    known = [item for item in known if item.distance > 0]
    if not known:
        raise InputError(field="cases", value=0, expected="at least one counterexample")
    best = _shrunk(policy, min(known, key=_rank), _smaller)
    for size in [*sorted({size for size in SIZES if size < best.case.size}), best.case.size]:
        found = [best] if size == best.case.size else []
        for number in range(tries):
            case = random_case(np.random.default_rng([seed, number, *size]), size, own_token=best.case.own_token)
            found.append(Counterexample(case, _distance(policy, case)))
        found = [item for item in found if item.distance > 0]
        if found:
            best = _shrunk(policy, min(found, key=_rank), _smaller)
            break
    return _shrunk(policy, best, _plainer)


def _distance(policy: Policy, case: Case) -> Fraction:
    return audit(case, policy).distance if policy.traits.needs_gamma <= case.gamma else Fraction(0)


def _rank(item: Counterexample) -> tuple[Size, Fraction]:
    return item.case.size, -item.distance


def _shrunk(
    policy: Policy, start: Counterexample, changes: Callable[[Case], Iterator[dict[str, Any]]]
) -> Counterexample:
    """Make the first change that gives a counterexample, again and again until none does.

    A change that makes the case smaller may lower the distance, one that only makes it plainer may not.
    """
    best = start
    for _ in range(_ROUNDS):
        for change in changes(best.case):
            try:
                case = replace(best.case, **change)
            except InputError:  # half of a change that makes no sense here
                continue
            smaller = _complexity(case)[0] < _complexity(best.case)[0]
            if not smaller and _complexity(case) >= _complexity(best.case):
                continue
            distance = _distance(policy, case)
            if distance > 0 and (smaller or distance >= best.distance):
                best = Counterexample(case, distance)
                break
        else:
            break
    return best


def _complexity(case: Case) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """What makes a case large, and what makes it hard to read."""
    tables = case.requests
    separate = [law for own in tables for law in (own.target, own.drafter)]
    laws = [row for law in separate for row in law.values()]
    confidences = [c for own in tables for table in own.confidence for c in table.values()]
    tidy = [*confidences, *(c for block in case.past for row in block for c in row)]
    features = (
        case.order,
        len(case.past),
        sum(case.starts),
        int(case.clip) + int(not case.leave),
        case.prefill + int(case.draft_ms > 0),
        len(case.captured_sizes),
    )
    plainness = (
        sum(len({repr(getattr(own, name)) for own in tables}) for name in ("target", "drafter", "confidence")),
        sum(len(set(law.values())) for law in separate),
        len(set(laws)),
        sum(p.denominator for row in laws for p in row),
        len(set(tidy)),
        sum(c not in (0.0, 0.5, 1.0) for c in tidy),
        len(set(case.verify_ms)),
        sum(ms != int(ms) for ms in case.verify_ms),
        len(case.verify_ms),
    )
    return (*case.size, *features), plainness


# --- changes: fields of the case and their new values ------------------------------------------------------


def _smaller(case: Case) -> Iterator[dict[str, Any]]:
    """Leave something out: a request, a draft position, a token, a step, a feature."""
    early = [r for r, start in enumerate(case.enters) if start == 0]
    for r in range(len(case.requests)) if len(case.requests) > 1 else ():
        kept = [other for other in range(len(case.requests)) if other != r]
        change = {
            "requests": tuple(case.requests[other] for other in kept),
            "starts": tuple(case.enters[other] for other in kept),
            "past": tuple(tuple(row for e, row in zip(early, block, strict=True) if e != r) for block in case.past),
        }
        # The price curve may be read from the same token on, or from the same draft on.
        for tokens in (0, 1, 1 + case.gamma):
            yield {**change, "verify_ms": (0.0, *case.verify_ms[1 + tokens :])}
    if case.gamma > 1:
        tables = tuple(replace(own, confidence=own.confidence[:-1]) for own in case.requests)
        past = tuple(tuple(row[:-1] for row in block) for block in case.past)
        yield {"gamma": case.gamma - 1, "requests": tables, "past": past}
    for token in range(case.vocabulary) if case.vocabulary > 2 else ():
        tables = tuple(_without_token(own, token) for own in case.requests)
        if all(sum(row) > 0 for own in tables for law in (own.target, own.drafter) for row in law.values()):
            tables = tuple(replace(own, target=_whole(own.target), drafter=_whole(own.drafter)) for own in tables)
            yield {"vocabulary": case.vocabulary - 1, "requests": tables}
    if case.tokens > 1:
        fewer = {"tokens": case.tokens - 1, "starts": tuple(min(start, case.tokens - 1) for start in case.starts)}
        yield fewer
        # What lies behind the tokens that count may be needed, for the output not to end.
        yield {**fewer, "leave": False, "clip": False}
        # Or begin one token later, behind a token that is given.
        for given in itertools.product(range(case.vocabulary), repeat=len(case.requests)):
            tables = tuple(_behind(own, token, case.order) for own, token in zip(case.requests, given, strict=True))
            yield {**fewer, "requests": tables}
    if case.order > 0:
        yield {"order": case.order - 1, "requests": tuple(_less_order(own, case.order - 1) for own in case.requests)}
    if case.past:
        yield {"past": ()}
        yield {"past": case.past[1:]}
    if case.starts:
        rows = len(case.requests) - len(early)
        late = ((1.0,) * case.gamma,) * rows
        yield {"starts": (), "past": tuple((*block, *late) for block in case.past)}
    yield {"clip": False}
    yield {"leave": True}
    yield {"prefill": 0, "verify_ms": (0.0, *case.verify_ms[1 + case.prefill :])}
    yield {"prefill": 0}
    yield {"draft_ms": 0.0}
    yield {"captured_sizes": ()}
    for size in case.captured_sizes:
        yield {"captured_sizes": tuple(other for other in case.captured_sizes if other != size)}


def _plainer(case: Case) -> Iterator[dict[str, Any]]:
    """Tables with fewer different, rounder numbers."""
    longest = case.prefill + len(case.requests) * (1 + case.gamma)
    if len(case.verify_ms) > longest + 1:
        yield {"verify_ms": case.verify_ms[: longest + 1]}
    for own in case.requests:
        for other in case.requests:
            yield _swapped(case, "target", own.target, other.target)
            yield _swapped(case, "drafter", own.drafter, other.drafter)
            yield _swapped(case, "confidence", own.confidence, other.confidence)
        for target in _plainer_laws(own.target, case.vocabulary):
            yield _swapped(case, "target", own.target, target)
        for drafter in _plainer_laws(own.drafter, case.vocabulary):
            yield _swapped(case, "drafter", own.drafter, drafter)
        for k, table in enumerate(own.confidence):
            for value in (0.0, 1.0, 0.5, *dict.fromkeys(table.values())):
                for change in (dict.fromkeys(table, value), *({**table, context: value} for context in table)):
                    tables = (*own.confidence[:k], change, *own.confidence[k + 1 :])
                    yield _swapped(case, "confidence", own.confidence, tables)
    for b, block in enumerate(case.past):
        for value in (1.0, 0.0, 0.5):
            plain = tuple((value,) * case.gamma for _ in block)
            yield {"past": (*case.past[:b], plain, *case.past[b + 1 :])}
    for place, ms in enumerate(case.verify_ms[1:], start=1):
        yield {"verify_ms": (0.0, *(ms,) * place, *case.verify_ms[place + 1 :])}
        yield {"verify_ms": (*case.verify_ms[:place], *(ms,) * len(case.verify_ms[place:]))}
        for value in (*case.verify_ms[max(1, place - 1) : place + 2], float(round(ms))):
            yield {"verify_ms": (*case.verify_ms[:place], value, *case.verify_ms[place + 1 :])}


_ROUND = {
    2: (distribution(1, 1), distribution(1, 0), distribution(0, 1)),
    3: (distribution(1, 1, 0), distribution(1, 0, 1), distribution(0, 1, 1), distribution(1, 0, 0)),
}


def _plainer_laws(law: Mapping[Context, Distribution], vocabulary: int) -> Iterator[dict[Context, Distribution]]:
    """The law with one of its rows, or a round one, everywhere or in one more place."""
    rows = (*dict.fromkeys(law.values()), *_ROUND[vocabulary])
    for row in rows:
        yield dict.fromkeys(law, row)
    for context in law:
        for row in rows:
            yield {**law, context: row}


def _swapped(case: Case, name: str, old: object, new: object) -> dict[str, Any]:
    """One table for another, in all requests that have it: equal requests stay equal."""
    change: dict[str, Any] = {name: new}
    return {"requests": tuple(replace(own, **change) if getattr(own, name) == old else own for own in case.requests)}


def _without_token(own: Tables, token: int) -> Tables:
    """The tables without one token; rows no longer add up to 1."""

    def renamed(context: Context) -> Context:
        return tuple(other - (other > token) for other in context)

    def cut(law: Mapping[Context, Distribution]) -> dict[Context, Distribution]:
        return {renamed(c): (*row[:token], *row[token + 1 :]) for c, row in law.items() if token not in c}

    confidence = tuple({renamed(c): x for c, x in table.items() if token not in c} for table in own.confidence)
    return Tables(cut(own.target), cut(own.drafter), confidence)


def _behind(own: Tables, token: int, order: int) -> Tables:
    """The tables for a text that begins behind `token`."""

    def moved(table: Mapping[Context, Any]) -> dict[Context, Any]:
        found = {}
        for context, value in table.items():
            before = (token, *context)[-order:] if order else ()
            found[context] = table.get(before, value)
        return found

    return Tables(moved(own.target), moved(own.drafter), tuple(map(moved, own.confidence)))


def _whole(law: Mapping[Context, Distribution]) -> dict[Context, Distribution]:
    return {context: distribution(*row) for context, row in law.items()}


def _less_order(own: Tables, order: int) -> Tables:
    """The tables by shorter contexts: what they say after a text that ends so, in the first of their contexts."""

    def short(table: Mapping[Context, Any]) -> dict[Context, Any]:
        found: dict[Context, Any] = {}
        for context, value in table.items():
            found.setdefault(context[len(context) - order :] if len(context) > order else context, value)
        return found

    return Tables(short(own.target), short(own.drafter), tuple(map(short, own.confidence)))
