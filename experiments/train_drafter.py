"""Train a drafter: text from the target, draft vocabulary, training, learning curve, drafter file.

The target answers prompts (the shipped generator's, or your own with --prompts) in three parts that share none: text
to train on, text that only chooses the draft vocabulary, and held-out text. Text is kept in the cache and shared by
all recipes of a target and temperature. A run that was broken off goes on where it was: the same command again.

Ten minutes on two cores:   python experiments/train_drafter.py --recipe quick
The shipped drafters:       python experiments/train_drafter.py --recipe long (hours)
A baseline on the same text: --set drafter.kind=dflash --set drafter.head=none
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import tomli_w
import torch

from dsim.drafter.build import take_weights, write_drafter
from dsim.drafter.confidence import fit_confidence
from dsim.drafter.corpus import Corpus
from dsim.drafter.prompts import Prompt, generate_prompts, read_prompts, split_prompts
from dsim.drafter.recipe import RecipeFile, load_recipe, text_folder
from dsim.drafter.targets import device_text, load_target, pick_device
from dsim.drafter.train import Trainer, new_drafter
from dsim.drafter.vocabulary import choose_vocabulary, covered
from dsim.errors import InputError
from dsim.plotstyle import GRID, caption, legend, new_figure, save_figure, style
from experiments._common import OneLineParser, positive_int, print_table, run_main, staged_output, write_csv, written
from experiments._text import add_recipe, make_text

CHECKPOINT = "checkpoint.safetensors"


def options() -> argparse.ArgumentParser:
    """Command line of the script."""
    cli = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe(cli, "quick")
    cli.add_argument(
        "--prompts",
        metavar="FILE.jsonl",
        type=Path,
        help="your own prompts, split by a hash of their text, instead of text.train and text.calibration generated "
        "ones; needs --text",
    )
    cli.add_argument("--text", metavar="DIR", type=Path, help="folder for the text (default: in the cache)")
    cli.add_argument(
        "--start",
        metavar="FILE",
        type=Path,
        help="begin with this drafter's weights; where its sequential head is another one, with those of its backbone "
        "(an RNN head begins as a Markov head of its rank)",
    )
    cli.add_argument("--out", metavar="DIR", type=Path, help="default: results/train_drafter/KIND-HEAD")
    cli.add_argument("--device", choices=("auto", "cpu", "cuda"), default="cpu", help="default: %(default)s")
    cli.add_argument(
        "--jobs", metavar="N", type=positive_int, default=2, help="processes for the text, threads for the rest"
    )
    cli.add_argument(
        "--minutes",
        metavar="M",
        type=positive_int,
        help="end training after M minutes, the learning rate lowered in time (to be gone on with from before that)",
    )
    cli.add_argument("--text-only", action="store_true", help="make the text and stop")
    cli.add_argument("--fresh", action="store_true", help="begin again, even if there is a checkpoint")
    return cli


def prompts_of(recipe: RecipeFile, file: Path | None) -> dict[str, list[Prompt]]:
    """Prompts of the splits train (those for the vocabulary come first) and calibration."""
    text = recipe.text
    if file is None:
        wanted = {"train": text.train + text.vocabulary, "calibration": text.calibration}
        return {split: generate_prompts(count, seed=text.seed, split=split) for split, count in wanted.items()}
    parts = split_prompts(read_prompts(file), seed=text.seed)
    return {split: parts[split] for split in ("train", "calibration")}


def shards_of(recipe: RecipeFile, prompts: dict[str, list[Prompt]]) -> tuple[int, int]:
    """Shards of the split train, and how many of them (the first ones) are reserved for the vocabulary."""
    text = recipe.text
    shards, reserved = (-(-count // text.shard) for count in (len(prompts["train"]), text.vocabulary))
    if shards <= reserved:
        raise InputError(
            f"leaves nothing to train on: {len(prompts['train'])} prompts are {shards} shards of {text.shard}",
            field="text.vocabulary",
            value=text.vocabulary,
            expected="fewer prompts, or a smaller text.shard",
        )
    return shards, reserved


def corpora(
    recipe: RecipeFile, prompts: dict[str, list[Prompt]], folders: dict[str, Path]
) -> tuple[Corpus, Corpus, Corpus]:
    """Text to train on, to choose the vocabulary by, and held out."""
    shard = recipe.text.shard
    shards, reserved = shards_of(recipe, prompts)
    return (
        Corpus(folders["train"], first=reserved, last=shards),
        Corpus(folders["train"], last=reserved),
        Corpus(folders["calibration"], last=-(-len(prompts["calibration"]) // shard)),
    )


def draw_curve(curve: pd.DataFrame, note: str, out: Path) -> None:
    """Held-out acceptance by position, and tau, against anchors."""
    with style():
        figure, panels = new_figure(2, title="Held-out acceptance while training")
        axes = panels.ravel()
        gamma = sum(name.startswith("alpha_") for name in curve.columns)
        for k in range(1, gamma + 1):
            shade = str(0.75 * (k - 1) / max(1, gamma - 1))
            axes[0].plot(curve["anchors"], curve[f"alpha_{k}"], color=shade, label=f"position {k}")
        axes[0].set(xlabel="anchors", ylabel="held-out acceptance probability")
        legend(axes[0])
        axes[1].plot(curve["anchors"], curve["tau_teacher"], marker="o", ms=3)
        axes[1].set(xlabel="anchors", ylabel="accepted length on the text (teacher-forced)")
        for ax in axes:
            ax.grid(color=GRID)
        caption(figure, note)
        save_figure(figure, out, "learning_curve")


def curve_table(curve: list[dict[str, Any]]) -> pd.DataFrame:
    """One row a measurement, alpha by position in columns alpha_1..alpha_gamma."""
    # By name: points that come from a checkpoint have their keys in another order.
    names = ("anchors", "seconds", "tau_teacher", "ce", "tv", "confidence", "blocks")
    rows = []
    for point in curve:
        alphas = {f"alpha_{k}": value for k, value in enumerate(point["alpha"], start=1)}
        rows.append({**{name: point[name] for name in names}, **alphas})
    return pd.DataFrame(rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Text, vocabulary, training, results."""
    given = options().parse_args(argv)
    if (given.prompts is None) != (given.text is None):
        raise InputError("own prompts need a text folder of their own, and only they", field="--prompts, --text")
    for key in ("text.train", "text.calibration"):
        if given.prompts is not None and key in given.overrides:
            raise InputError("does not apply to own prompts", field=key, value=given.overrides[key])
    recipe = load_recipe(given.recipe, given.overrides)
    train(
        recipe,
        given.out or Path("results/train_drafter") / f"{recipe.drafter.kind}-{recipe.drafter.head}",
        jobs=given.jobs,
        device=pick_device(given.device),
        prompts_file=given.prompts,
        text=given.text,
        start=given.start,
        text_only=given.text_only,
        minutes=given.minutes,
        fresh=given.fresh,
    )


