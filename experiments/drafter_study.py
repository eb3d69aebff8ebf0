"""Train drafters of several depths and block sizes on the same text, measure and time them.

Makes the tables that drafter_depth.py and draft_length.py chart: depth.csv and length.csv (accepted length of each
drafter on held-out text, 95 % bootstrap intervals over the texts) and latency.csv (what the sequential head adds to a
draft). Each drafter is a run of train_drafter.py in a folder of its own, which also keeps what was measured of it: a
study that was broken off goes on where it was, with the same command. Studies of different drafters may share --out
and run side by side (--drafters dspark and --drafters dflash, --jobs 1 each); --drafters dspark,dflash then makes the
tables of all, and takes the times, which want a quiet machine.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from tqdm import tqdm

from dsim.drafter.build import Drafter, drafter_hash, read_drafter
from dsim.drafter.corpus import Corpus
from dsim.drafter.prompts import generate_prompts
from dsim.drafter.recipe import RecipeFile, load_recipe, text_folder
from dsim.drafter.record import record_text, recordable
from dsim.drafter.target import Target
from dsim.drafter.targets import device_text, load_target, pick_device
from dsim.drafter.vocabulary import vocabulary_of
from dsim.errors import InputError
from dsim.files import replacing
from experiments import train_drafter
from experiments._banks import ALL, MIN_TEXTS, interval, ratio, resampled_sums, with_all
from experiments._common import OneLineParser, positive_int, print_table, run_main, write_csv
from experiments._text import add_recipe, make_text

RESAMPLES = 2000
#: Version of what is kept of a measurement: raised where a drafter's blocks come out otherwise than before.
MEASURED = 1
HEADS = {"dflash": "none", "dspark": "markov", "dspark-rnn": "rnn"}


@dataclass(frozen=True)
class Variant:
    """One drafter of the study."""

    drafter: str
    layers: int
    gamma: int

    @property
    def kind(self) -> str:
        """Kind in a recipe."""
        return self.drafter.partition("-")[0]

    @property
    def head(self) -> str:
        """Head in a recipe."""
        return HEADS[self.drafter]

    @property
    def folder(self) -> str:
        """Name of its folder."""
        return f"{self.drafter}-{self.layers}x{self.gamma}"


def options() -> argparse.ArgumentParser:
    """Command line of the script."""
    cli = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe(cli, "long")
    cli.add_argument(
        "--anchors", type=positive_int, default=60_000, metavar="N", help="a drafter (default: %(default)s)"
    )
    cli.add_argument(
        "--drafters", default="dspark,dflash", metavar="A,B", help=f"of {', '.join(HEADS)} (default: %(default)s)"
    )
    cli.add_argument(
        "--depths", default="1,2,3", metavar="L,..", help="layers, at the recipe's gamma (default: %(default)s)"
    )
    cli.add_argument(
        "--lengths", default="3,5,7,10", metavar="G,..", help="gammas, at the recipe's layers (default: %(default)s)"
    )
    cli.add_argument(
        "--prompts", type=positive_int, default=256, metavar="N", help="to measure on (default: %(default)s)"
    )
    cli.add_argument(
        "--repeats", type=positive_int, default=50, metavar="N", help="of each timing (default: %(default)s)"
    )
    cli.add_argument(
        "--out", type=Path, default=Path("results/drafter_study"), metavar="DIR", help="default: %(default)s"
    )
    cli.add_argument("--device", choices=("auto", "cpu", "cuda"), default="cpu", help="default: %(default)s")
    cli.add_argument(
        "--jobs", type=positive_int, default=2, metavar="N", help="processes and threads (default: %(default)s)"
    )
    return cli


def _numbers(text: str, option: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1 or len(set(values)) < len(values):
        raise InputError(field=option, value=text, expected="distinct integers >= 1, separated by commas")
    return values


def variants(given: argparse.Namespace, recipe: RecipeFile) -> tuple[list[Variant], list[Variant]]:
    """Drafters of the depth study, and of the length study (they share the recipe's own)."""
    names = given.drafters.split(",")
    for name in names:
        if name not in HEADS or names.count(name) > 1:
            raise InputError(field="--drafters", value=name, expected=f"each once, of {', '.join(HEADS)}")
    depths, lengths = _numbers(given.depths, "--depths"), _numbers(given.lengths, "--lengths")
    return (
        [Variant(name, layers, recipe.drafter.gamma) for name in names for layers in depths],
        [Variant(name, recipe.drafter.layers, gamma) for name in names for gamma in lengths],
    )


def train(variant: Variant, given: argparse.Namespace) -> Path:
    """Train one drafter unless it is there; its file."""
    out = given.out / variant.folder
    settings = {
        # Nothing here asks for confidences, and a bank of these drafters would want them.
        "confidence.sequences": 0,
        **given.overrides,
        "drafter.kind": variant.kind,
        "drafter.head": variant.head,
        "drafter.layers": variant.layers,
        "drafter.gamma": variant.gamma,
        "training.anchors": given.anchors,
    }
    train_drafter.train(load_recipe(given.recipe, settings), out, jobs=given.jobs, device=pick_device(given.device))
    return out / "drafter.safetensors"


@dataclass(frozen=True)
class Measured:
    """One text's blocks.

    Attributes
    ----------
    domain
        Of the text.
    accepted, alpha
        int64[n] and float32[n, gamma] of the blocks that replay would use.
    """

    domain: str
    accepted: npt.NDArray[np.int64]
    alpha: npt.NDArray[np.float32]


def measure(target: Target, drafter: Drafter, corpus: Corpus, count: int, kept: Path) -> list[Measured]:
    """Record a drafter on the corpus's sequences among the first `count` prompts, or read it from the file `kept`."""
    gamma = drafter.config.gamma
    chosen = [corpus[i] for i in recordable(corpus, gamma)]
    chosen = [sequence for sequence in chosen if sequence.index < count]
    texts = hashlib.sha256()
    for sequence in chosen:
        texts.update(np.array([sequence.index, sequence.prompt, *sequence.tokens], dtype=np.int64).tobytes())
    key = f"{MEASURED} {drafter_hash(drafter)} {texts.hexdigest()} {target.device}"
    found = read_measured(kept, key)
    if found is not None:
        return found
    found = []
    for sequence in tqdm(chosen, desc="measuring", unit="text"):
        random = np.random.Generator(np.random.Philox(key=[0, sequence.index]))
        (rows,) = record_text(
            target,
            [drafter],
            sequence.tokens,
            sequence.prompt,
            temperature=corpus.header.temperature,
            random=random,
        )
        usable = int(rows.lengths[0]) - gamma - 1
        found.append(Measured(sequence.domain, rows.accepted[:usable].astype(np.int64), rows.alpha[:usable]))
    with replacing(kept) as part, part.open("wb") as stream:
        np.savez_compressed(
            stream,
            key=np.array(key),
            domain=np.array([text.domain for text in found]),
            blocks=np.array([text.accepted.size for text in found]),
            accepted=np.concatenate([text.accepted for text in found]),
            alpha=np.concatenate([text.alpha for text in found]),
        )
    return found


def read_measured(file: Path, key: str) -> list[Measured] | None:
    """What was measured of this drafter on these texts; None: nothing, or what cannot be read."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            if str(arrays["key"]) != key:
                return None
            ends = np.cumsum(arrays["blocks"])[:-1]
            parts = zip(
                arrays["domain"].tolist(),
                np.split(arrays["accepted"], ends),
                np.split(arrays["alpha"], ends),
                strict=True,
            )
            return [Measured(domain, accepted, alpha) for domain, accepted, alpha in parts]
    except Exception:  # of many kinds, by where the damage is; what cannot be read is made again
        return None


def result_rows(variant: Variant, drafter: Drafter, anchors: int, texts: list[Measured]) -> list[dict[str, Any]]:
    """Rows of a results table: one a domain, and the equally weighted mean of the domains."""
    domains = list(dict.fromkeys(text.domain for text in texts))
    sums = np.array([[text.accepted.sum(), text.accepted.size] for text in texts], dtype=np.float64)
    member = np.array([domains.index(text.domain) for text in texts])
    samples = resampled_sums(sums, member, len(domains), RESAMPLES, (0,))
    taus = with_all(1 + ratio(samples[..., 0], samples[..., 1]))
    enough = np.append(np.bincount(member) >= MIN_TEXTS, np.bincount(member).min() >= MIN_TEXTS)
    low, high = interval(taus, enough)
    rows = []
    for i, name in enumerate([*domains, ALL]):
        wanted = list(range(len(domains))) if name == ALL else [i]
        rows.append(
            {
                "drafter": variant.kind,
                "head": variant.head,
                "layers": variant.layers,
                "gamma": variant.gamma,
                "anchors": anchors,
                "temperature": drafter.config.temperature,
                "domain": name,
                "tau": taus[0, i],
                "tau_low": low[i],
                "tau_high": high[i],
                **_alphas(texts, domains, wanted, variant.gamma),
            }
        )
    return rows


def _alphas(texts: list[Measured], domains: list[str], wanted: Sequence[int], gamma: int) -> dict[str, float]:
    """Mean alpha_k over the blocks whose first k - 1 drafts were accepted; the mean of the wanted domains."""
    columns = {}
    for k in range(gamma):
        means = []
        for d in wanted:
            mine = [text for text in texts if text.domain == domains[d]]
            reached = np.concatenate([text.alpha[text.accepted >= k, k] for text in mine])
            means.append(float(reached.mean()) if reached.size else float("nan"))
        columns[f"alpha_{k + 1}"] = float(np.mean(means))
    return columns


def _medians_ms(runs: Sequence[Callable[[], None]], repeats: int, device: str) -> list[float]:
    """Median times, taken in turns: what slows the machine for a while slows all of them."""
    times: list[list[float]] = [[] for _ in runs]
    for repeat in range(repeats + 3):
        for run, own in zip(runs, times, strict=True):
            began = time.perf_counter()
            run()
            if device == "cuda":
                torch.cuda.synchronize()
            if repeat >= 3:  # the first ones warm up
                own.append((time.perf_counter() - began) * 1e3)
    return [statistics.median(own) for own in times]


@torch.inference_mode()
def latency_row(target: Target, drafter: Drafter, repeats: int, device: str) -> dict[str, Any]:
    """Times of one request: its draft, the sequential head's part, and the target's pass over the block.

    The head's part is the whole less the same without a head; 0 where noise is larger than it.
    """
    config = drafter.config
    tokens = torch.arange(128, device=target.device)[None] % target.vocab_size
    start = torch.zeros(1, dtype=torch.int64, device=target.device)
    taps = tuple(tap for tap in config.taps if tap >= 0)
    features, hidden = target.extend(tokens, target.new_cache(1, 128), start, taps)
    everything = torch.cat([features, hidden[:, :, None]], dim=2)
    columns = [taps.index(tap) if tap >= 0 else len(taps) for tap in config.taps]
    context = drafter.prepare(everything[:, :-1, columns], tokens)
    vocabulary = vocabulary_of(drafter.vocabulary_head.tokens, target.vocab_size)
    anchors, seen = tokens[:, -1], torch.full((1,), 127, device=target.device)

    def draft() -> None:
        drafter.draft(context, anchors, seen, vocabulary, config.temperature, lambda k, p: p.argmax(dim=-1))

    head, confidence = getattr(drafter, "sequential", None), drafter.confidence
    # The confidence head reads less without a sequential one; that is not the latter's cost.
    narrow = type(confidence)(config.shape.hidden_size, 0).to(target.device)

    def headless() -> None:
        drafter.sequential, drafter.confidence = None, narrow
        draft()
        drafter.sequential, drafter.confidence = head, confidence

    cache = target.new_cache(1, 128 + config.gamma)
    target.extend(tokens[:, :-1], cache, start)
    block = tokens[:, -1:].expand(1, config.gamma + 1)

    def verification() -> None:
        _, hidden = target.extend(block, cache, seen)
        target.logits(hidden)

    runs = [draft, verification] if head is None else [draft, verification, headless]
    both, verify, *rest = _medians_ms(runs, repeats, device)
    alone = rest[0] if rest else both
    return {
        "head": config.head,
        "gamma": config.gamma,
        "layers": config.layers,
        "vocab": config.vocab_size,
        "device": device_text(device),
        "draft_ms": both,
        "head_ms": max(0.0, both - alone),
        "verify_ms": verify,
        "repeats": repeats,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Train what is missing, measure all, write the tables."""
    given = options().parse_args(argv)
    recipe = load_recipe(given.recipe, given.overrides)
    device = pick_device(given.device)
    depth, length = variants(given, recipe)
    files = {variant: train(variant, given) for variant in dict.fromkeys([*depth, *length])}
    target = load_target(recipe.target, device=device)
    folder = text_folder(target, recipe.text, "evaluation")
    prompts = generate_prompts(given.prompts, seed=recipe.text.seed, split="evaluation")
    make_text(recipe.target, recipe.text, prompts, folder, "evaluation", jobs=given.jobs, device=device)
    corpus = Corpus(folder, last=-(-given.prompts // recipe.text.shard))
    torch.set_num_threads(given.jobs)
    results, timings = {}, []
    for variant, file in files.items():
        drafter, about = read_drafter(file, target)
        texts = measure(target, drafter, corpus, given.prompts, file.parent / "measured.npz")
        results[variant] = result_rows(variant, drafter, about.training["anchors"], texts)
        if variant in length:
            timings.append(latency_row(target, drafter, given.repeats, device))
        print_table(pd.DataFrame(results[variant][-1:]))
    for name, chosen in (("depth", depth), ("length", length)):
        table = pd.DataFrame([row for variant in chosen for row in results[variant]])
        write_csv(table, given.out / f"{name}.csv")
    write_csv(pd.DataFrame(timings), given.out / "latency.csv")
    print(f"written to {given.out}: depth.csv, length.csv, latency.csv")


if __name__ == "__main__":
    run_main(main)
