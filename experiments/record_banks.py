"""Record draft banks: what drafters draft at every position of texts that the target generated.

All drafters given are recorded on the same texts with the same random numbers, so that their banks can be compared
position by position. The texts answer prompts that no drafter was trained on. Temperatures of the confidences
(Sequential Temperature Scaling) are fitted on the calibration split and go into the bank's header. Work is kept in
parts below the output folder: a run that was broken off goes on where it was.

Prompts are the generator's, or your own: --prompts-file FILE.jsonl --text DIR, as train_drafter.py trains on them.

Example: python experiments/record_banks.py --drafter dspark=results/train_drafter/dspark-markov/drafter.safetensors
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from joblib import Parallel, delayed
from tqdm import tqdm

from dsim.drafter.build import DrafterFile, drafter_hash, read_drafter, write_drafter
from dsim.drafter.corpus import Corpus
from dsim.drafter.prompts import Prompt, generate_prompts, prompts_hash, read_prompts, split_prompts
from dsim.drafter.recipe import TextSection, text_folder, text_section
from dsim.drafter.record import Rows, joined, read_part, record_part, recordable
from dsim.drafter.target import Target
from dsim.drafter.targets import device_text, load_target, pick_device
from dsim.drafts import Bank, BankHeader, make_bank, write_bank
from dsim.drafts.calibrate import StsFit, fit_sts, write_temperatures
from dsim.drafts.reliability import visited_rows
from dsim.errors import InputError
from experiments._common import OneLineParser, positive_int, print_table, run_main, write_csv
from experiments._text import make_text

PART = 32
#: Confidence logits are stored between these; beyond them c is 0.0003 from 0 or 1.
LOGIT_LIMIT = 8.0
SPLITS = ("evaluation", "calibration")


def options() -> argparse.ArgumentParser:
    """Command line of the script."""
    cli = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument(
        "--drafter", metavar="NAME=FILE", action="append", required=True, help="a drafter file; may be repeated"
    )
    cli.add_argument("--target", default="smollm2", help="smollm2, tiny or hf:PATH (default: %(default)s)")
    cli.add_argument(
        "--temperature", type=float, default=0.6, metavar="T", help="of text and drafts (default: %(default)s)"
    )
    cli.add_argument("--prompts", type=positive_int, default=1792, metavar="N", help="to record (default: %(default)s)")
    cli.add_argument(
        "--calibration",
        type=positive_int,
        default=384,
        metavar="N",
        help="prompts for the temperatures (default: %(default)s)",
    )
    cli.add_argument(
        "--prompts-file",
        metavar="FILE.jsonl",
        type=Path,
        help="your own prompts, split by a hash of their text, instead of generated ones: at most --prompts and "
        "--calibration of the two splits; needs --text",
    )
    cli.add_argument("--text", metavar="DIR", type=Path, help="folder for the text (default: in the cache)")
    cli.add_argument(
        "--longest-block",
        type=positive_int,
        metavar="N",
        help="leave out answers too short for blocks of N, so that banks of shorter ones have the same texts (default: "
        "the longest block of the drafters given)",
    )
    cli.add_argument("--max-new-tokens", type=positive_int, default=256, metavar="N", help="default: %(default)s")
    cli.add_argument(
        "--draws", type=positive_int, default=1, metavar="N", help="blocks a position (default: %(default)s)"
    )
    cli.add_argument(
        "--answers",
        type=positive_int,
        default=1,
        metavar="N",
        help="texts a prompt, each sampled anew, of the prompts to record (default: %(default)s)",
    )
    cli.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    cli.add_argument(
        "--shard", type=positive_int, default=256, metavar="N", help="prompts a text shard (default: %(default)s)"
    )
    cli.add_argument(
        "--taps",
        type=layer_list,
        metavar="A,B,...",
        help="layers kept with the text (default: those that training keeps for smollm2, none for other targets)",
    )
    cli.add_argument(
        "--out", type=Path, default=Path("results/record_banks"), metavar="DIR", help="default: %(default)s"
    )
    cli.add_argument(
        "--with-drafters",
        action="store_true",
        help="write each drafter too, with its temperatures and in half precision: NAME.safetensors",
    )
    cli.add_argument("--device", choices=("auto", "cpu", "cuda"), default="cpu", help="default: %(default)s")
    cli.add_argument("--jobs", type=positive_int, default=2, metavar="N", help="processes (default: %(default)s)")
    return cli


def layer_list(text: str) -> list[int]:
    """An option's value as layers (an argparse type)."""
    try:
        return [int(layer) for layer in text.split(",")] if text else []
    except ValueError:
        raise argparse.ArgumentTypeError(f"got '{text}', expected layers as in 2,11,20") from None


