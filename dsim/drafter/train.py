"""Training a drafter on text that the target generated (paper, section 3.3; arXiv 2607.05147).

Everything random is keyed by (seed, step, sequence), so a training that was broken off and resumed makes the same
steps as one that ran through. The learning rate warms up, stays, and falls over the last part of the anchors
(warmup-stable-decay, arXiv 2404.06395): a longer training can go on from a checkpoint of a shorter one's stable part.
So can one that a deadline cuts: its rate falls in the time that is left, on a branch that no checkpoint has.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from dsim.drafter.build import (
    HEAD_WEIGHTS,
    Drafter,
    DrafterFile,
    build_drafter,
    config_from,
    read_tensors,
    write_tensors,
)
from dsim.drafter.corpus import Corpus, Trajectory
from dsim.drafter.drafter import FINAL, DrafterConfig
from dsim.drafter.losses import Losses, LossWeights, draft_losses
from dsim.drafter.target import Target
from dsim.drafter.vocabulary import Vocabulary, vocabulary_of
from dsim.errors import InputError

FORMAT = "dsim-training"
VERSION = 1
#: Share of a run's time that goes by, before a deadline may have the rate fall: until then its speed is measured.
MEASURED = 0.1


@dataclass(frozen=True)
class Recipe:
    """How a drafter is trained.

    Parameters
    ----------
    anchors
        In all; training ends with the step that reaches them.
    sequences, anchors_per_sequence
        Sequences a step, and anchors drawn in each (fewer where the answer is short).
    learning_rate, weight_decay, clip
        AdamW (betas 0.9 and 0.95); gradient norms are cut at `clip`.
    backbone_rate
        Learning rate of all but the sequential and the confidence head, as a share of `learning_rate`: below 1 for a
        new head on a backbone that has been trained before; 0 keeps the backbone as it is.
    warmup, decay
        Shares of the anchors: linear rise from 0, linear fall to 0 (of the learning rate).
    seed
        Of the order of sequences and of the anchors.
    ce, tv, confidence
        Weights of the three losses.
    bf16
        Matrix products in bfloat16 (weights stay float32).
    """

    # Recipe files are checked against this class: unknown keys and other types are errors there.
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    anchors: int = 1_000_000
    sequences: int = 2
    anchors_per_sequence: int = 24
    learning_rate: float = 1.5e-3
    backbone_rate: float = 1.0
    weight_decay: float = 0.01
    clip: float = 1.0
    warmup: float = 0.02
    decay: float = 0.2
    seed: int = 0
    ce: float = 0.1
    tv: float = 0.9
    confidence: float = 1.0
    bf16: bool = False

    def __post_init__(self) -> None:
        """Raise InputError where a value makes no sense."""

        def need(condition: bool, field: str, expected: str) -> None:
            if not condition:
                raise InputError(field=field, value=getattr(self, field), expected=expected)

        for name in ("anchors", "sequences", "anchors_per_sequence"):
            need(getattr(self, name) >= 1, name, "at least 1")
        for name in ("learning_rate", "clip"):
            need(0 < getattr(self, name) < math.inf, name, "a finite number > 0")
        for name in ("weight_decay", "ce", "tv", "confidence"):
            need(0 <= getattr(self, name) < math.inf, name, "a finite number >= 0")
        for name in ("backbone_rate", "warmup", "decay"):
            need(0 <= getattr(self, name) <= 1, name, "a share, 0 to 1")
        need(self.seed >= 0, "seed", "at least 0")
        need(self.warmup + self.decay <= 1, "decay", "warmup and decay together at most 1")


@dataclass(frozen=True)
class Example:
    """One sequence as a drafter is trained on it.

    Attributes
    ----------
    features
        [1, S - 1, taps, H]: of the drafter's layers.
    tokens
        int64[S].
    target
        float32[S - 1, E]: target probabilities of the token after each position, over the vocabulary.
    vocabulary
        Of the sequence.
    first, last
        Anchors lie in first..last - 1: the answer's tokens with gamma more after them.
    """

    features: Tensor
    tokens: Tensor
    target: Tensor
    vocabulary: Vocabulary
    first: int
    last: int


def tap_columns(corpus_taps: tuple[int, ...], wanted: tuple[int, ...], where: str | Path) -> list[int]:
    """Columns of the corpus features that hold the wanted layers (the last column is the final hidden state)."""
    columns = []
    for tap in wanted:
        if tap == FINAL:
            columns.append(len(corpus_taps))
        elif tap in corpus_taps:
            columns.append(corpus_taps.index(tap))
        else:
            expected = f"layers of {list(corpus_taps)}, or {FINAL}"
            raise InputError(
                "the corpus does not hold this layer", file=where, field="taps", value=tap, expected=expected
            )
    return columns


def usable_anchors(sequence: Trajectory, gamma: int) -> range:
    """Positions of anchors: tokens of the answer that gamma more follow."""
    return range(sequence.prompt, sequence.tokens.size - gamma)


def example(
    sequence: Trajectory, target: Target, drafter: Drafter, columns: Sequence[int], temperature: float
) -> Example:
    """Features, probabilities and vocabulary of one sequence, on the target's device."""
    device = target.device
    tokens = torch.from_numpy(sequence.tokens).to(device)
    features = torch.from_numpy(np.array(sequence.features[:-1])).to(device)
    head = drafter.vocabulary_head
    vocabulary = vocabulary_of(head.tokens, target.vocab_size, tokens[: sequence.prompt])
    log_z = torch.from_numpy(sequence.log_z[:-1].copy()).to(device)
    with torch.no_grad():
        probabilities = head(features[:, -1].float(), vocabulary).div_(temperature).sub_(log_z[:, None]).exp_()
    anchors = usable_anchors(sequence, drafter.config.gamma)
    return Example(
        features=features[None, :, list(columns)].float(),
        tokens=tokens,
        target=probabilities,
        vocabulary=vocabulary,
        first=anchors.start,
        last=anchors.stop,
    )


