"""A counterexample as a person reads it: the tables, the decisions, the two laws."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from dsim.lossless.case import LETTERS, Case, Context, contexts, text
from dsim.lossless.law import Decision, Outputs, World, decisions, output_law, target_law, total_variation
from dsim.policy import Policy, policy_name

#: Most decisions and most outputs that are written out.
_ROWS = 24


def describe(case: Case, policy: Policy, name: str | None = None) -> str:
    """What a policy does in a case, as text: the tables, the decisions with their reasons, the two laws.

    Examples
    --------
    >>> from dsim.lossless import appendix_a
    >>> from dsim.policy import load_policy
    >>> print(describe(appendix_a(), load_policy("dspark:lag=0"), "dspark:lag=0"))
    dspark:lag=0: total variation distance 3/20 = 0.15
    1 request, gamma 2, vocabulary {A, B}; law of the first token
    prices, ms by tokens in the step: 1: 1000, 2: 2000, 3: 2222.22
    <BLANKLINE>
    request 1
      after  target A B  drafter A B  c_1  c_2
      -      7/10 3/10   1/2 1/2      0.8  -
      A      7/10 3/10   1/2 1/2      -    0.9
      B      7/10 3/10   1/2 1/2      -    0
    <BLANKLINE>
    decisions
      step  drafted  confidences  verified  probability
      1     A.       0.8 0.9      2         1/2
      1     B.       0.8 0        0         1/2
    <BLANKLINE>
    outputs
      text  target  policy  difference
      A     7/10    17/20   +3/20
      B     3/10    3/20    -3/20
    """
    world = World(case)
    aim, law = target_law(world), output_law(world, policy)
    distance = total_variation(aim, law)
    named = policy_name(policy) if name is None else name
    lines = [f"{named}: total variation distance {_number(distance)}", *_setting(case, policy)]
    for r in range(len(case.requests)):
        lines += ["", f"request {r + 1}{f', from step {case.enters[r] + 1}' if case.enters[r] else ''}"]
        lines += _table(_request_rows(case, r))
    if case.past:
        lines += ["", "confidences of the steps before, oldest first"]
        lines += [f"  {'  '.join(_row(row) for row in block)}" for block in case.past]
    lines += ["", "decisions", *_table(_decision_rows(case, decisions(world, policy)))]
    lines += ["", "outputs", *_table(_law_rows(aim, law))]
    return "\n".join(lines)


def _number(value: Fraction) -> str:
    return "0" if not value else f"{_fraction(value)} = {float(value):.4g}"


def _fraction(value: Fraction) -> str:
    """The fraction, or a decimal number where the fraction would not be read by anybody."""
    return str(value) if value.denominator < 100_000 else f"{float(value):.6g}"


def _row(row: Sequence[float]) -> str:
    return " ".join(f"{c:g}" for c in row)


def _setting(case: Case, policy: Policy) -> Iterator[str]:
    count = len(case.requests)
    first = "first token" if case.tokens == 1 else f"first {case.tokens} tokens"
    tokens = ", ".join(LETTERS[: case.vocabulary])
    each = "" if count == 1 else " of each"
    yield (f"{count} request{'s' * (count > 1)}, gamma {case.gamma}, vocabulary {{{tokens}}}; law of the {first}{each}")
    longest = case.prefill + count * (1 + case.gamma)
    prices = ", ".join(f"{n}: {case.verify_ms[n]:g}" for n in range(1, longest + 1))
    yield f"prices, ms by tokens in the step: {prices}"
    if case.draft_ms:
        yield f"draft pass: {case.draft_ms:g} ms"
    if case.captured_sizes:
        yield f"captured sizes: {', '.join(map(str, case.captured_sizes))}"
    if case.prefill:
        yield f"prefill tokens in every step: {case.prefill}"
    if (count > 1 and case.tokens > 1) or policy.traits.clairvoyant:
        yield "a request that has its tokens " + ("leaves the batch" if case.leave else "stays in the batch")
    if case.clip:
        yield "verify lengths are capped at what is left of the output"
    if case.own_token:
        yield "the confidence of a draft is computed from that draft"


def _request_rows(case: Case, r: int) -> list[list[str]]:
    tables = case.requests[r]
    letters = " ".join(LETTERS[: case.vocabulary])
    rows = [["after", f"target {letters}", f"drafter {letters}", *(f"c_{k + 1}" for k in range(case.gamma))]]
    own = int(case.own_token)
    for context in contexts(case.vocabulary, case.order):
        cells = [text(context)]
        cells += [" ".join(map(_fraction, law[context])) for law in (tables.target, tables.drafter)]
        for k, table in enumerate(tables.confidence):
            # After n tokens of output and k drafts the text has n + k tokens.
            at_start = len(context) == min(case.order, k + own)
            later = case.tokens > 1 and len(context) == case.order
            cells.append(f"{table[context]:g}" if context in table and (at_start or later) else "-")
        rows.append(cells)
    return rows


def _decision_rows(case: Case, log: Sequence[Decision]) -> list[list[str]]:
    """One row a decision: what was drafted as far as it matters, what the policy saw, what it did."""
    later = any(out for entry in log for out in entry.before)
    depth = max((len(entry.older) for entry in log), default=0)
    head = ["step", *(["output so far"] if later else []), "drafted", "confidences"]
    head += [f"{n + 1} step{'s' * (n > 0)} old" for n in range(depth)]
    rows = [[*head, "verified", "probability"]]
    merged: dict[tuple[str, ...], Fraction] = {}
    for entry in log:
        cells = [str(entry.step + 1)]
        if later:
            cells.append(" | ".join(map(text, entry.before)))
        cells.append(" | ".join(_blocks(blocks, case) for blocks in entry.drafts))
        cells += [" | ".join(map(_row, block)) for block in (entry.rows, *entry.older)]
        key = (*cells, " | ".join(map(str, entry.lengths)))
        merged[key] = merged.get(key, Fraction(0)) + entry.probability
    shown = list(merged.items())
    rows += [[*cells, _fraction(chance)] for cells, chance in shown[:_ROWS]]
    if len(shown) > _ROWS:
        rows.append([f"... and {len(shown) - _ROWS} more"])
    return rows


def _blocks(blocks: frozenset[Context], case: Case) -> str:
    """Blocks that look alike, in short: ``.`` for a draft that makes no difference."""
    return "/".join(sorted(_short({text(block) for block in blocks}, LETTERS[: case.vocabulary])))


def _short(words: set[str], letters: str) -> set[str]:
    """Words that differ in one place only, and have every letter there, become one."""
    size = len(next(iter(words)))
    for place in range(size - 1, -1, -1):
        groups: dict[tuple[str, str], set[str]] = {}
        for word in words:
            groups.setdefault((word[:place], word[place + 1 :]), set()).add(word[place])
        words = set()
        for (before, after), found in groups.items():
            words |= {before + one + after for one in ({"."} if found == set(letters) else found)}
    return words


def _law_rows(aim: Mapping[Outputs, Fraction], law: Mapping[Outputs, Fraction]) -> list[list[str]]:
    rows = [["text", "target", "policy", "difference"]]
    keys = sorted({**aim, **law})
    zero = Fraction(0)
    for key in keys[:_ROWS]:
        p, found = aim.get(key, zero), law.get(key, zero)
        gap = found - p
        sign = "+" if gap > 0 else ""
        rows.append([" | ".join(map(text, key)), _fraction(p), _fraction(found), f"{sign}{_fraction(gap)}"])
    if len(keys) > _ROWS:
        rows.append([f"... and {len(keys) - _ROWS} more"])
    return rows


def _table(rows: Sequence[Sequence[Any]]) -> list[str]:
    """Rows of cells as aligned lines."""
    full = [row for row in rows if len(row) == len(rows[0])]
    widths = [max(len(row[i]) for row in full) for i in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows
    ]