def named_files(given: Sequence[str]) -> dict[str, Path]:
    """The values of --drafter as names and files."""
    files: dict[str, Path] = {}
    for text in given:
        name, _, file = text.partition("=")
        if not name or not file or "/" in name:
            raise InputError(field="--drafter", value=text, expected="NAME=FILE")
        if name in files:
            raise InputError(field="--drafter", value=text, expected=f"'{name}' once")
        files[name] = Path(file)
    return files


@dataclass(frozen=True)
class Asked:
    """What is to be recorded of a split.

    Attributes
    ----------
    prompts
        In their order.
    folder
        Of their text.
    key
        What names the work besides the drafters and options: nothing where the prompts are generated and answered once.
    answers
        Texts of each prompt: text i answers prompt i modulo their number.
    own
        Prompts from a file.
    """

    prompts: list[Prompt]
    folder: Path
    key: dict[str, str]
    answers: int = 1
    own: bool = False

    def answered(self, answers: int) -> Asked:
        """The same, each prompt answered so often: in a folder of its own, as text i depends on how many there are."""
        if answers == 1:
            return self
        many = f"{answers}answers-to{len(self.prompts)}"
        folder = self.folder.with_name(f"{self.folder.name}-{many}")
        return replace(self, folder=folder, key={**self.key, "/answers": many}, answers=answers)


def text_seed(abouts: Mapping[str, DrafterFile], own: bool) -> Any:
    """Seed of the prompts' split and of the text: with prompts of one's own that of the drafters' training.

    Raises
    ------
    InputError
        Drafters that were trained with several seeds: what was held out from one, another was trained on.
    """
    if not own:
        return TextSection().seed
    seeds = {name: about.training.get("corpus", {}).get("seed", 0) for name, about in abouts.items()}
    if len(set(seeds.values())) > 1:
        raise InputError(
            "the drafters were trained with several seeds of the text, by which own prompts are split",
            field="--drafter",
            value=", ".join(f"{name}: {seed}" for name, seed in seeds.items()),
            expected="drafters of one text.seed",
        )
    return next(iter(seeds.values()))


def asked_for(given: argparse.Namespace, target: Target, text: TextSection) -> dict[str, Asked]:
    """Prompts of the splits and where their text is kept.

    Raises
    ------
    InputError
        A file of prompts that is not one, or has too few for three splits.
    """
    counts = {"evaluation": given.prompts, "calibration": given.calibration}
    answers = {"evaluation": given.answers, "calibration": 1}
    if given.prompts_file is None:
        return {
            split: Asked(
                generate_prompts(count, seed=text.seed, split=split), text_folder(target, text, split), {}
            ).answered(answers[split])
            for split, count in counts.items()
        }
    prompts = read_prompts(given.prompts_file)
    try:
        parts = split_prompts(prompts, seed=text.seed)
    except InputError as error:
        raise InputError(
            error.message, file=given.prompts_file, field="--prompts-file", value=len(prompts), expected="more prompts"
        ) from None
    # No drafter's name has a slash.
    return {
        split: Asked(
            parts[split][:count],
            given.text / split,
            {"/prompts": prompts_hash(parts[split]), "/seed": str(text.seed)},
            own=True,
        ).answered(answers[split])
        for split, count in counts.items()
    }