def train(
    recipe: RecipeFile,
    out: Path,
    *,
    jobs: int,
    device: str,
    prompts_file: Path | None = None,
    text: Path | None = None,
    start: Path | None = None,
    text_only: bool = False,
    minutes: int | None = None,
    deadline: float | None = None,
    fresh: bool = False,
) -> None:
    """Run a recipe, from wherever it is, to the folder `out`; arguments are the options of those names.

    `deadline` is a moment (`time.monotonic`) at which training ends, whenever it began; `minutes` count from its begin.
    What a deadline cuts has its rate lowered before it (`Trainer.run`) and its confidence head fitted after it.
    """
    # All that can be wrong with a recipe is found before an hour of text is made.
    optimization = recipe.training
    if prompts_file is None:
        recipe.text.check()
    target = load_target(recipe.target, device=device)
    config = recipe.config(target)
    prompts = prompts_of(recipe, prompts_file)
    shards_of(recipe, prompts)
    folders = {
        split: text / split if text is not None else text_folder(target, recipe.text, split) for split in prompts
    }
    for split in prompts:
        make_text(recipe.target, recipe.text, prompts[split], folders[split], split, jobs=jobs, device=device)
    training, reserved, held_out = corpora(recipe, prompts, folders)
    print(
        f"text: {training.answer_tokens:,} tokens to train on, {reserved.answer_tokens:,} for the vocabulary, "
        f"{held_out.answer_tokens:,} held out"
    )
    if text_only:
        return
    torch.set_num_threads(jobs)
    tokens = choose_vocabulary(reserved.answer_counts(target.vocab_size), config.vocab_size, target.eos)
    mass = covered(held_out.answer_counts(target.vocab_size), tokens)
    print(f"draft vocabulary: {tokens.size:,} tokens hold {mass:.2%} of the held-out text (prompt tokens come on top)")
    drafter = new_drafter(config, target, torch.from_numpy(tokens), recipe.training.seed)
    started_from = None if start is None else take_weights(drafter, target, start)
    trainer = Trainer(drafter, target, training, held_out, optimization)
    trainer.started_from = started_from
    checkpoint = out / CHECKPOINT
    if checkpoint.is_file() and not fresh:
        trainer.resume(checkpoint)
        print(f"goes on from {trainer.anchors:,} anchors")
    if minutes is not None:
        deadline = time.monotonic() + 60 * minutes
    left = None if deadline is None else lambda: deadline - time.monotonic()
    trainer.run(checkpoint=checkpoint, left=left)
    notes: dict[str, Any] = {"vocabulary_mass": round(mass, 5)}
    wanted = recipe.confidence
    if wanted.sequences:
        # Last, and not in the checkpoint: whoever goes on from there trains the head as before.
        fitted = fit_confidence(drafter, target, reserved, sequences=wanted.sequences, seed=wanted.seed)
        notes["confidence"] = fitted
        print(
            f"confidence head: fitted on {fitted['drafts']:,} drafts about text that was not trained on, mean cross "
            f"entropy {fitted['nats_before']:.3f} -> {fitted['nats_after']:.3f} nats"
        )
    write_results(trainer, recipe, notes, device, out)


