"""Which verification policies keep the target's output distribution?

Audits policies exactly: a small world (vocabulary of two or three tokens, target, drafter and confidences as tables,
one to three requests in a batch, a few steps) is enumerated to the end, and the joint law of all requests' first
tokens is held against the product of the targets' laws. Many random worlds, the same ones for every policy; for each
policy the total variation distance, and where it is not zero the smallest counterexample found. The last columns
repeat it with confidences that are computed from the very draft they are about (a token's probability in the drafter),
for which no policy claims anything.

A policy that claims to be lossless and is not makes the script end with exit code 1. Policies that are lossy on
purpose (control:...) show how many cases it takes to catch one. docs/lossless.md says what is proved and what is not.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import joblib
import pandas as pd
from matplotlib.lines import Line2D
from tqdm import tqdm

from dsim.errors import InputError
from dsim.lossless import (
    CONTROLS,
    Audit,
    Counterexample,
    appendix_a,
    audit,
    describe,
    examine,
    numbered_case,
    smallest_counterexample,
)
from dsim.lossless.case import LIMITS
from dsim.lossless.controls import WithoutBreak
from dsim.plotstyle import SOFT, caption, legend, new_figure, save_figure
from dsim.policy import BUILTIN_POLICIES, Policy, load_policy
from experiments._common import OneLineParser, positive_int, print_table, run_main, staged_output, write_csv, written

#: Built-in policies whose defaults are made for larger batches or longer blocks than an audit has, or that have
#: settings which bear on losslessness. All other names are audited as they are.
VARIANTS: dict[str, tuple[str, ...]] = {
    "fixed": ("fixed:k=1", "fixed:k=2"),
    "threshold": ("threshold:t=0.5", "threshold:t=0.5,on=survival"),
    "dspark": ("dspark:lag=0", "dspark:lag=1", "dspark:lag=2"),
    "sglang": ("sglang", "sglang:table=additive,lag=1,fill=true"),
    "trtllm": ("trtllm", "trtllm:lag=1,floor=0,tiers=global,min_predicted_gain=0"),
    "atom": ("atom", "atom:lag=0", "atom:full_on_change=false,lag=0", "atom:ragged=false,buckets=1/3,lag=0"),
    "vllm-ascend": ("vllm-ascend:interval=1", "vllm-ascend:interval=1,floor=0"),
    "batch-table": ("batch-table:table=1-1=2/2-=1",),
    "goodput": ("goodput:interval=1",),
    "tetris": ("tetris:capacity=2", "tetris:capacity=1,per_request=true"),
    "marginal": ("marginal:lag=0", "marginal"),
    "lab": (
        "lab",
        "lab:search=early-stop,capacity_lag=0",
        "lab:search=early-stop,capacity_lag=0,allocation_lag=1",
    ),
}
CONTROL = "control:"
DEFAULT_CASES = 3000
#: A policy that was caught so often is not tried further: it is lossy, and how lossy is known well enough.
ENOUGH = 30
#: Cases from one look at that to the next; not a matter of --jobs, so that the result is none either.
ROUND = 100
#: Share of the cases that are tried with confidences of the drafts themselves.
OWN_TOKEN = 0.1
#: Known counterexamples that the search for the smallest one starts from, and random cases of each size that it tries.
STARTS, TRIES = 8, 50

REFUTED, LOSSY = "REFUTED", "lossy, as declared"
HELD, UNCLAIMED = "none found", "not refuted"


@dataclass
class Tally:
    """What became of one policy."""

    spec: str
    policy: Policy
    cases: int = 0
    adapted: int = 0
    caught: list[tuple[int, Fraction]] = field(default_factory=list)

    @property
    def control(self) -> bool:
        return self.spec.startswith(CONTROL)

    @property
    def claims(self) -> bool:
        return self.policy.traits.lossless

    @property
    def worst(self) -> Fraction:
        return max((distance for _, distance in self.caught), default=Fraction(0))

    @property
    def verdict(self) -> str:
        if self.claims:
            return REFUTED if self.caught else HELD
        return LOSSY if self.caught else UNCLAIMED

    def take(self, numbers: Sequence[int], audits: Sequence[Audit | None]) -> None:
        """Add what was found in these cases (None: the block is too short for the policy)."""
        for number, found in zip(numbers, audits, strict=True):
            if found is None:
                continue
            self.cases += 1
            self.adapted += found.adapts
            if found.distance > 0:
                self.caught.append((number, found.distance))


def options() -> argparse.ArgumentParser:
    """Command line of the script."""
    cli = OneLineParser(description=__doc__)
    cli.add_argument(
        "--policies",
        metavar="SPEC",
        nargs="+",
        help='policies to audit, for example "dspark:lag=0" my.py:Mine (default: every built-in, some with several '
        "settings); the controls always come along",
    )
    cli.add_argument(
        "--cases", metavar="N", type=positive_int, default=DEFAULT_CASES, help="random cases (default: %(default)s)"
    )
    cli.add_argument("--seed", metavar="N", type=int, default=0, help="of the cases (default: %(default)s)")
    cores = joblib.cpu_count()
    cli.add_argument("--jobs", metavar="N", type=positive_int, default=cores, help=f"processes (default: {cores})")
    cli.add_argument("--quick", action="store_true", help="a tenth of the cases, to see whether it works")
    cli.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        default=Path("results/lossless"),
        help="folder for the results (default: %(default)s)",
    )
    return cli


def main(argv: Sequence[str] | None = None) -> int:
    """Audit, print the table, write the files; 1 if a claim is refuted."""
    cli = options()
    args = cli.parse_args(argv)
    if args.seed < 0:
        cli.error(f"argument --seed: got {args.seed}, expected an integer >= 0")
    cases = math.ceil(args.cases / 10) if args.quick else args.cases
    specs = [*(args.policies or builtin_specs()), *(CONTROL + name for name in CONTROLS)]
    if len(set(specs)) < len(specs):
        raise InputError(field="--policies", value=args.policies, expected="each policy once")
    for spec in specs:
        if (needs := policy_of(spec).traits.needs_gamma) > LIMITS["gamma"]:
            expected = f"a policy for blocks of at most {LIMITS['gamma']} drafts (this one needs {needs})"
            raise InputError(field="--policies", value=spec, expected=expected)
    with staged_output(args.out) as out:
        found = tally(specs, cases, args.seed, args.jobs)
        own = tally(specs, math.ceil(OWN_TOKEN * cases), args.seed, args.jobs, own_token=True)
        smallest = counterexamples(found, args.seed, args.jobs)
        table = result_table(found, own, smallest)
        report(table, found)
        write_csv(table, out / "lossless.csv")
        (out / "counterexamples.md").write_text(document(found, smallest, cases, args.seed), encoding="utf-8")
        draw(found, own, out)
        written(out)
    print(f"written to {args.out}")
    return int(any(one.verdict == REFUTED for one in found))


def builtin_specs() -> list[str]:
    """Every built-in policy, with the settings of `VARIANTS` where the bare name says too little."""
    return [spec for name in BUILTIN_POLICIES for spec in VARIANTS.get(name, (name,))]


def policy_of(spec: str) -> Policy:
    """The policy of a spec; ``control:NAME`` is one of `dsim.lossless.CONTROLS`."""
    if spec.startswith(CONTROL):
        return CONTROLS[spec.removeprefix(CONTROL)]()
    return load_policy(spec)


# --- the audit -------------------------------------------------------------------------------------------


def tally(specs: Sequence[str], cases: int, seed: int, jobs: int, *, own_token: bool = False) -> list[Tally]:
    """Audit policies in the first `cases` cases of a seed; each until it was caught `ENOUGH` times."""
    tallies = [Tally(spec, policy_of(spec)) for spec in specs]
    name = "confidences of the drafts themselves" if own_token else "auditing"
    with joblib.Parallel(n_jobs=jobs) as parallel, tqdm(total=cases, desc=name, unit="case") as bar:
        for start in range(0, cases, ROUND):
            numbers = range(start, min(start + ROUND, cases))
            going = [one for one in tallies if len(one.caught) < ENOUGH]
            shares = [numbers[i::jobs] for i in range(jobs) if numbers[i::jobs]]
            tasks = (joblib.delayed(_examine)([one.spec for one in going], seed, share, own_token) for share in shares)
            audits: dict[tuple[int, int], Audit | None] = {}
            for share, part in zip(shares, parallel(tasks), strict=True):
                for p, row in enumerate(part):
                    audits.update({(p, number): found for number, found in zip(share, row, strict=True)})
            for p, one in enumerate(going):
                one.take(numbers, [audits[p, number] for number in numbers])
            bar.update(len(numbers))
    return tallies


def _examine(specs: Sequence[str], seed: int, numbers: Iterable[int], own_token: bool) -> list[list[Audit | None]]:
    return examine([policy_of(spec) for spec in specs], seed, numbers, own_token=own_token)


def counterexamples(tallies: Sequence[Tally], seed: int, jobs: int) -> dict[str, Counterexample]:
    """The smallest counterexample found, for each policy that was caught."""
    caught = [one for one in tallies if one.caught]
    tasks = (joblib.delayed(_smallest)(one.spec, one.caught, seed, TRIES) for one in caught)
    done = joblib.Parallel(n_jobs=jobs, return_as="generator")(tasks)
    shown = tqdm(done, total=len(caught), desc="smallest counterexamples", unit="policy")
    return {one.spec: found for one, found in zip(caught, shown, strict=True)}


def _smallest(spec: str, caught: Sequence[tuple[int, Fraction]], seed: int, tries: int) -> Counterexample:
    known = [(numbered_case(seed, number), distance) for number, distance in caught]
    known.sort(key=lambda item: (item[0].size, -item[1]))
    return smallest_counterexample(policy_of(spec), [case for case, _ in known[:STARTS]], seed, tries=tries)


# --- what is written -------------------------------------------------------------------------------------


def result_table(tallies: Sequence[Tally], own: Sequence[Tally], smallest: dict[str, Counterexample]) -> pd.DataFrame:
    """One row a policy."""
    rows = []
    for one, other in zip(tallies, own, strict=True):
        least = smallest.get(one.spec)
        requests, gamma, vocabulary, tokens = least.case.size if least else (None,) * 4
        rows.append(
            {
                "policy": one.spec,
                "claims_lossless": one.claims,
                "clairvoyant": one.policy.traits.clairvoyant,
                "verdict": one.verdict,
                "cases": one.cases,
                "adapted_share": one.adapted / max(1, one.cases),
                "caught": len(one.caught),
                "first_caught": one.caught[0][0] + 1 if one.caught else None,
                "tv_max": float(one.worst),
                "tv_max_exact": str(one.worst),
                # Where nothing was found: were more than this share of such cases a leak, one would have
                # shown up with a probability of 95 %.
                "leak_rate_below": None if one.caught else 1 - 0.05 ** (1 / max(1, one.cases)),
                "smallest_requests": requests,
                "smallest_gamma": gamma,
                "smallest_vocabulary": vocabulary,
                "smallest_tokens": tokens,
                "smallest_tv_exact": str(least.distance) if least else None,
                "own_token_cases": other.cases,
                "own_token_adapted_share": other.adapted / max(1, other.cases),
                "own_token_caught": len(other.caught),
                "own_token_tv_max": float(other.worst),
                "own_token_tv_max_exact": str(other.worst),
            }
        )
    counts = ("first_caught", "smallest_requests", "smallest_gamma", "smallest_vocabulary", "smallest_tokens")
    return pd.DataFrame(rows).astype(dict.fromkeys(counts, "Int64"))


def report(table: pd.DataFrame, tallies: Sequence[Tally]) -> None:
    """The table to read, and in words what needs attention."""
    found = audit(appendix_a(), WithoutBreak()).distance
    print(f"\nAppendix A of the paper, without the early stop: total variation {found} (there: 0.85 against 0.7)\n")
    shown = table[["policy", "verdict", "cases", "adapted_share", "caught", "first_caught", "tv_max"]].copy()
    shown["own_token_tv_max"] = table["own_token_tv_max"]
    print_table(shown, digits=3)
    for one in tallies:
        if one.verdict == REFUTED:
            print(f"\nREFUTED: {one.spec} claims to be lossless; its counterexample is in counterexamples.md")
        elif one.control and not one.caught:
            print(f"\n{one.spec} is lossy and was not caught in {one.cases} cases: too few to say much")


def document(tallies: Sequence[Tally], smallest: dict[str, Counterexample], cases: int, seed: int) -> str:
    """Every counterexample as text."""
    parts = [
        "# Counterexamples",
        f"The smallest found for each policy that changes the outputs ({cases} random cases, seed {seed}). In a block "
        "of drafts a dot is a token that makes no difference; `-` is the empty text.",
        "## Appendix A of the paper",
        f"```text\n{describe(appendix_a(), WithoutBreak(), 'Algorithm 1 without its break')}\n```",
    ]
    for one in tallies:
        if one.spec in smallest:
            parts += [
                f"## {one.spec}",
                f"{one.verdict[0].upper()}{one.verdict[1:]}; caught in {len(one.caught)} of {one.cases} cases.",
            ]
            parts += [f"```text\n{describe(smallest[one.spec].case, one.policy, one.spec)}\n```"]
    return "\n\n".join(parts) + "\n"


CLAIMED, DECLARED, LEAKY = "#0072B2", "#E69F00", "#D55E00"


def draw(tallies: Sequence[Tally], own: Sequence[Tally], out: Path) -> None:
    """One line a policy: the distances of the cases in which it was caught, or exactly zero."""
    pairs = sorted(zip(tallies, own, strict=True), key=lambda pair: (pair[0].control, not pair[0].claims))
    claims = [one for one in tallies if one.claims]
    refuted = sum(one.verdict == REFUTED for one in claims)
    fig, axes = new_figure(
        width=8.6,
        height=1.7 + 0.235 * len(pairs),
        title=f"Settings that claim to keep the target's distribution: {len(claims)}; refuted: {refuted or 'none'}",
    )
    caption(
        fig,
        "Exact enumeration in random small worlds (vocabulary 2 or 3, gamma 1 to 3, 1 to 3 requests, 1 to 3 tokens "
        f"each), the same ones for all policies, each until it was caught {ENOUGH} times. Dots: the cases in which it "
        "was caught; diamond: the largest distance; at the right, how many cases out of how many. Hollow: the largest "
        "distance with confidences that are computed from the very draft they are about, for which no claim is made "
        "(DSpark's are known before the draft is drawn). Nothing here is simulated or measured.",
    )
    ax = axes[0, 0]
    distances = [float(d) for one in (*tallies, *own) for _, d in one.caught]
    decades = -math.floor(math.log10(min(distances, default=0.1)))
    # A logarithmic axis has no zero: it gets a strip of its own.
    zero, left, strip = (10.0 ** -(decades + shift) for shift in (0.6, 1.0, 0.25))
    ax.set_xscale("log")
    ax.set_xlim(left, 1.0)
    ax.set_ylim(len(pairs) - 0.4, -0.6)
    ax.axvspan(left, strip, color="#EEEEEE", zorder=0)
    ax.text(1.03, 1.01, "caught", transform=ax.transAxes, fontsize=7, fontweight="bold")
    for y, (one, other) in enumerate(pairs):
        color = LEAKY if one.control or one.verdict == REFUTED else CLAIMED if one.claims else DECLARED
        ax.plot([d for _, d in one.caught], [y] * len(one.caught), "o", color=color, markersize=2.6, alpha=0.45)
        ax.plot(float(one.worst) or zero, y, "D" if one.caught else "o", color=color, markersize=6.0, zorder=4)
        hollow = {"markerfacecolor": "none", "markeredgecolor": SOFT, "markersize": 8.5, "zorder": 5}
        ax.plot(float(other.worst) or zero, y, "o", **hollow)
        share = f"{len(one.caught)} of {one.cases}"
        ax.text(1.03, y, share, transform=ax.get_yaxis_transform(), va="center", fontsize=7)
        before = pairs[y - 1][0] if y else one
        if (before.control, before.claims) != (one.control, one.claims):
            ax.axhline(y - 0.5, color=SOFT, linewidth=0.8)
    ax.set_yticks(range(len(pairs)), [_two_lines(one.spec) for one, _ in pairs], fontsize=7)
    ticks = [10.0**-d for d in range(decades, -1, -1)]
    ax.set_xticks([zero, *ticks], ["exactly 0", *(f"{tick:g}" for tick in ticks)])
    ax.minorticks_off()
    ax.set_xlabel("total variation distance to the target's law")
    marks = [
        Line2D([], [], linestyle="none", marker=marker, color=color, label=label)
        for marker, color, label in (
            ("o", CLAIMED, "claims to be lossless"),
            ("D", DECLARED, "does not claim it"),
            ("D", LEAKY, "lossy on purpose" + (", or refuted" if refuted else "")),
        )
    ]
    ring = Line2D([], [], linestyle="none", marker="o", markerfacecolor="none", markeredgecolor=SOFT, markersize=8.5)
    ring.set_label("if confidences see the draft itself")
    legend(ax, "upper center", handles=[*marks, ring])
    save_figure(fig, out, "lossless")


def _two_lines(spec: str, width: int = 34) -> str:
    """A long spec broken behind a comma."""
    at = spec.rfind(",", 0, width) + 1
    return f"{spec[:at]}\n{spec[at:]}" if len(spec) > width and at else spec


if __name__ == "__main__":
    run_main(main)