def block_losses(
    drafter: Drafter, item: Example, anchors: Tensor, temperature: float, weights: LossWeights, *, bf16: bool = False
) -> Losses:
    """Losses of the blocks at the given anchors (int64[A]) of one sequence."""
    gamma = drafter.config.gamma
    span = anchors[:, None] + torch.arange(gamma, device=anchors.device)
    following = item.tokens[span + 1]
    with torch.autocast(anchors.device.type, dtype=torch.bfloat16, enabled=bf16):
        context = drafter.prepare(item.features, item.tokens[None])
        logits, confidence = drafter.teacher(context, item.tokens[anchors], anchors, following, item.vocabulary)
    return draft_losses(
        logits.float(),
        confidence.float(),
        item.target[span],
        item.vocabulary.local[following],
        temperature=temperature,
        weights=weights,
    )


def learning_rate(recipe: Recipe, anchors: int) -> float:
    """Rate after this many anchors."""
    share = anchors / recipe.anchors
    rise = min(1.0, share / recipe.warmup) if recipe.warmup else 1.0
    fall = min(1.0, (1 - share) / recipe.decay) if recipe.decay else 1.0
    return recipe.learning_rate * max(0.0, min(rise, fall))


class _Deadline:
    """When the rate of a training that a deadline cuts has to begin to fall.

    Parameters
    ----------
    recipe
        `Recipe.decay` is the share of the anchors reached by the deadline over which the rate falls.
    left
        Seconds until the deadline as the run begins.
    """

    def __init__(self, recipe: Recipe, left: float) -> None:
        self.recipe = recipe
        self.whole = left
        self.first: tuple[int, float] | None = None

    def near(self, anchors: int, left: float) -> bool:
        """Whether the rate falls from here on; asked after every step, with all anchors so far and the seconds left."""
        if self.first is None:
            # What the first step takes says little: a GPU starts up, text comes from the disk.
            self.first = anchors, left
            return False
        taken = self.first[1] - left
        if taken <= 0 or left > (1 - MEASURED) * self.whole:
            return False
        more = (anchors - self.first[0]) / taken * left
        return anchors + more < self.recipe.anchors and more <= self.recipe.decay * (anchors + more)