def write_results(trainer: Trainer, recipe: RecipeFile, notes: dict[str, Any], device: str, out: Path) -> None:
    """Drafter file with these notes in it, curve, figure, recipe; and a table of the last measurement."""
    config = trainer.drafter.config
    about = trainer.drafter_file()
    about.training.update(notes)
    about.training["device"] = device_text(device)
    curve = curve_table(trainer.curve)
    with staged_output(out) as stage:
        write_drafter(trainer.drafter, stage / "drafter.safetensors", about, dtype=torch.float16)
        (stage / "recipe.toml").write_text(tomli_w.dumps(recipe.model_dump()), encoding="utf-8")
        if not curve.empty:
            write_csv(curve, stage / "learning_curve.csv")
            head = "" if config.head == "none" else f"{config.head} head, "
            layers = "1 layer" if config.layers == 1 else f"{config.layers} layers"
            what = f"{config.kind} ({head}{layers}, gamma {config.gamma}) on {config.target}"
            where = f"T = {config.temperature:g}; measured on {device_text(device)}, prompts not trained on."
            draw_curve(curve, f"{what}, {where}", stage)
        written(stage)
    if curve.empty:
        print("no measurement yet: the run is still short of its first")
    else:
        print_table(curve.tail(1))
    state = "done" if trainer.done else "not done: the same command goes on"
    if trainer.fell_from is not None:
        state = f"not done: the same command goes on from {trainer.fell_from:,}, before the rate fell for the deadline"
    rate = trainer.anchors / max(trainer.seconds, 1e-9)
    print(f"{trainer.anchors:,} anchors at {rate:.0f}/s, {state}; {out / 'drafter.safetensors'}")


if __name__ == "__main__":
    run_main(main)
