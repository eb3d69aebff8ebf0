"""A finite world in which a policy can be audited: everything random is a table of exact probabilities.

A `Case` fixes what an audit enumerates: the requests of one batch, each with the target's law, the drafter's
law and the confidence function as tables over a vocabulary of two or three tokens, and what the policy is told
besides (prices, captured sizes, confidences of earlier steps).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from dsim.errors import InputError

#: The last tokens of a text, oldest first: what the tables are looked up by. Tokens are 0, 1, ...
Context = tuple[int, ...]
#: Probability of each token.
Distribution = tuple[Fraction, ...]
#: Confidences of one block, one a draft position.
Row = tuple[float, ...]

#: Largest sizes that a case may have: the work is exponential in all of them.
LIMITS = {"vocabulary": 3, "gamma": 3, "tokens": 4, "order": 2, "requests": 3}

#: How tokens are written.
LETTERS = "ABC"


@dataclass(frozen=True)
class Tables:
    """One request: the target's law, the drafter's law and the confidence function.

    Parameters
    ----------
    target, drafter
        Distribution of the next token by context, for every context of at most `Case.order` tokens.
    confidence
        One table a draft position: c_k by the context *before* draft k (committed text and x_1 ... x_{k-1}), as a
        policy sees it, in float32. With `Case.own_token` the context ends with x_k itself.
    """

    target: Mapping[Context, Distribution]
    drafter: Mapping[Context, Distribution]
    confidence: tuple[Mapping[Context, float], ...]


@dataclass(frozen=True)
class Case:
    """What one audit enumerates.

    Parameters
    ----------
    vocabulary, gamma, tokens
        Tokens there are (2..3), drafts in a block (1..3), and n, the output tokens of each request whose law is
        compared (1..4).
    requests
        One `Tables` a request, 1..3 of them. They share the batch.
    verify_ms
        Milliseconds of the target's pass by tokens in the step; entry 0 is unused. At least
        1 + prefill + R * (1 + gamma) entries.
    order
        How many of the last tokens the tables depend on (0..2); at the start there are fewer.
    draft_ms, captured_sizes, prefill
        As in `dsim.policy.PolicyView`; `prefill` tokens are in every step beside the drafts.
    starts
        Step at which each request enters the batch; empty: all at step 0. One that enters later has no older
        confidences (c = 1).
    past
        Blocks of confidences of steps before step 0, oldest first, each a row a request of those that start at
        0: the policy is asked once for each of them before the audit begins. They are constants, as everything
        before step 0 is given. Without them the batch begins at step 0, and older confidences are 1.
    leave
        What a request does that has its n tokens: it leaves the batch (its output ends there), or stays and is
        decoded further, unseen (the n tokens are the beginning of a longer output).
    clip
        Verify lengths are capped at what is left of the output, as with the engine option of that name. Needs
        `leave`.
    own_token
        The confidence of a draft is computed from that very draft, as the drafter's probability of the token it
        drew is. The claim of `Traits.lossless` is made for confidences that are not.

    Raises
    ------
    InputError
        Anything that the description above rules out, or a table with a context too few.
    """

    vocabulary: int
    gamma: int
    tokens: int
    requests: tuple[Tables, ...]
    verify_ms: tuple[float, ...]
    order: int = 1
    draft_ms: float = 0.0
    captured_sizes: tuple[int, ...] = ()
    prefill: int = 0
    starts: tuple[int, ...] = ()
    past: tuple[tuple[Row, ...], ...] = ()
    leave: bool = True
    clip: bool = False
    own_token: bool = False
    #: The starts, one a request.
    enters: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        sizes = {**{name: getattr(self, name) for name in LIMITS}, "requests": len(self.requests)}
        for name, most in LIMITS.items():
            least = {"vocabulary": 2, "order": 0}.get(name, 1)
            if type(sizes[name]) is not int or not least <= sizes[name] <= most:
                raise InputError(field=name, value=sizes[name], expected=f"an integer in {least}..{most}")
        count = len(self.requests)
        object.__setattr__(self, "enters", self.starts or (0,) * count)
        starts = self.enters
        if len(starts) != count or min(starts) != 0 or max(starts) > LIMITS["tokens"]:
            expected = f"{count} integers in 0..{LIMITS['tokens']}, the first of them 0"
            raise InputError(field="starts", value=starts, expected=expected)
        if self.clip and not self.leave:
            raise InputError(field="clip", value=True, expected="False where leave = False: no output ends")
        if type(self.prefill) is not int or self.prefill < 0:
            raise InputError(field="prefill", value=self.prefill, expected="an integer >= 0")
        if not 0 <= self.draft_ms < float("inf"):
            raise InputError(field="draft_ms", value=self.draft_ms, expected="milliseconds >= 0")
        if any(low >= high for low, high in itertools.pairwise((0, *self.captured_sizes))):
            raise InputError(field="captured_sizes", value=self.captured_sizes, expected="ascending integers >= 1")
        needed = 1 + self.prefill + count * (1 + self.gamma)
        if len(self.verify_ms) < needed or not all(ms > 0 for ms in self.verify_ms[1:]):
            expected = f"at least {needed} milliseconds, > 0 from the second on"
            raise InputError(field="verify_ms", value=self.verify_ms, expected=expected)
        early = sum(start == 0 for start in starts)
        for block in self.past:
            fits = len(block) == early and all(len(row) == self.gamma for row in block)
            if not fits or not all(0 <= c <= 1 for row in block for c in row):
                expected = f"{early} rows of {self.gamma} confidences in [0, 1]"
                raise InputError(field="past", value=block, expected=expected)
        for number, tables in enumerate(self.requests):
            self._check(tables, f"requests.{number}")

    def _check(self, tables: Tables, where: str) -> None:
        for name, law in (("target", tables.target), ("drafter", tables.drafter)):
            for context in contexts(self.vocabulary, self.order):
                row = law.get(context)
                if row is None or len(row) != self.vocabulary or sum(row) != 1 or min(row) < 0:
                    expected = f"{self.vocabulary} probabilities that add up to 1 exactly"
                    raise InputError(field=f"{where}.{name}[{text(context)}]", value=row, expected=expected)
        if len(tables.confidence) != self.gamma:
            expected = f"{self.gamma} tables"
            raise InputError(field=f"{where}.confidence", value=len(tables.confidence), expected=expected)
        for k, table in enumerate(tables.confidence):
            for context in contexts(self.vocabulary, self.order, shortest=k + self.own_token):
                c = table.get(context)
                if c is None or not 0 <= c <= 1:
                    name = f"{where}.confidence[{k}][{text(context)}]"
                    raise InputError(field=name, value=c, expected="a number in [0, 1]")

    @property
    def size(self) -> tuple[int, int, int, int]:
        """(requests, gamma, vocabulary, tokens): by which counterexamples are called small."""
        return len(self.requests), self.gamma, self.vocabulary, self.tokens

    def context(self, tokens: Context) -> Context:
        """What the tables are looked up by after `tokens`."""
        return tokens[-self.order :] if self.order else ()

    def confidences(self, request: int, before: Context, drafts: Context) -> Row:
        """c_1 ... c_gamma of a block drafted after `before` (the context of the committed text)."""
        tables = self.requests[request].confidence
        ends = range(self.own_token, self.gamma + self.own_token)
        return tuple(table[self.context(before + drafts[:end])] for table, end in zip(tables, ends, strict=True))


def contexts(vocabulary: int, order: int, shortest: int = 0) -> Iterator[Context]:
    """All contexts of at most `order` tokens, short ones first; none shorter than `shortest` (or than `order`)."""
    for length in range(min(shortest, order), order + 1):
        yield from itertools.product(range(vocabulary), repeat=length)


def text(tokens: Context) -> str:
    """Tokens as letters; the empty text is ``-``."""
    return "".join(LETTERS[token] for token in tokens) or "-"


def distribution(*weights: int | str | Fraction) -> Distribution:
    """Probabilities in proportion to the weights.

    >>> [str(p) for p in distribution(7, 3)]
    ['7/10', '3/10']
    """
    exact = [Fraction(weight) for weight in weights]
    total = sum(exact)
    if total <= 0 or min(exact) < 0:
        raise InputError(field="weights", value=weights, expected="numbers >= 0, one of them above")
    return tuple(weight / total for weight in exact)


def everywhere(row: Sequence[Fraction], vocabulary: int, order: int = 1) -> dict[Context, Distribution]:
    """A law that does not look at the context: the same distribution after every text."""
    return {context: tuple(row) for context in contexts(vocabulary, order)}


def appendix_a() -> Case:
    """The counterexample of the paper's Appendix A (arXiv 2607.05147, https://arxiv.org/abs/2607.05147).

    One request, two drafts, SPS = 1, 0.5, 0.45 by tokens in the step; at the first position the target draws A
    with probability 0.7 and the drafter with 0.5, so a_1 = 0.8; after x_1 = A the drafter is sure of its second
    token (c_2 = 0.9), after B it has no hope (c_2 = 0). The paper gives the laws at the first position only; here
    they hold at all.

    >>> case = appendix_a()
    >>> case.size, [round(1000 / ms, 2) for ms in case.verify_ms[1:]]
    ((1, 2, 2, 1), [1.0, 0.5, 0.45])
    """
    first = dict.fromkeys(contexts(2, 1), 0.8)
    tables = Tables(
        target=everywhere(distribution(7, 3), 2),
        drafter=everywhere(distribution(1, 1), 2),
        confidence=(first, {(0,): 0.9, (1,): 0.0}),
    )
    return Case(2, 2, 1, (tables,), verify_ms=(0.0, 1000 / 1.0, 1000 / 0.5, 1000 / 0.45))
