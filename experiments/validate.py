"""Does dsim predict what was measured? Runs a validation case, prints its errors, draws them.

Each case predicts measurements that its fit did not see and says which ones it did (docs/validation.md). The tables,
figures and the page itself are made by this script.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path

import joblib
import pandas as pd

from dsim.errors import InputError
from experiments._common import OneLineParser, positive_int, print_table, run_main, staged_output, write_csv, written
from experiments._validate import Case, RunOptions, Tables, error_summary, page, readable, readable_summary

#: Modules of the cases, in the order of the page.
CASES = {
    "vllm-four-runs": "experiments._validate_vllm_runs",
    "vllm-b300-flash": "experiments._validate_b300",
    "here": "experiments._validate_here",
}

DOCS = Path(__file__).parents[1] / "docs"
#: README's sentence stands between these two.
MARKS = ("<!-- validation: written by experiments/validate.py --docs -->", "<!-- end of validation -->")


def options() -> argparse.ArgumentParser:
    """Command line of the script."""
    cli = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = cli.add_mutually_exclusive_group(required=True)
    what.add_argument("--case", choices=tuple(CASES), help="which measurements to predict")
    what.add_argument(
        "--docs",
        action="store_true",
        help="write docs/validation.md, its figures and README's sentence from the tables in docs/validation",
    )
    cores = joblib.cpu_count()
    cli.add_argument("--jobs", metavar="N", type=positive_int, default=cores, help=f"processes (default: {cores})")
    cli.add_argument("--out", metavar="DIR", type=Path, help="folder for the results (default: results/validate/CASE)")
    cli.add_argument(
        "--ablate", action="store_true", help="also leave each mechanism out, fit again and predict again (minutes)"
    )
    cli.add_argument("--quick", action="store_true", help="a part of the case, to see whether it works")
    cli.add_argument(
        "--ship", action="store_true", help="put the tables into docs/validation and write the page (implies --ablate)"
    )
    return cli


def load_case(name: str) -> Case:
    """A case by its name."""
    found: Case = importlib.import_module(CASES[name]).CASE
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Run a case, or write the page."""
    args = options().parse_args(argv)
    if args.docs:
        for flag in ("ablate", "quick", "ship"):
            if getattr(args, flag):
                raise InputError(field=f"--{flag}", expected="not given with --docs, which runs nothing")
        if args.out is not None:
            raise InputError(field="--out", value=str(args.out), expected="not given with --docs")
        write_docs()
        return
    if args.ship and (args.quick or args.out is not None):
        raise InputError(field="--ship", expected="without --quick and --out")
    case = load_case(args.case)
    tables = case.run(RunOptions(jobs=args.jobs, quick=args.quick, ablate=args.ablate or args.ship))
    out = args.out if args.out is not None else Path("results") / "validate" / args.case
    if args.ship:
        out = DOCS / "validation" / args.case
    with staged_output(out) as work:
        report(tables)
        for name, table in tables.items():
            write_csv(table, work / f"{name}.csv")
        if not args.ship:
            case.draw(tables, work, "validation")
        written(work)
    if args.ship:
        write_docs()
    print(f"written to {out}")


def report(tables: Tables) -> None:
    """Print the predictions, and what their errors come to."""
    for name, table in tables.items():
        if name == "validation":
            print("\nPredictions")
            print_table(readable(table))
    summary = error_summary(tables["validation"])
    if len(summary):
        print("\nErrors of the scored predictions")
        print_table(readable_summary(summary))
    if "ablation" in tables:
        print("\nErrors with one mechanism left out (fitted again)")
        print_table(tables["ablation"])


def shipped(docs: Path = DOCS) -> dict[str, tuple[Case, Tables]]:
    """The cases that have tables in docs/validation, in the order of `CASES`."""
    found: dict[str, tuple[Case, Tables]] = {}
    for name in CASES:
        folder = docs / "validation" / name
        if not (folder / "validation.csv").is_file():
            continue
        tables = {
            file.stem: pd.read_csv(file, keep_default_na=False, na_values=[""]) for file in sorted(folder.glob("*.csv"))
        }
        found[name] = (load_case(name), tables)
    return found


def write_docs(docs: Path = DOCS) -> None:
    """The page, its figures (docs/figures/validation-CASE*.png) and README's sentence from the tables."""
    found = shipped(docs)
    if not found:
        raise InputError(
            "no case has tables there", file=docs / "validation", expected="a checkout, or --case ... --ship"
        )
    with staged_output(docs / "figures") as work:
        for name, (case, tables) in found.items():
            case.draw(tables, work, f"validation-{name}")
        for drawing in work.glob("*.svg"):  # the pages show the PNG
            drawing.unlink()
    with staged_output(docs) as work:
        (work / "validation.md").write_text(page(found), encoding="utf-8")
    readme = docs.parent / "README.md"
    text = readme.read_text(encoding="utf-8")
    renewed = with_headline(text, headline(found))
    if renewed != text:
        with staged_output(docs.parent) as work:
            (work / "README.md").write_text(renewed, encoding="utf-8")
    print(f"written: {docs / 'validation.md'}")


def headline(found: dict[str, tuple[Case, Tables]]) -> str:
    """README's sentences, one a case."""
    return " ".join(case.headline(tables) for case, tables in found.values())


def with_headline(readme: str, text: str) -> str:
    """README with the sentence between its marks; unchanged where it has no marks."""
    start, end = readme.find(MARKS[0]), readme.find(MARKS[1])
    if start < 0 or end < start:
        return readme
    return f"{readme[: start + len(MARKS[0])]}\n{text}\n{readme[end:]}"


if __name__ == "__main__":
    run_main(main)