def check_answers(corpus: Corpus, asked: Asked, target: Target) -> None:
    """Raise InputError where text answers other prompts: a file may have been changed since the text was made."""
    for i, prompt in enumerate(asked.prompts * asked.answers):
        found = corpus[i]
        said = found.tokens[: found.prompt].tolist()
        if (found.domain, said) != (prompt.domain, target.tokenizer.chat(prompt.text)):
            raise InputError(
                "answers other prompts",
                file=asked.folder,
                field="prompts",
                value=f"answer {i}",
                expected="another --text",
            )


def in_time(parts: Iterable[tuple[Path, list[int]]], until: float | None) -> Iterator[tuple[Path, list[int]]]:
    """The first part, and others as long as one more like the last one ends before `until` (`time.monotonic`)."""
    took = 0.0
    for number, part in enumerate(parts):
        began = time.monotonic()
        if number and until is not None and began + took > until:
            return
        yield part
        took = time.monotonic() - began


def _record(
    target_name: str,
    files: dict[str, Path],
    text: Path,
    shards: int,
    parts: list[tuple[Path, list[int]]],
    seed: int,
    draws: int,
    device: str,
    show: bool,
    until: float | None,
) -> None:
    torch.set_num_threads(1)
    target = load_target(target_name, device=device)
    drafters = {name: read_drafter(file, target)[0] for name, file in files.items()}
    corpus = Corpus(text, last=shards)
    for file, indices in in_time(tqdm(parts, unit="part", desc=text.name, disable=not show), until):
        record_part(target, drafters, corpus, indices, file, seed=seed, draws=draws)


def work_folder(given: argparse.Namespace, hashes: dict[str, str], split: str) -> Path:
    """Parts are kept by what they hold: another drafter, seed or text is other work."""
    options = [given.temperature, given.seed, given.draws, given.max_new_tokens, given.device, split]
    key = json.dumps([hashes, *options], sort_keys=True)
    return given.out / "parts" / f"{split}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def gathered(parts: list[tuple[Path, list[int]]], name: str) -> Rows:
    """All parts of one drafter, in the order of the text."""
    rows = []
    for file, indices in parts:
        found, part = read_part(file, name)
        if found.tolist() != indices:
            raise InputError("holds other sequences", file=file, field="indices", value=found.tolist())
        rows.append(part)
    return joined(rows)


def usable_rows(rows: Rows, gamma: int) -> np.ndarray:
    """bool[N]: rows that replay uses."""
    ends = np.repeat(np.cumsum(rows.lengths), rows.lengths)
    return np.asarray(np.arange(rows.accepted.size) < ends - (gamma + 1))


@dataclass(frozen=True)
class Recorded:
    """A split with its text, what of it was recorded, and where."""

    prompts: str  # `prompts_hash`
    asked: int  # how many prompts
    answers: int  # texts of each: text i answers prompt i % asked
    wanted: int  # how many prompts were to be recorded, had there been time
    corpus: Corpus
    indices: list[int]
    parts: list[tuple[Path, list[int]]]


