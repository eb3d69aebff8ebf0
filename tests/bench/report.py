"""Results of `make bench` as a table, and two of them compared by ratio.

    python tests/bench/report.py RESULTS.json [--against OLD.json] [--slim OUT.json] [--page docs/performance.md]

Times are compared in units of the calibration loop that ran beside each of them, so that a slower machine, or a slow
hour, cancels as far as it slows both alike.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
#: What a test says of itself beside its time, and how it is shown.
EXTRAS = {
    "requests_per_s": "{:,.0f} requests/s",
    "us_per_step": "{:.3g} us a step",
    "plan_us": "plan() {:.3g} us",
    "unit_us": "U {:.3g} us",
    "early_us": "10^4 to 10^5 steps: {:.3g} us",
    "late_us": "10^5 to 10^6: {:.3g} us",
    "late_to_early": "ratio {:.3f}",
    "us_by_replicas": "1 / 8 / 64 replicas: {} us a step",
    "64_to_8": "64 to 8: {:.2f}",
    "8_to_1": "8 to 1: {:.2f}",
    "peak_mib": "{:.0f} MiB",
    "runs_per_s": "{:.3g} runs/s",
    "times_as_fast": "{:.2f} times as fast as one job",
}


def slim(results: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a file of pytest-benchmark: no host name, no single rounds."""
    if "benchmarks" not in results or "machine_info" not in results:
        return results
    cpu = results["machine_info"]["cpu"]
    rows = [
        {
            "group": row["group"],
            "name": row["name"].removeprefix("test_"),
            "min_s": row["stats"]["min"],
            "median_s": row["stats"]["median"],
            "rounds": row["stats"]["rounds"],
            **row["extra_info"],
        }
        for row in results["benchmarks"]
    ]
    return {
        "machine": f"{cpu.get('count')} x {cpu.get('brand_raw')}",
        "python": results["machine_info"]["python_version"],
        "commit": results["commit_info"].get("id", "")[:9],
        "date": results["datetime"][:10],
        "rows": rows,
    }


def seconds(value: float) -> str:
    """A time to three digits, in a unit that fits."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def table(kept: dict[str, Any], old: dict[str, Any] | None = None) -> str:
    """Markdown: a section a group."""
    before = {(row["group"], row["name"]): row for row in (old or {"rows": []})["rows"]}
    lines = [f"{kept['machine']}, Python {kept['python']}, commit {kept['commit']}, {kept['date']}, `make bench`.", ""]
    for group in dict.fromkeys(row["group"] for row in kept["rows"]):
        change = " against before |" if before else ""
        lines += [f"**{group or 'others'}**", "", f"| what | fastest | in calibrations | more |{change}"]
        lines.append("|---|---|---|---|" + ("---|" if before else ""))
        for row in kept["rows"]:
            if row["group"] != group:
                continue
            units = row["min_s"] / row["calibration_s"] if "calibration_s" in row else float("nan")
            more = ", ".join(text.format(row[key]) for key, text in EXTRAS.items() if key in row)
            line = f"| `{row['name']}` | {seconds(row['min_s'])} | {units:.3g} | {more} |"
            if before:
                past = before.get((group, row["name"]))
                ratio = units / (past["min_s"] / past["calibration_s"]) if past else float("nan")
                line += f" x {ratio:.2f} |"
            lines.append(line)
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Read, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="a file of pytest-benchmark, or what --slim made of one")
    parser.add_argument("--against", type=Path, help="an older file: adds a column of ratios")
    parser.add_argument("--slim", type=Path, help="write what is worth keeping there")
    parser.add_argument("--page", type=Path, help=f"put the table between {BEGIN} and {END} of this page")
    given = parser.parse_args()
    kept = slim(json.loads(given.results.read_text(encoding="utf-8")))
    old = None if given.against is None else slim(json.loads(given.against.read_text(encoding="utf-8")))
    if given.slim:
        given.slim.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    text = table(kept, old)
    if given.page is None:
        sys.stdout.write(text)
        return
    before, begin, rest = given.page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        sys.exit(f"error: {given.page} has no {BEGIN} ... {END}")
    given.page.write_text(f"{before}{BEGIN}\n{text}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