class Trainer:
    """A training run: the drafter, its optimizer, and how far it is.

    Parameters
    ----------
    drafter
        With the weights to start from.
    target, corpus, held_out
        The frozen model, the text to train on, and text to measure on (other prompts).
    recipe
        What to do.
    max_held_out
        Blocks that an evaluation looks at.

    Raises
    ------
    InputError
        A corpus of another target, at another temperature, without the drafter's layers, or with no usable anchor.
    """

    def __init__(
        self,
        drafter: Drafter,
        target: Target,
        corpus: Corpus,
        held_out: Corpus,
        recipe: Recipe,
        *,
        max_held_out: int = 2048,
    ) -> None:
        config = drafter.config
        self.columns, self.held_out_columns = (_checked_columns(text, config, target) for text in (corpus, held_out))
        self.drafter = drafter
        self.target = target
        self.recipe = recipe
        self.corpus = corpus
        self.usable = [i for i in range(len(corpus)) if usable_anchors(corpus[i], config.gamma)]
        if not self.usable:
            raise InputError("no answer is longer than a block", file=corpus.folder, field="gamma", value=config.gamma)
        self.held_out = held_out
        self.max_held_out = max_held_out
        self.optimizer = torch.optim.AdamW(
            _groups(drafter, recipe), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=recipe.weight_decay
        )
        self.step = 0
        self.anchors = 0
        self.seconds = 0.0
        self.curve: list[dict[str, Any]] = []
        #: What `dsim.drafter.build.take_weights` said of the drafter that this one began as; None: weights as built.
        self.started_from: dict[str, Any] | None = None
        #: Anchors at which the rate began to fall because of a deadline (None: it did not), and what is left of it.
        self.fell_from: int | None = None
        self.fall = 1.0

    @property
    def done(self) -> bool:
        """All anchors were used."""
        return self.anchors >= self.recipe.anchors

    def _sequence(self, number: int) -> Trajectory:
        # The number-th sequence of the endless order: one permutation an epoch.
        epoch, place = divmod(number, len(self.usable))
        order = np.random.Generator(np.random.Philox(key=[self.recipe.seed, epoch])).permutation(len(self.usable))
        return self.corpus[self.usable[order[place]]]

    def train_step(self) -> Losses:
        """One optimizer step; the losses of its last sequence."""
        recipe = self.recipe
        self.drafter.train()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(recipe, self.anchors) * self.fall * group["rate"]
        self.optimizer.zero_grad(set_to_none=True)
        weights = LossWeights(recipe.ce, recipe.tv, recipe.confidence)
        losses = None
        for slot in range(recipe.sequences):
            number = self.step * recipe.sequences + slot
            item = example(
                self._sequence(number), self.target, self.drafter, self.columns, self.drafter.config.temperature
            )
            random = np.random.Generator(np.random.Philox(key=[recipe.seed + 1, number]))
            count = min(recipe.anchors_per_sequence, item.last - item.first)
            chosen = np.sort(random.choice(np.arange(item.first, item.last), size=count, replace=False))
            anchors = torch.from_numpy(chosen).to(self.target.device)
            losses = block_losses(
                self.drafter, item, anchors, self.drafter.config.temperature, weights, bf16=recipe.bf16
            )
            if not torch.isfinite(losses.total):
                raise FloatingPointError(f"the loss is {losses.total.item()} at step {self.step}")
            (losses.total / recipe.sequences).backward()
            self.anchors += count
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), recipe.clip)
        self.optimizer.step()
        self.step += 1
        assert losses is not None
        return losses

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Held-out means, teacher-forced: alpha by position, and the losses."""
        self.drafter.eval()
        totals, count = np.zeros((4, self.drafter.config.gamma)), 0
        weights = LossWeights(self.recipe.ce, self.recipe.tv, self.recipe.confidence)
        survived = np.zeros(self.drafter.config.gamma)
        for index in range(len(self.held_out)):
            sequence = self.held_out[index]
            anchors = usable_anchors(sequence, self.drafter.config.gamma)
            if not anchors:
                continue
            item = example(sequence, self.target, self.drafter, self.held_out_columns, self.drafter.config.temperature)
            chosen = torch.arange(anchors.start, anchors.stop, 4, device=self.target.device)
            losses = block_losses(
                self.drafter, item, chosen, self.drafter.config.temperature, weights, bf16=self.recipe.bf16
            )
            totals[0] += losses.alpha.sum(dim=0).cpu().numpy()
            survived += losses.alpha.cumprod(dim=1).sum(dim=0).cpu().numpy()
            totals[1:, 0] += [float(t) * len(chosen) for t in (losses.ce, losses.tv, losses.confidence)]
            count += len(chosen)
            if count >= self.max_held_out:
                break
        if count == 0:
            raise InputError("no answer is longer than a block", file=self.held_out.folder, field="gamma")
        return {
            "alpha": (totals[0] / count).round(5).tolist(),
            # On the text itself: an estimate that leaves out how drafts steer the text; banks give the true one.
            "tau_teacher": round(1 + float(survived.sum()) / count, 5),
            "ce": round(float(totals[1, 0]) / count, 5),
            "tv": round(float(totals[2, 0]) / count, 5),
            "confidence": round(float(totals[3, 0]) / count, 5),
            "blocks": count,
        }

    def run(
        self,
        *,
        checkpoint: Path | None = None,
        every_s: float = 300.0,
        evaluations: int = 20,
        until: Callable[[], bool] = lambda: False,
        left: Callable[[], float] | None = None,
        progress: bool = True,
    ) -> None:
        """Train to the end, or to a deadline.

        Where the speed so far will not do for all anchors by the deadline, the learning rate falls to 0 with the time
        that is left, over the share of the anchors that the recipe gives to the fall. The checkpoint stays as it was
        before that: who goes on from there makes the steps of a training without a deadline. This trainer is at its
        end then.

        Parameters
        ----------
        checkpoint
            Written every `every_s` seconds and at the end.
        evaluations
            Held-out measurements over the whole training, evenly spaced in anchors.
        until
            Asked after every step; true ends the run early (after a checkpoint).
        left
            Seconds until the deadline (None: there is none), asked after every step; at 0 the run ends.
        progress
            Show a bar with anchors/s and held-out figures.
        """
        spacing = max(1, self.recipe.anchors // evaluations)
        began, saved = time.perf_counter() - self.seconds, time.perf_counter()
        deadline = None if left is None else _Deadline(self.recipe, left())
        falls_for = math.inf
        with tqdm(
            total=self.recipe.anchors, initial=self.anchors, unit="anchor", disable=not progress, desc="training"
        ) as bar:
            while not self.done:
                before = self.anchors
                self.train_step()
                self.seconds = time.perf_counter() - began
                bar.update(self.anchors - before)
                measured = self.done or before // spacing != self.anchors // spacing
                if measured:
                    self._measure(bar)
                seconds_left = math.inf if left is None else left()
                stop = self.done or until() or seconds_left <= 0
                falling = self.fell_from is not None
                if falling:
                    self.fall = max(0.0, seconds_left / falls_for)
                elif deadline is not None and not stop and deadline.near(self.anchors, seconds_left):
                    self.fell_from, falls_for = self.anchors, seconds_left
                due = stop or self.fell_from is not None or time.perf_counter() - saved > every_s
                if checkpoint is not None and not falling and due:
                    self.save(checkpoint)
                    saved = time.perf_counter()
                if stop:
                    if falling and not measured:
                        self._measure(bar)
                    return

    def _measure(self, bar: Any) -> None:
        """A point of the curve, shown by the bar."""
        self.curve.append({"anchors": self.anchors, "seconds": round(self.seconds, 1), **self.evaluate()})
        alpha = " ".join(f"{value:.2f}" for value in self.curve[-1]["alpha"])
        bar.set_postfix_str(f"tau={self.curve[-1]['tau_teacher']:.3f}, alpha={alpha}")

    def save(self, path: Path) -> None:
        """Weights, optimizer state and position, in one safetensors file."""
        tensors = {f"model.{name}": value for name, value in self.drafter.state_dict().items()}
        names = {id(parameter): name for name, parameter in self.drafter.named_parameters()}
        for parameter, state in self.optimizer.state.items():
            for key in ("exp_avg", "exp_avg_sq", "step"):
                tensors[f"optimizer.{key}.{names[id(parameter)]}"] = state[key]
        write_tensors(tensors, path, {"format": FORMAT, "version": VERSION, **self._progress()})

    def _progress(self) -> dict[str, Any]:
        return {
            "config": asdict(self.drafter.config),
            "recipe": asdict(self.recipe),
            "corpus": self.corpus_note(),
            "started_from": self.started_from,
            "step": self.step,
            "anchors": self.anchors,
            "seconds": self.seconds,
            "curve": self.curve,
        }

    def corpus_note(self) -> dict[str, Any]:
        """What it was trained on, for provenance."""
        return {
            "sequences": len(self.corpus),
            "answer_tokens": self.corpus.answer_tokens,
            "temperature": self.corpus.header.temperature,
            "split": self.corpus.header.split,
            "seed": self.corpus.header.seed,
            # Of the first shard; those of the others follow from the same list.
            "prompts": self.corpus.header.prompts,
        }

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint.

        Raises
        ------
        InputError
            It is damaged, or of another drafter, recipe or corpus. A longer training may go on from a shorter
            one, as long as that one had not begun to lower its rate.
        """
        tensors, header = read_tensors(path, FORMAT, VERSION)
        if set(header) != {"format", "version", *self._progress()}:
            expected = f"the keys {', '.join(self._progress())}"
            raise InputError("is no whole checkpoint", file=path, field="metadata", expected=expected)
        config = config_from(header["config"], path)
        for item in fields(DrafterConfig):
            ours, theirs = getattr(self.drafter.config, item.name), getattr(config, item.name)
            if ours != theirs:
                raise InputError("is of another drafter", file=path, field=item.name, value=theirs, expected=str(ours))
        self._check_recipe(header, path)
        if header["started_from"] != self.started_from:
            raise InputError(
                "began with the weights of another drafter",
                file=path,
                field="started_from",
                value=header["started_from"],
                expected=str(self.started_from),
            )
        model = self.drafter.state_dict()
        _check_tensors(tensors, model, "model", path)
        tokens = "vocabulary_head.tokens"
        if not torch.equal(tensors[f"model.{tokens}"], model[tokens].cpu()):
            raise InputError("is of a drafter with another draft vocabulary", file=path, field=f"model.{tokens}")
        moments: dict[Tensor, dict[str, Tensor]] = {}
        for name, parameter in self.drafter.named_parameters():
            shapes = {"exp_avg": parameter, "exp_avg_sq": parameter, "step": torch.empty(())}
            # What has no gradient (parts of a layer that a drafter does not use) has no state.
            if any(f"optimizer.{key}.{name}" in tensors for key in shapes):
                state = {f"{key}.{name}": value for key, value in shapes.items()}
                _check_tensors(tensors, state, "optimizer", path)
                moments[parameter] = {
                    key: tensors[f"optimizer.{key}.{name}"].to("cpu" if key == "step" else parameter.device)
                    for key in shapes
                }
        self.drafter.load_state_dict({name: tensors[f"model.{name}"] for name in model})
        self.optimizer.state.update(moments)
        self.step, self.anchors = header["step"], header["anchors"]
        self.seconds, self.curve = header["seconds"], header["curve"]

    def _check_recipe(self, header: dict[str, Any], path: Path) -> None:
        old, new = header["recipe"], asdict(self.recipe)
        shares = ("anchors", "warmup", "decay")
        for key in sorted(old.keys() | new.keys()):
            # A checkpoint that is older than a key was made by its default.
            before = old.get(key, getattr(Recipe, key, None))
            if key not in shares and before != new.get(key):
                raise InputError(
                    "was trained otherwise", file=path, field=key, value=before, expected=str(new.get(key))
                )
        for key in shares:
            falls = min(one["anchors"] * (1 - one["decay"]) if one["decay"] else math.inf for one in (old, new))
            if old[key] != new[key] and header["anchors"] > falls:
                raise InputError(
                    f"has {header['anchors']} anchors: its learning rate would have begun to fall, and it cannot go "
                    "on otherwise",
                    file=path,
                    field=key,
                    value=old[key],
                    expected=str(new[key]),
                )
        ours = self.corpus_note()
        for key, value in ours.items():
            if header["corpus"].get(key) != value:
                found = header["corpus"].get(key)
                raise InputError(
                    "was trained on another corpus", file=path, field=f"corpus.{key}", value=found, expected=str(value)
                )

    def drafter_file(self) -> DrafterFile:
        """Description for the drafter file."""
        training = {key: value for key, value in self._progress().items() if key != "config"}
        if self.fell_from is not None:
            training["fell_from"] = self.fell_from
        return DrafterFile(self.drafter.config, training, ())