def bank_of(
    about: DrafterFile,
    digest: str,
    rows: Rows,
    split: Recorded,
    sts: StsFit,
    given: argparse.Namespace,
    device: str,
    cut: Mapping[str, Any],
) -> Bank:
    """The bank of one drafter, its provenance in the header; `cut`: by split, how many prompts of how many."""
    config, header = about.config, split.corpus.header
    shape = (
        f"{config.kind} {config.head} {config.layers} layers"
        if config.head != "none"
        else f"{config.kind} {config.layers} layers"
    )
    started_from = about.training.get("started_from")
    notes = {
        "drafter_hash": digest,
        "anchors": about.training.get("anchors"),
        **({"started_from": started_from} if started_from else {}),
        "draft_vocabulary": config.vocab_size,
        "rank": config.rank,
        "temperature": header.temperature,
        "trained_at_temperature": config.temperature,
        "seed": given.seed,
        "draws": given.draws,
        "prompts": split.prompts,
        "prompts_asked": split.asked,
        **({"answers": split.answers} if split.answers > 1 else {}),
        "left_out": sorted(set(range(split.asked * split.answers)) - set(split.indices)),  # too short for replay
        **({"cut_by_deadline": cut} if cut else {}),
        "text_seed": header.seed,
        "target_fingerprint": header.fingerprint,
        "device": device_text(device),
        "torch": torch.__version__,
        "sts_blocks": sts.n,
    }
    domain = [header.domains.index(split.corpus[i].domain) for i in split.indices for _ in range(given.draws)]
    return make_bank(
        BankHeader(
            gamma=config.gamma,
            kind="recorded",
            drafter=shape,
            target=header.target,
            source="dsim",
            license=header.license,
            domains=header.domains,
            logit_low=-LOGIT_LIMIT,
            logit_high=LOGIT_LIMIT,
            temperatures=sts.temperatures,
            notes=json.dumps(notes, sort_keys=True),
        ),
        confidence_logit=rows.confidence_logit,
        alpha=rows.alpha,
        accepted=rows.accepted,
        bounds=np.concatenate([[0], np.cumsum(rows.lengths)]),
        domain=np.array(domain),
    )


def summary(name: str, rows: Rows, gamma: int, sts: StsFit) -> dict[str, Any]:
    """One line of the table; tau and acceptance over the steps that decoding with full verification visits."""
    bounds = np.concatenate([[0], np.cumsum(rows.lengths)])
    usable = rows.lengths - (gamma + 1)
    visited = visited_rows(rows.accepted, bounds, usable)
    accepted, alpha = rows.accepted[visited], rows.alpha[visited]
    reached = [alpha[accepted >= k, k] for k in range(gamma)]
    return {
        "drafter": name,
        "positions": int(usable.sum()),
        "steps": visited.size,
        "tau": 1 + float(accepted.mean()),
        **{f"alpha_{k}": float(values.mean()) if values.size else np.nan for k, values in enumerate(reached, 1)},
        "T_1": sts.temperatures[0],
        f"T_{gamma}": sts.temperatures[-1],
    }


