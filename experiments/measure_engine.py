"""How fast is a real speculative-decoding engine on this machine, at which load, under which policy?

Runs drafter and target (dsim.drafter.engine) in closed loops: every policy at every load, in rounds. Between the runs
it times single steps of given sizes and makes a profile of them, so that what the machine does over the hours is in
both. `python experiments/validate.py --case here` then predicts the runs from the profile and a recorded bank.

A pilot profile, timed first, is what the policies are told that steps cost. The work is kept piece by piece below the
output folder: a run that was broken off goes on where it was, and more --rounds can be added later.

Example: python experiments/measure_engine.py --drafter results/train_drafter/dspark-markov/drafter.safetensors \\
             --bank results/record_banks/dspark.npz
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from dsim.drafter.build import drafter_hash, read_drafter
from dsim.drafter.engine import EngineRequest
from dsim.drafter.prompts import DOMAINS, Prompt, generate_prompts, prompts_hash
from dsim.drafter.target import LlamaTarget
from dsim.drafter.targets import load_target
from dsim.drafter.timing import batch_sizes, profile_sizes
from dsim.drafts import Bank, load_bank, write_bank
from dsim.drafts.calibrate import read_temperatures
from dsim.errors import InputError
from dsim.plotstyle import INK, SOFT, arm_styles, caption, legend, new_figure, save_figure, style
from dsim.policy import load_policy
from dsim.profile import write_profile
from experiments._common import OneLineParser, positive_int, print_table, run_main, staged_output, write_csv, written
from experiments._engine_measure import CLOCKS, Plan, measure, repeatability, results
from experiments._engine_runs import Measured, bank_of_prompts, read_measured

POLICIES = ("none", "fixed:k=1", "fixed:k=3", "fixed:k=7", "threshold", "dspark", "vllm-adaptive")
#: Tables beside the profile, which cannot have their names.
TABLES = ("bank", "cells", "drift", "host", "measurement", "passes", "pilot", "pilot_host", "requests", "runs")
#: Prompt seed of the evaluation split, as in `record_banks.py`.
PROMPT_SEED = 0


def options() -> argparse.ArgumentParser:
    """Command line of the script."""
    cli = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--drafter", metavar="FILE", type=Path, required=True, help="a drafter file for the target")
    cli.add_argument("--target", choices=("smollm2", "tiny"), default="smollm2", help="default: %(default)s")
    cli.add_argument(
        "--bank",
        metavar="FILE",
        help="a bank of the same drafter, recorded on the same prompts by record_banks.py (or the name of a shipped "
        "one): its part goes with the measurement, for validate.py",
    )
    cli.add_argument(
        "--temperatures",
        metavar="FILE.json",
        help="temperatures of the confidences (default: the bank's; without one the drafter file's)",
    )
    cli.add_argument("--rounds", type=positive_int, default=3, metavar="N", help="default: %(default)s")
    cli.add_argument(
        "--users", type=_numbers, default=(1, 2, 4, 8, 16), metavar="N,N", help="loads (default: 1,2,4,8,16)"
    )
    cli.add_argument(
        "--policies", nargs="+", default=list(POLICIES), metavar="SPEC", help=f"default: {' '.join(POLICIES)}"
    )
    cli.add_argument(
        "--requests", type=positive_int, default=24, metavar="N", help="a run, at least (default: %(default)s)"
    )
    cli.add_argument(
        "--per-user", type=positive_int, default=3, metavar="N", help="requests a user, at least (default: %(default)s)"
    )
    cli.add_argument(
        "--max-tokens", type=positive_int, default=128, metavar="N", help="answers are cut (default: %(default)s)"
    )
    cli.add_argument(
        "--prefill-chunk",
        type=positive_int,
        default=128,
        metavar="N",
        help="prompt tokens a step (default: %(default)s)",
    )
    cli.add_argument(
        "--passes", type=positive_int, default=4, metavar="N", help="of each size a round (default: %(default)s)"
    )
    cli.add_argument("--temperature", type=float, metavar="T", help="of target and drafts (default: the drafter's own)")
    cli.add_argument("--threads", type=positive_int, default=1, metavar="N", help="of PyTorch (default: %(default)s)")
    cli.add_argument(
        "--clock",
        choices=tuple(CLOCKS),
        default="wall",
        help="wall, or cpu: this process's time, for a machine that others use too; one thread only (default: wall)",
    )
    cli.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampling (default: %(default)s)")
    cli.add_argument(
        "--same-texts",
        action="store_true",
        help="every round samples the same texts again: its steps are the same, its times the machine's alone. Without "
        "it a round samples texts of its own for the same prompts",
    )
    cli.add_argument("--name", metavar="NAME", help="of the profile (default: here-TARGET)")
    cli.add_argument(
        "--out", type=Path, metavar="DIR", default=Path("results/measure_engine"), help="default: %(default)s"
    )
    cli.add_argument("--quick", action="store_true", help="a small measurement, to see whether it works")
    return cli


def _numbers(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1 or list(found) != sorted(set(found)):
        raise argparse.ArgumentTypeError(f"got '{text}', expected ascending integers >= 1 with commas between")
    return found


def plan_of(given: argparse.Namespace) -> Plan:
    """Open everything that the command line names, and refuse what does not fit together."""
    if given.seed < 0:
        raise InputError(field="--seed", value=given.seed, expected="an integer >= 0")
    if given.clock == "cpu" and given.threads > 1:
        raise InputError("sums the time of all threads", field="--clock", value="cpu", expected="wall, or --threads 1")
    if (given.name is not None and not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", given.name)) or given.name in TABLES:
        expected = f"lower case letters, digits, '.', '_' and '-', none of {', '.join(TABLES)}"
        raise InputError(field="--name", value=given.name, expected=expected)
    if len(set(given.policies)) < len(given.policies):
        raise InputError(field="--policies", value=" ".join(given.policies), expected="each policy once")
    if given.quick:
        given = argparse.Namespace(**{**vars(given), **_quick(given)})
    target = load_target(given.target)
    assert isinstance(target, LlamaTarget)
    drafter, about = read_drafter(given.drafter, target)
    gamma = drafter.config.gamma
    for spec in given.policies:
        policy = load_policy(spec)
        if policy.traits.clairvoyant:
            raise InputError("no real engine can run it", field="--policies", value=spec)
        if policy.traits.needs_gamma > gamma:
            raise InputError(f"needs longer blocks than {gamma}", field="--policies", value=spec)
    count = max(given.requests, given.per_user * given.users[-1])
    if count < given.users[-1]:
        raise InputError(field="--requests", value=given.requests, expected=f"at least the users, {given.users[-1]}")
    prompts = tuple(generate_prompts(count, seed=PROMPT_SEED, split="evaluation"))
    domains = [DOMAINS.index(prompt.domain) for prompt in prompts]
    asked = (tuple(target.tokenizer.chat(prompt.text)) for prompt in prompts)
    requests = tuple(
        EngineRequest(i, tokens, domain) for i, (tokens, domain) in enumerate(zip(asked, domains, strict=True))
    )
    lengths = [len(request.prompt) for request in requests]
    digest = drafter_hash(drafter)
    opened = None if given.bank is None else load_bank(given.bank)
    temperatures = about.temperatures if opened is None else opened.header.temperatures
    if given.temperatures is not None:
        temperatures = read_temperatures(given.temperatures, gamma)
    temperature = drafter.config.temperature if given.temperature is None else given.temperature
    bank = None if opened is None else _own_bank(opened, given.bank, prompts, digest, temperature, temperatures)
    contexts = (max(2, min(lengths)), max(lengths) + given.max_tokens)
    batches = batch_sizes(given.users, gamma, given.prefill_chunk)
    sizes = profile_sizes(
        batches,
        gamma,
        contexts=contexts,
        usual=round(float(np.mean(lengths)) + given.max_tokens / 2),
        prompts=_prompt_sizes(lengths, given.prefill_chunk),
    )
    measured = Measured(
        profile=given.name or f"here-{given.target}",
        target=target.name,
        drafter=f"{drafter.config.kind} {digest}",
        gamma=gamma,
        temperature=temperature,
        temperatures=tuple(temperatures),
        arms=tuple(given.policies),
        users=given.users,
        requests=given.requests,
        per_user=given.per_user,
        max_tokens=given.max_tokens,
        prefill_chunk=given.prefill_chunk,
        prompts=prompts_hash(prompts),
        contexts=contexts,
        passes=given.passes,
        seed=given.seed,
        same_texts=given.same_texts,
        threads=given.threads,
        clock=given.clock,
        rounds=given.rounds,
        about=_about(),
    )
    plan = Plan(measured, target, drafter, prompts, requests, tuple(sizes), bank)
    _ = plan.options  # what an engine refuses is refused before anything is written
    return plan


def _quick(given: argparse.Namespace) -> dict[str, Any]:
    return {
        "rounds": min(given.rounds, 2),
        "users": tuple(dict.fromkeys((given.users[0], min(given.users[-1], 4)))),
        "requests": min(given.requests, 6),
        "per_user": min(given.per_user, 2),
        "max_tokens": min(given.max_tokens, 32),
        "policies": [spec for spec in given.policies if spec in ("none", "fixed:k=1", "dspark")] or given.policies[:2],
        "prefill_chunk": min(given.prefill_chunk, 64),
        "passes": 1,
    }


def _prompt_sizes(lengths: Sequence[int], chunk: int) -> list[int]:
    """Prompts to time: around the shortest, usual and longest one, and no longer than a chunk."""
    low, high = min(lengths), min(max(lengths), chunk)
    sizes = {max(1, low // 2), min(low, chunk), min(round(float(np.mean(lengths))), chunk), high}
    return sorted({*sizes, chunk} if chunk <= 2 * high else sizes)


def _own_bank(
    bank: Bank,
    name: str,
    prompts: Sequence[Prompt],
    digest: str,
    temperature: float,
    temperatures: Sequence[float],
) -> Bank:
    try:
        notes = json.loads(bank.header.notes)
        asked, found, at = int(notes["prompts_asked"]), notes["drafter_hash"], float(notes["temperature"])
    except (ValueError, TypeError, KeyError):
        asked, found, at = len(prompts), digest, temperature  # `bank_of_prompts` says what is missing
    if found != digest:
        raise InputError("is of another drafter", file=name, field="drafter_hash", value=found, expected=digest)
    if at != temperature:
        expected = f"{temperature:g}"
        raise InputError("was recorded otherwise", file=name, field="temperature", value=at, expected=expected)
    whole = generate_prompts(asked, seed=PROMPT_SEED, split="evaluation")
    try:
        return bank_of_prompts(bank, [prompt.domain for prompt in prompts], prompts_hash(whole), temperatures)
    except InputError as error:
        raise InputError(
            error.message, file=name, field=error.field, value=error.value, expected=error.expected
        ) from None


def _about() -> dict[str, str]:
    """The machine and the versions, in words; no names of hosts."""
    names = ("dspark-sim", "torch", "numpy")
    processor = platform.processor() or platform.machine()
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
        processor = found[1] if found else processor
    except OSError:
        pass
    return {
        "processor": f"{processor}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        **{name: version(name) for name in names},
    }


# -- the figure ------------------------------------------------------------------------------------------


@style()
def draw(profile_table: pd.DataFrame, cells: pd.DataFrame, measured: Measured, folder: Path) -> None:
    """Throughput against tok/s/user of the runs, their accepted length, and what a step costs."""
    fig, axes = new_figure(
        2, width=11.0, height=4.8, title="A real engine on this machine: what it gave, and what a step costs"
    )
    caption(
        fig,
        f"{measured.target}, {measured.drafter.partition(' ')[0]} drafter, gamma {measured.gamma}, T = "
        f"{measured.temperature:g}, {measured.threads} thread(s), {measured.clock} clock: closed loops of "
        f"{', '.join(map(str, measured.users))} users, mean of {measured.rounds} round(s), bars: all rounds. Right: "
        f"median passes, bars: quartiles; texts of {measured.contexts[0]} (hollow) and {measured.contexts[1]} tokens.",
    )
    _draw_runs(axes[0, 0], cells, measured)
    _draw_steps(axes[0, 1], profile_table, measured)
    save_figure(fig, folder, "measure_engine")


def _draw_runs(ax: Axes, cells: pd.DataFrame, measured: Measured) -> None:
    looks = arm_styles(measured.arms)
    for arm in measured.arms:
        rows = cells[cells["arm"] == arm].sort_values("users")
        x, y = rows["tps_per_user"].to_numpy(), rows["throughput_tok_s"].to_numpy()
        look = looks[arm]
        ax.errorbar(
            x, y, xerr=x * rows["tps_per_user_half_range"], yerr=y * rows["throughput_tok_s_half_range"],
            color=look.color, marker=look.marker, linestyle=look.linestyle, linewidth=1.3, markersize=5,
            elinewidth=0.8, label=arm,
        )  # fmt: skip
    ax.set_xlabel("tok/s/user (1 / median TPOT)")
    ax.set_ylabel("throughput, tok/s")
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    ax.set_title(f"Runs: {measured.users[0]} (right) to {measured.users[-1]} users (left)")
    legend(ax, "best")


def _draw_steps(ax: Axes, table: pd.DataFrame, measured: Measured) -> None:
    verify = table[table["kind"] == "verify"]
    batches = sorted(verify["requests"].unique())
    for index, batch in enumerate(batches):
        shade = 0.15 + 0.65 * index / max(1, len(batches) - 1)
        for context in measured.contexts:
            rows = verify[(verify["requests"] == batch) & (verify["context"] == context)].sort_values("tokens")
            middle = rows["median_ms"].to_numpy()
            longest = context == measured.contexts[1]
            ax.errorbar(
                rows["tokens"], middle, yerr=(middle - rows["q1_ms"], rows["q3_ms"] - middle), color=str(0.85 - shade),
                marker="o", markersize=3.5, markerfacecolor=str(0.85 - shade) if longest else "white", linewidth=1.0,
                elinewidth=0.7, label=f"verify, {batch} request{'s' if batch > 1 else ''}" if longest else None,
            )  # fmt: skip
    draft = table[table["kind"] == "draft"].sort_values("requests")
    ax.plot(
        draft["requests"], draft["median_ms"], color="#D55E00", marker="s", markersize=4, label="draft, by requests"
    )
    prompts = table[table["kind"] == "prefill"].sort_values("tokens")
    ax.plot(prompts["tokens"], prompts["median_ms"], color="#0072B2", marker="^", markersize=4, label="a prompt alone")
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda value, _position: f"{value:g}")
    ax.set_ylim(bottom=0)
    ax.set_xlabel("tokens in the pass (drafts: requests)")
    ax.set_ylabel("ms")
    ax.set_title("What a step costs")
    ax.tick_params(colors=INK)
    ax.spines[["top", "right"]].set_color(SOFT)
    legend(ax, "upper left")


# -- main ------------------------------------------------------------------------------------------------


def check_resume(plan: Plan, file: Path) -> None:
    """Refuse to go on with a measurement that was begun otherwise."""
    if not file.is_file():
        return
    before = read_measured(file)
    for item in fields(Measured):
        ours, theirs = getattr(plan.measured, item.name), getattr(before, item.name)
        if item.name not in ("rounds", "about") and ours != theirs:
            raise InputError(
                "a measurement of other settings is there",
                file=file.parent,
                field=item.name,
                value=theirs,
                expected=f"{ours}, or another --out",
            )
    for name in ("processor", "torch"):
        if plan.measured.about[name] != before.about.get(name):
            raise InputError(
                "a measurement of another machine is there",
                file=file.parent,
                field=name,
                value=before.about.get(name),
                expected=f"{plan.measured.about[name]}, or another --out",
            )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is missing; profile, tables, figure."""
    given = options().parse_args(argv)
    plan = plan_of(given)
    out: Path = given.out
    parts = out / "parts"
    check_resume(plan, parts / "measurement.json")
    parts.mkdir(parents=True, exist_ok=True)
    plan.measured.write(parts / "measurement.json")
    measure(plan, parts)
    found = results(plan, parts)
    cells = repeatability(found["runs"])
    with staged_output(out) as stage:
        write_profile(found["profile"], stage / f"{plan.measured.profile}.csv")
        for name in ("host", "passes", "pilot", "pilot_host", "runs", "requests", "drift"):
            write_csv(found[name], stage / f"{name}.csv")
        write_csv(cells, stage / "cells.csv")
        if plan.bank is not None:
            write_bank(plan.bank, stage / "bank.npz")
        draw(found["passes"], cells, plan.measured, stage)
        plan.measured.write(stage / "measurement.json")
        written(stage)
    print(
        "\nThe runs, mean over the rounds; machine: half the range of the time of the same steps, then the same after "
        "the drift was taken out that the passes between them show"
    )
    shown = ["arm", "users", "rounds", "throughput_tok_s", "throughput_tok_s_half_range", "tps_per_user"]
    print_table(
        cells[[*shown, "accepted_length", "verification_budget", "time_ratio", "machine", "machine_after_drift"]]
    )
    print("\nHow slow the machine was during the runs, by the passes timed between their steps (1: as usual)")
    print_table(found["drift"])


if __name__ == "__main__":
    run_main(main)