def _groups(drafter: Drafter, recipe: Recipe) -> list[dict[str, Any]]:
    """Parameters by weight decay (none on norms, embeddings of single tokens and biases) and learning rate."""
    groups = []
    for rate, in_heads in ((recipe.backbone_rate, False), (1.0, True)):
        of = [p for name, p in drafter.named_parameters() if name.startswith(HEAD_WEIGHTS) == in_heads]
        decayed, plain = [p for p in of if p.ndim >= 2], [p for p in of if p.ndim < 2]
        for parameters, decay in ((decayed, recipe.weight_decay), (plain, 0.0)):
            groups.append({"params": parameters, "weight_decay": decay, "rate": rate})
    return groups


def _check_tensors(tensors: dict[str, Tensor], like: Mapping[str, Tensor], part: str, path: Path) -> None:
    for name, value in like.items():
        found = tensors.get(f"{part}.{name}")
        if found is None or found.shape != value.shape:
            shape = None if found is None else tuple(found.shape)
            expected = f"shape {tuple(value.shape)}"
            raise InputError(
                "missing or misshapen tensor", file=path, field=f"{part}.{name}", value=shape, expected=expected
            )


def _checked_columns(corpus: Corpus, config: DrafterConfig, target: Target) -> list[int]:
    """Columns of a corpus that hold the drafter's layers; raises InputError where text and drafter do not fit."""
    header = corpus.header
    if header.fingerprint != target.fingerprint:
        raise InputError(
            f"was generated by {header.target}, not by {target.name}",
            file=corpus.folder,
            field="fingerprint",
            value=header.fingerprint,
            expected=target.fingerprint,
        )
    width = corpus[0].features.shape[-1]
    if width != target.hidden_size:
        raise InputError(file=corpus.folder, field="hidden_size", value=width, expected=str(target.hidden_size))
    if header.temperature != config.temperature:
        raise InputError(
            "was sampled at another temperature than the drafter's",
            file=corpus.folder,
            field="temperature",
            value=header.temperature,
            expected=f"{config.temperature:g}",
        )
    return tap_columns(header.taps, config.taps, corpus.folder)


def new_drafter(config: DrafterConfig, target: Target, tokens: Tensor, seed: int) -> Drafter:
    """A drafter ready to be trained: what is not taken from the target is drawn with this seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_drafter(config, target, tokens)