def main(argv: Sequence[str] | None = None, *, deadline: float | None = None) -> None:
    """Text, recording, calibration, banks.

    `deadline` is a moment (`time.monotonic`) by which recording ends: with fewer prompts of both splits where the
    time will not do, but `PART` of each at least. The text is made whole.
    """
    given = options().parse_args(argv)
    if (given.prompts_file is None) != (given.text is None):
        raise InputError("own prompts need a text folder of their own, and only they", field="--prompts-file, --text")
    if deadline is not None and given.answers > 1:
        raise InputError("recording to a deadline has one answer a prompt", field="--answers", value=given.answers)
    files = named_files(given.drafter)
    if given.seed < 0:
        raise InputError(field="--seed", value=given.seed, expected="0 or more")
    device = pick_device(given.device)
    target = load_target(given.target, device=device)
    opened = {name: read_drafter(file, target) for name, file in files.items()}
    hashes = {name: drafter_hash(drafter) for name, (drafter, _) in opened.items()}
    usual = TextSection().taps if given.target == "smollm2" else []
    text = text_section(
        temperature=given.temperature,
        taps=usual if given.taps is None else given.taps,
        max_new_tokens=given.max_new_tokens,
        shard=given.shard,
        seed=text_seed({name: about for name, (_, about) in opened.items()}, given.prompts_file is not None),
    )
    most = max(given.longest_block or 0, *(about.config.gamma for _, about in opened.values()))
    asked = asked_for(given, target, text)
    kept: dict[str, Recorded] = {}
    for i, split in enumerate(SPLITS):
        # Each split has its share of the time that is left.
        share = len(asked[split].prompts) / sum(len(asked[other].prompts) for other in SPLITS[i:])
        now = time.monotonic()
        until = None if deadline is None else now + share * (deadline - now)
        kept[split] = _recorded(given, target, text, split, files, hashes, most, device, asked[split], until)
    cut = {split: [part.asked, part.wanted] for split, part in kept.items() if part.asked < part.wanted}
    for split, (recorded, wanted) in cut.items():
        print(f"the time was up: {recorded:,} of {wanted:,} prompts of the split '{split}' were recorded")
    table, banks = [], {}
    for name, (_, about) in opened.items():
        gamma = about.config.gamma
        rows = gathered(kept["calibration"].parts, name)
        keep = usable_rows(rows, gamma)
        sts = fit_sts(rows.confidence_logit[keep], rows.accepted[keep].astype(np.int64))
        rows = gathered(kept["evaluation"].parts, name)
        banks[name] = (bank_of(about, hashes[name], rows, kept["evaluation"], sts, given, device, cut), sts)
        table.append(summary(name, rows, gamma, sts))
    given.out.mkdir(parents=True, exist_ok=True)
    for name, (bank, sts) in banks.items():
        write_bank(bank, given.out / f"{name}.npz")
        write_temperatures(given.out / f"{name}.temperatures.json", sts.temperatures)
        if given.with_drafters:
            drafter, about = opened[name]
            about = replace(about, temperatures=sts.temperatures)
            write_drafter(drafter, given.out / f"{name}.safetensors", about, dtype=torch.float16)
    write_csv(pd.DataFrame(table), given.out / "banks.csv")
    print_table(pd.DataFrame(table))


def _recorded(
    given: argparse.Namespace,
    target: Target,
    text: TextSection,
    split: str,
    files: dict[str, Path],
    hashes: dict[str, str],
    gamma: int,
    device: str,
    asked: Asked,
    until: float | None,
) -> Recorded:
    """Text of a split and its parts, made where missing, as many as there is time for."""
    prompts, folder = asked.prompts * asked.answers, asked.folder
    count = len(prompts)
    make_text(given.target, text, prompts, folder, split, jobs=given.jobs, device=device)
    shards = -(-count // text.shard)
    corpus = Corpus(folder, last=shards)
    if asked.own:
        check_answers(corpus, asked, target)
    indices = [i for i in recordable(corpus, gamma) if corpus[i].index < count]
    if not indices:
        raise InputError(f"no answer has more than {gamma + 1} tokens", file=folder, field="--prompts", value=count)
    work = work_folder(given, {**hashes, **asked.key}, split)
    # Named by what they hold: with more prompts, the whole ones of before are used again.
    chunks = [indices[i : i + PART] for i in range(0, len(indices), PART)]
    parts = [(work / f"part-{chunk[0]:05d}-{chunk[-1]:05d}.npz", chunk) for chunk in chunks]
    missing = [part for part in parts if not part[0].is_file()]
    jobs = 1 if device == "cuda" else given.jobs
    Parallel(n_jobs=jobs)(
        delayed(_record)(
            given.target, files, folder, shards, missing[i::jobs], given.seed, given.draws, device, i == 0, until
        )
        for i in range(jobs)
        if missing[i::jobs]
    )
    made = list(takewhile(lambda part: part[0].is_file(), parts))
    kept = [index for _, chunk in made for index in chunk]
    if len(made) == len(parts):
        used = len(asked.prompts)
    else:  # all prompts before the first one that there was no time for (one answer each: see `main`)
        used = indices[len(kept)]
    hashed = prompts_hash(asked.prompts[:used])
    return Recorded(hashed, used, asked.answers, len(asked.prompts), corpus, kept, made)


if __name__ == "__main__":
    run_main(main)
