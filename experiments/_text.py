"""What the scripts around the real drafter share: text from the target, and ``--set`` for recipes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from joblib import Parallel, delayed

from dsim.drafter.corpus import Corpus, generate_corpus, shard_folder
from dsim.drafter.prompts import Prompt, prompts_hash
from dsim.drafter.recipe import TextSection
from dsim.drafter.targets import device_text, load_target
from dsim.errors import InputError
from dsim.schema import parse_override


class Overrides(argparse.Action):
    """``--set a.b=3`` collected as {"a.b": 3}; the last one of a key counts."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        try:
            key, value = parse_override(values)
        except InputError as error:
            raise argparse.ArgumentError(self, str(error)) from error
        setattr(namespace, self.dest, {**getattr(namespace, self.dest), key: value})


def add_recipe(cli: argparse.ArgumentParser, default: str) -> None:
    """Options ``--recipe`` (a name or file) and ``--set`` (``overrides``: dict of dotted recipe key to value)."""
    cli.add_argument(
        "--recipe", default=default, metavar="NAME", help="gpu, long, quick, or a .toml (default: %(default)s)"
    )
    cli.add_argument(
        "--set",
        metavar="KEY=VALUE",
        dest="overrides",
        action=Overrides,
        default={},
        help="change one key of the recipe (training.anchors=50000); may be repeated",
    )


def _generate(
    name: str,
    text: TextSection,
    prompts: Sequence[Prompt],
    folder: Path,
    split: str,
    part: tuple[int, int],
    device: str,
) -> None:
    torch.set_num_threads(1)
    generate_corpus(
        load_target(name, device=device),
        prompts,
        folder,
        split=split,
        taps=tuple(text.taps),
        temperature=text.temperature,
        seed=text.seed,
        shard_size=text.shard,
        max_new_tokens=text.max_new_tokens,
        rows=text.rows,
        max_prompt_tokens=text.max_prompt_tokens,
        part=part,
        device=device_text(device),
    )


def make_text(
    target: str,
    text: TextSection,
    prompts: Sequence[Prompt],
    folder: Path,
    split: str,
    *,
    jobs: int,
    device: str,
) -> None:
    """Have the target answer the prompts of a split; shards that are there stay, processes share the others.

    Raises
    ------
    InputError
        A shard that is there was made otherwise, or for fewer prompts. (The last one may hold more.)
    """
    shards = range(0, len(prompts), text.shard)
    there = sorted(folder.glob("shard-[0-9]*"))
    for first in shards:
        path = shard_folder(folder, first)
        if path in there:
            _check_shard(path, there.index(path), text, prompts[first : first + text.shard], split)
    if all(shard_folder(folder, first) in there for first in shards):
        return
    # A GPU takes one process; more would each load the model onto it.
    jobs = 1 if device == "cuda" else min(jobs, len(shards))
    Parallel(n_jobs=jobs)(
        delayed(_generate)(target, text, prompts, folder, split, (i, jobs), device) for i in range(jobs)
    )


def _check_shard(path: Path, number: int, text: TextSection, prompts: Sequence[Prompt], split: str) -> None:
    shard = Corpus(path.parent, first=number, last=number + 1)
    header = shard.header
    wanted: dict[str, Any] = {
        "temperature": text.temperature,
        "seed": text.seed,
        "taps": tuple(text.taps),
        "max_new_tokens": text.max_new_tokens,
        "split": split,
    }
    for name, value in wanted.items():
        found = getattr(header, name)
        if found != value:
            expected = f"{value!r}, or another folder"
            raise InputError("the text there was made otherwise", file=path, field=name, value=found, expected=expected)
    if len(shard) < len(prompts):
        expected = f"{len(prompts)}; remove the folder to have it made again"
        raise InputError("holds fewer prompts", file=path, field="prompts", value=len(shard), expected=expected)
    if len(shard) == len(prompts) and header.prompts != prompts_hash(prompts):
        raise InputError("answers other prompts", file=path, field="prompts", expected="another folder")
