"""Training: the same bytes for the same seed, broken off or not; what does not belong together is refused at once."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dsim.drafter.build import (
    Drafter,
    drafter_hash,
    read_drafter,
    read_tensors,
    take_weights,
    write_drafter,
    write_tensors,
)
from dsim.drafter.corpus import Corpus, generate_corpus
from dsim.drafter.drafter import FINAL
from dsim.drafter.heads import MarkovHead, RnnHead
from dsim.drafter.losses import Losses
from dsim.drafter.prompts import Prompt
from dsim.drafter.target import LlamaTarget
from dsim.drafter.tiny import tiny_target
from dsim.drafter.train import (
    FORMAT,
    VERSION,
    Recipe,
    Trainer,
    example,
    learning_rate,
    new_drafter,
    tap_columns,
    usable_anchors,
)
from dsim.drafter.vocabulary import vocabulary_of
from dsim.errors import InputError

HEAT = 0.9
SHORT = Recipe(anchors=100, sequences=2, anchors_per_sequence=8, learning_rate=3e-3)
Start = Callable[..., Trainer]


@pytest.fixture
def start(tiny: LlamaTarget, corpora: tuple[Corpus, Corpus], make_fresh: Any) -> Start:
    """A trainer of a new drafter: start("rnn", anchors=50)."""

    def made(sort: str = "markov", **changes: Any) -> Trainer:
        return Trainer(make_fresh(sort), tiny, *corpora, replace(SHORT, **changes), max_held_out=64)

    return made


@pytest.fixture(scope="module")
def straight(tiny: LlamaTarget, corpora: tuple[Corpus, Corpus], make_fresh: Any, tmp_path_factory: Any) -> Any:
    """A run from start to end and its checkpoint, by sort."""
    made: dict[str, tuple[Trainer, Path]] = {}

    def run(sort: str) -> tuple[Trainer, Path]:
        if sort not in made:
            trainer = Trainer(make_fresh(sort), tiny, *corpora, SHORT, max_held_out=64)
            file = tmp_path_factory.mktemp("straight") / "checkpoint.safetensors"
            trainer.run(checkpoint=file, progress=False, evaluations=2)
            made[sort] = trainer, file
        return made[sort]

    return run


def without_clock(file: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Tensors as bytes, and the header without times."""
    tensors, header = read_tensors(file, FORMAT, VERSION)
    del header["seconds"]
    for point in header["curve"]:
        del point["seconds"]
    return {name: value.numpy().tobytes() for name, value in tensors.items()}, header


def after(trainer: Trainer, steps: int) -> Callable[[], bool]:
    return lambda: trainer.step >= steps


# -- the same bytes ---------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_bytes(start: Start, straight: Any, tmp_path: Path) -> None:
    _, file = straight("markov")
    again = start()
    again.run(checkpoint=tmp_path / "again.safetensors", progress=False, evaluations=2)
    assert without_clock(tmp_path / "again.safetensors") == without_clock(file)


@pytest.mark.parametrize("sort", ["markov", "eagle3"])
@pytest.mark.parametrize("steps", [1, 4])
def test_resumed_is_straight_through(sort: str, steps: int, start: Start, straight: Any, tmp_path: Path) -> None:
    _, file = straight(sort)
    broken, part = start(sort), tmp_path / "part.safetensors"
    broken.run(checkpoint=part, progress=False, evaluations=2, until=after(broken, steps))
    assert broken.step == steps
    assert not broken.done
    resumed = start(sort)
    resumed.resume(part)
    assert (resumed.step, resumed.anchors, resumed.curve) == (broken.step, broken.anchors, broken.curve)
    assert resumed.seconds == broken.seconds > 0
    resumed.run(checkpoint=part, progress=False, evaluations=2)
    assert without_clock(part) == without_clock(file)


def test_gone_on_with_after_a_deadline_is_straight_through(start: Start, straight: Any, tmp_path: Path) -> None:
    _, file = straight("markov")
    cut, part = start(), tmp_path / "part.safetensors"
    cut.run(checkpoint=part, every_s=0.0, progress=False, evaluations=2, left=lambda: 6.0 - cut.step)
    assert cut.step == 6
    assert cut.fell_from is not None
    assert cut.fell_from < cut.anchors < 100
    again = start()
    again.resume(part)
    # From before the rate fell.
    assert again.anchors == cut.fell_from
    again.run(checkpoint=part, progress=False, evaluations=2)
    assert without_clock(part) == without_clock(file)


def test_a_deadline_that_is_far_changes_nothing(start: Start, straight: Any, tmp_path: Path) -> None:
    trainer, file = start(), tmp_path / "c.safetensors"
    trainer.run(checkpoint=file, progress=False, evaluations=2, left=lambda: 9.0 - trainer.step)
    assert trainer.done
    assert trainer.fell_from is None
    assert "fell_from" not in trainer.drafter_file().training
    assert without_clock(file) == without_clock(straight("markov")[1])


def test_another_seed_gives_other_weights(start: Start, straight: Any) -> None:
    other = start(seed=1)
    other.run(progress=False, evaluations=2)
    assert drafter_hash(other.drafter) != drafter_hash(straight("markov")[0].drafter)


def test_it_ends_with_the_step_that_reaches_the_anchors(straight: Any) -> None:
    trainer, _ = straight("markov")
    assert trainer.done
    # 16 a step, unless an answer is short.
    assert 100 <= trainer.anchors < 116
    assert trainer.step >= 7


def test_the_curve_is_measured_evenly_and_at_the_end(straight: Any, start: Start) -> None:
    trainer, _ = straight("markov")
    anchors = [point["anchors"] for point in trainer.curve]
    assert len(anchors) == 2
    assert 50 <= anchors[0] < 66
    assert anchors[1] == trainer.anchors
    point = trainer.curve[0]
    assert set(point) == {"anchors", "seconds", "alpha", "tau_teacher", "ce", "tv", "confidence", "blocks"}
    assert len(point["alpha"]) == 4
    assert point["blocks"] >= 64
    assert point["tv"] == pytest.approx(
        sum(2 * (1 - a) * math.exp(-k / 4) for k, a in enumerate(point["alpha"])), abs=1e-3
    )
    assert json.loads(json.dumps(trainer.curve)) == trainer.curve


def test_measuring_changes_nothing(start: Start, straight: Any) -> None:
    watched = start()
    watched.run(progress=False, evaluations=50)
    assert len(watched.curve) > 2
    assert drafter_hash(watched.drafter) == drafter_hash(straight("markov")[0].drafter)


def test_checkpoints_on_the_way(start: Start, tmp_path: Path) -> None:
    trainer, file, steps = start(), tmp_path / "c.safetensors", []

    def look() -> bool:
        if file.is_file():
            steps.append(read_tensors(file, FORMAT, VERSION)[1]["step"])
        return False

    trainer.run(checkpoint=file, every_s=0.0, progress=False, evaluations=1, until=look)
    # Asked after every step but the last, and before its checkpoint.
    assert steps == list(range(1, trainer.step - 1))


# -- what it learns ---------------------------------------------------------------------------------------


def test_the_loss_falls_and_the_held_out_acceptance_rises(trainer: Trainer) -> None:
    first, last = trainer.curve[0], trainer.curve[-1]
    for name in ("ce", "tv", "confidence"):
        assert last[name] < first[name], name
    assert all(b > a + 0.1 for a, b in zip(first["alpha"], last["alpha"], strict=True))
    assert last["tau_teacher"] > first["tau_teacher"] + 0.5


def test_confidences_say_something(trainer: Trainer, corpora: tuple[Corpus, Corpus], tiny: LlamaTarget) -> None:
    # Constant confidences would have the binary entropy of the mean acceptance.
    point = trainer.curve[-1]
    weights = np.exp(-np.arange(4) / 4)
    alpha = np.array(point["alpha"])
    constant = float(-(weights * (alpha * np.log(alpha) + (1 - alpha) * np.log(1 - alpha))).sum())
    assert point["confidence"] < constant


@pytest.mark.parametrize("sort", ["rnn", "gated", "dflash", "eagle3", "mtp"])
def test_every_sort_learns(sort: str, start: Start) -> None:
    trainer = start(sort, anchors=320, anchors_per_sequence=24, warmup=0.0)
    before = trainer.evaluate()
    trainer.run(progress=False, evaluations=1)
    after_it = trainer.curve[-1]
    for name in ("ce", "tv"):
        assert after_it[name] < before[name]
    assert after_it["tau_teacher"] > before["tau_teacher"]


def test_training_in_bfloat16(start: Start) -> None:
    trainer = start(bf16=True, anchors=200, warmup=0.0)
    before = trainer.evaluate()
    trainer.run(progress=False, evaluations=1)
    assert all(p.dtype == torch.float32 for p in trainer.drafter.parameters())
    assert trainer.curve[-1]["tv"] < before["tv"]


def test_a_loss_that_is_not_finite_stops_it(start: Start, tmp_path: Path) -> None:
    trainer = start()
    with torch.no_grad():
        trainer.drafter.norm.weight[0] = float("nan")
    with pytest.raises(FloatingPointError, match="the loss is nan at step 0"):
        trainer.run(checkpoint=tmp_path / "c.safetensors", progress=False)
    assert not list(tmp_path.iterdir())


# -- learning rate ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("anchors", "share"),
    [(0, 0.0), (50, 0.5), (100, 1.0), (500, 1.0), (800, 1.0), (900, 0.5), (950, 0.25), (1000, 0.0), (1100, 0.0)],
)
def test_the_rate_rises_stays_and_falls(anchors: int, share: float) -> None:
    recipe = Recipe(anchors=1000, learning_rate=2e-3, warmup=0.1, decay=0.2)
    assert learning_rate(recipe, anchors) == pytest.approx(share * 2e-3)


def test_the_rate_without_warmup_or_decay() -> None:
    recipe = Recipe(anchors=1000, learning_rate=2e-3, warmup=0.0, decay=0.0)
    assert [learning_rate(recipe, n) for n in (0, 500, 1000)] == [2e-3] * 3
    whole = Recipe(anchors=1000, learning_rate=2e-3, warmup=0.5, decay=0.5)
    assert [learning_rate(whole, n) for n in (0, 250, 500, 750, 1000)] == pytest.approx([0, 1e-3, 2e-3, 1e-3, 0])


def test_the_optimizer_gets_the_rate_of_the_step(start: Start) -> None:
    trainer = start(warmup=0.5, decay=0.5)
    for _ in range(3):
        expected = learning_rate(trainer.recipe, trainer.anchors)
        trainer.train_step()
        assert [group["lr"] for group in trainer.optimizer.param_groups] == [expected] * 4


def rates_until(trainer: Trainer, steps: int, *, first: float = 1.0) -> list[float]:
    """Learning rates of a run with time for `steps`, a second each (but the first one: `first` seconds)."""
    begin, rates = trainer.step, []

    def left() -> float:
        done = trainer.step - begin
        if done:
            rates.append(trainer.optimizer.param_groups[0]["lr"])
        return steps + first - 1 - done - (first - 1 if done else 0)

    trainer.run(progress=False, evaluations=1, left=left)
    return rates


def test_the_rate_falls_in_time_for_a_deadline(start: Start) -> None:
    trainer = start(anchors=100_000, warmup=0.0, decay=0.25)
    rates = np.array(rates_until(trainer, 20)) / trainer.recipe.learning_rate
    # A quarter of what is reached by then: 5 of 20 steps, and one less where short answers make a step small.
    assert len(rates) == 20
    falls = int((rates < 1).sum()) + 1
    assert falls in (4, 5, 6)
    np.testing.assert_allclose(rates[: 20 - falls], 1)
    np.testing.assert_allclose(rates[20 - falls :], np.arange(falls, 0, -1) / falls)
    assert trainer.curve[-1]["anchors"] == trainer.anchors


@pytest.mark.parametrize(
    ("steps", "falls"),
    [
        # A quarter of all seventy; the first step's eight seconds say nothing about the speed of the others.
        (30, (16, 17, 18, 19)),
        # Less than a quarter of all fifty: all of the ten but those that measure the speed.
        (10, (8,)),
    ],
)
def test_the_rate_falls_in_time_for_the_deadline_of_a_later_run(
    steps: int, falls: tuple[int, ...], start: Start, tmp_path: Path
) -> None:
    long, file = start(anchors=100_000, warmup=0.0, decay=0.25), tmp_path / "c.safetensors"
    long.run(checkpoint=file, progress=False, evaluations=1, until=after(long, 40))
    again = start(anchors=100_000, warmup=0.0, decay=0.25)
    again.resume(file)
    rates = np.array(rates_until(again, steps, first=8.0)) / again.recipe.learning_rate
    found = int((rates < 1).sum()) + 1
    assert found in falls
    np.testing.assert_allclose(rates, [1.0] * (steps - found) + list(np.arange(found, 0, -1) / found))


def test_without_a_fall_in_the_recipe_a_deadline_makes_none(start: Start) -> None:
    trainer = start(anchors=100_000, warmup=0.0, decay=0.0)
    assert rates_until(trainer, 5) == [trainer.recipe.learning_rate] * 5
    assert trainer.fell_from is None


def test_norms_biases_and_the_mask_do_not_decay(start: Start) -> None:
    trainer = start(weight_decay=0.1)
    dimensions = {
        decay: {
            p.ndim
            for group in trainer.optimizer.param_groups
            if group["weight_decay"] == decay
            for p in group["params"]
        }
        for decay in (0.0, 0.1)
    }
    assert dimensions == {0.0: {1}, 0.1: {2}}
    held = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    assert sorted(map(id, held)) == sorted(map(id, trainer.drafter.parameters()))


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_a_backbone_has_a_rate_of_its_own(start: Start, rate: float) -> None:
    moved = {}
    for share in (rate, 1.0):
        trainer = start(backbone_rate=share, warmup=0.0)
        before = {name: value.clone() for name, value in trainer.drafter.named_parameters()}
        trainer.train_step()
        moved[share] = {name: (value - before[name]).norm() for name, value in trainer.drafter.named_parameters()}
    heads = [name for name in moved[1.0] if name.startswith(("sequential.", "confidence."))]
    assert 0 < len(heads) < len(moved[1.0])
    for name, distance in moved[1.0].items():
        # One step of AdamW goes as far as its rate.
        torch.testing.assert_close(moved[rate][name], distance * (1 if name in heads else rate), rtol=1e-3, atol=1e-6)


def test_gradients_are_cut(start: Start) -> None:
    trainer = start(clip=1e-3)
    trainer.train_step()
    norm = torch.stack([p.grad.norm() for p in trainer.drafter.parameters() if p.grad is not None]).norm()
    assert norm.item() == pytest.approx(1e-3, rel=1e-3)


# -- what a step is made of -------------------------------------------------------------------------------


def test_an_example_holds_what_the_target_said(
    tiny: LlamaTarget, corpora: tuple[Corpus, Corpus], make_fresh: Any
) -> None:
    drafter, corpus = make_fresh("markov"), corpora[0]
    sequence = corpus[1]
    item = example(sequence, tiny, drafter, [0, 3], HEAT)
    text = torch.from_numpy(sequence.tokens)[None]
    features, hidden = tiny.extend(text, tiny.new_cache(1, text.shape[1]), torch.zeros(1, dtype=torch.int64), (0,))
    law = torch.softmax(tiny.logits(hidden[0, :-1]) / HEAT, dim=-1)
    torch.testing.assert_close(item.target, law[:, item.vocabulary.tokens], rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(item.features[0, :, 0], features[0, :-1, 0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(item.features[0, :, 1], hidden[0, :-1], rtol=1e-3, atol=1e-3)
    # The prompt has the token 1 (start of an answer) and others; 10 and 11 are outside unless it has them.
    assert set(item.vocabulary.tokens.tolist()) == set(range(10)) | set(sequence.tokens[: sequence.prompt].tolist())
    assert (item.first, item.last) == (sequence.prompt, sequence.tokens.size - 4)


def test_anchors_are_answer_tokens_with_a_block_after_them(corpora: tuple[Corpus, Corpus]) -> None:
    sequence = corpora[0][1]
    anchors = usable_anchors(sequence, 4)
    assert anchors[0] == sequence.prompt
    assert anchors[-1] + 4 == sequence.tokens.size - 1
    short = replace(sequence, tokens=sequence.tokens[: sequence.prompt + 4])
    assert not usable_anchors(short, 4)


def test_every_sequence_once_an_epoch(start: Start) -> None:
    trainer = start()
    count = len(trainer.usable)
    assert 30 < count < len(trainer.corpus)  # some answers are shorter than a block
    epochs = [[trainer._sequence(n).index for n in range(e * count, (e + 1) * count)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(trainer.corpus[i].index for i in trainer.usable)
    assert epochs[0] != epochs[1]


def test_steps_go_on_through_the_sequences(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, numbers = start(sequences=3), []
    real = trainer._sequence

    def spy(number: int) -> Any:
        numbers.append(number)
        return real(number)

    monkeypatch.setattr(trainer, "_sequence", spy)
    for _ in range(3):
        trainer.train_step()
    assert numbers == list(range(9))


def test_a_step_is_the_mean_over_its_sequences(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    import dsim.drafter.train as module

    found: list[tuple[int, Losses]] = []
    real = module.block_losses

    def spy(drafter: Drafter, item: Any, anchors: Any, *args: Any, **options: Any) -> Losses:
        losses = real(drafter, item, anchors, *args, **options)
        found.append((len(set(anchors.tolist())), losses))
        assert item.first <= min(anchors) <= max(anchors) < item.last
        return losses

    monkeypatch.setattr(module, "block_losses", spy)
    trainer = start(sequences=3, clip=1e9)
    trainer.train_step()
    assert trainer.anchors == sum(count for count, _ in found)
    grad = trainer.drafter.confidence.linear.bias.grad.clone()
    expected = sum(
        torch.sigmoid(torch.zeros(())) - (losses.alpha * torch.exp(-torch.arange(4) / 4)).sum(1).mean() / w
        for _, losses in found
        for w in [torch.exp(-torch.arange(4) / 4).sum()]
    )
    # At the start all confidences are 1/2, so the bias's gradient is w (1/2 - alpha).
    torch.testing.assert_close(grad[0], expected * torch.exp(-torch.arange(4) / 4).sum() / 3)


# -- resuming what it is not ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"sequences": 3}, "sequences"),
        ({"anchors_per_sequence": 9}, "anchors_per_sequence"),
        ({"learning_rate": 1e-3}, "learning_rate"),
        ({"backbone_rate": 0.5}, "backbone_rate"),
        ({"weight_decay": 0.0}, "weight_decay"),
        ({"clip": 2.0}, "clip"),
        ({"seed": 1}, "seed"),
        ({"ce": 0.0}, "ce"),
        ({"tv": 1.0}, "tv"),
        ({"confidence": 0.0}, "confidence"),
        ({"bf16": True}, "bf16"),
    ],
)
def test_another_recipe(changes: dict[str, Any], field: str, start: Start, straight: Any) -> None:
    _, file = straight("markov")
    trainer = start(**changes)
    with pytest.raises(InputError, match=f"{file}, field '{field}': was trained otherwise"):
        trainer.resume(file)
    assert trainer.step == 0


def test_a_checkpoint_from_before_a_key_of_the_recipe(start: Start, straight: Any, tmp_path: Path) -> None:
    _, file = straight("markov")
    tensors, header = read_tensors(file, FORMAT, VERSION)
    del header["recipe"]["backbone_rate"]
    old = tmp_path / "old.safetensors"
    write_tensors(tensors, old, header)
    trainer = start()
    trainer.resume(old)
    assert trainer.step > 0
    with pytest.raises(InputError, match=r"field 'backbone_rate': was trained otherwise, got 1\.0, expected 0\.5"):
        start(backbone_rate=0.5).resume(old)


def test_another_drafter(start: Start, straight: Any) -> None:
    with pytest.raises(InputError, match=r"field 'taps': is of another drafter, got \(1, -1\), expected"):
        start().resume(straight("rnn")[1])
    with pytest.raises(InputError, match="field 'kind': is of another drafter, got 'eagle3', expected dspark"):
        start().resume(straight("eagle3")[1])


def test_another_draft_vocabulary(
    tiny: LlamaTarget, corpora: tuple[Corpus, Corpus], make_fresh: Any, straight: Any
) -> None:
    config = make_fresh("markov").config
    other = new_drafter(config, tiny, torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 11]), 0)
    trainer = Trainer(other, tiny, *corpora, SHORT)
    with pytest.raises(InputError, match="is of a drafter with another draft vocabulary"):
        trainer.resume(straight("markov")[1])


def test_another_corpus(
    tiny: LlamaTarget, corpora: tuple[Corpus, Corpus], make_fresh: Any, straight: Any, tmp_path: Path
) -> None:
    _, file = straight("markov")
    for corpus, field in (
        (Corpus(corpora[0].folder, last=2), "corpus.sequences"),
        (corpora[1], "corpus.sequences"),
        (Corpus(corpora[0].folder, first=1), "corpus.sequences"),
    ):
        trainer = Trainer(make_fresh("markov"), tiny, corpus, corpora[1], SHORT)
        with pytest.raises(InputError, match=f"field '{field}': was trained on another corpus"):
            trainer.resume(file)
    # The same sizes, other prompts.
    trainer = Trainer(make_fresh("markov"), tiny, *corpora, SHORT)
    trainer.corpus.header = replace(corpora[0].header, prompts="0123")
    try:
        with pytest.raises(InputError, match=r"field 'corpus\.prompts': was trained on another corpus"):
            trainer.resume(file)
    finally:
        trainer.corpus.header = replace(
            corpora[0].header, prompts=read_tensors(file, FORMAT, 1)[1]["corpus"]["prompts"]
        )


def test_a_longer_training_goes_on_from_the_stable_phase(start: Start, tmp_path: Path) -> None:
    part = tmp_path / "part.safetensors"
    short = start(anchors=200, warmup=0.0)
    short.run(checkpoint=part, progress=False, evaluations=1, until=after(short, 4))
    assert short.anchors <= 160
    longer = start(anchors=300, warmup=0.0)
    longer.resume(part)
    longer.run(progress=False, evaluations=1)
    assert longer.anchors >= 300
    # It made the steps that it would have made from the start: in the stable phase the rates are the same.
    whole = start(anchors=300, warmup=0.0)
    whole.run(progress=False, evaluations=1)
    assert drafter_hash(longer.drafter) == drafter_hash(whole.drafter)


def test_a_training_whose_rate_has_fallen_does_not_go_on_longer(start: Start, straight: Any) -> None:
    _, file = straight("markov")
    with pytest.raises(InputError, match=r"field 'anchors': .* would have begun to fall, .*got 100, expected 300"):
        start(anchors=300).resume(file)
    with pytest.raises(InputError, match=r"field 'decay': .* would have begun to fall, .*got 0.2, expected 0.5"):
        start(decay=0.5).resume(file)
    start().resume(file)


def test_a_shorter_training_whose_rate_would_have_fallen(start: Start, tmp_path: Path) -> None:
    part = tmp_path / "part.safetensors"
    trainer = start(anchors=200)
    trainer.run(checkpoint=part, progress=False, evaluations=1, until=lambda: trainer.anchors > 90)
    with pytest.raises(InputError, match=r"field 'anchors': .* would have begun to fall, .*got 200, expected 100"):
        start(anchors=100).resume(part)


# -- starting from another drafter ------------------------------------------------------------------------


def kept(trainer: Trainer, tmp_path: Path) -> Path:
    """The drafter file of a training."""
    file = tmp_path / "other.safetensors"
    write_drafter(trainer.drafter, file, trainer.drafter_file())
    return file


def test_starting_from_a_drafter_with_the_same_head_takes_everything(
    tiny: LlamaTarget, make_fresh: Any, straight: Any, tmp_path: Path
) -> None:
    trained, _ = straight("markov")
    new = make_fresh("markov")
    note = take_weights(new, tiny, kept(trained, tmp_path))
    assert drafter_hash(new) == drafter_hash(trained.drafter) == note["hash"]
    assert (note["kind"], note["head"], note["anchors"]) == ("dspark", "markov", trained.anchors)


def test_starting_from_a_drafter_with_another_head_takes_the_backbone(
    tiny: LlamaTarget, make_fresh: Any, straight: Any, tmp_path: Path
) -> None:
    trained, _ = straight("rnn")
    file = kept(trained, tmp_path)
    taps = trained.drafter.config.taps
    new, untouched = make_fresh("markov", taps=taps), make_fresh("markov", taps=taps).state_dict()
    take_weights(new, tiny, file)
    theirs = trained.drafter.state_dict()
    changed = {name for name, value in new.state_dict().items() if not torch.equal(value, untouched[name])}
    assert "layers.0.q.weight" in changed
    for name, value in new.state_dict().items():
        own = name.startswith(("sequential.", "confidence."))
        assert torch.equal(value, untouched[name] if own else theirs[name]), name


def test_an_rnn_head_begins_as_the_markov_head_it_starts_from(
    tiny: LlamaTarget, corpora: tuple[Corpus, Corpus], make_fresh: Any, straight: Any, tmp_path: Path
) -> None:
    trained, _ = straight("markov")
    taps = trained.drafter.config.taps
    fresh, grown = (Trainer(make_fresh("rnn", taps=taps), tiny, *corpora, SHORT, max_held_out=64) for _ in range(2))
    take_weights(grown.drafter, tiny, kept(trained, tmp_path))
    start, end, before = trained.evaluate(), grown.evaluate(), fresh.evaluate()
    for name in ("ce", "tv", "confidence"):
        assert abs(end[name] - start[name]) < 0.02 * abs(before[name] - start[name]), name
    assert start["tau_teacher"] > before["tau_teacher"]
    # The state, which reaches no output yet, learns to.
    columns = slice(0, grown.drafter.config.rank)
    rows = slice(2 * grown.drafter.config.rank, None)
    assert not grown.drafter.sequential.joint.weight[rows, columns].any()
    for _ in range(2):  # the first has a rate of 0
        grown.train_step()
    assert grown.drafter.sequential.joint.weight[rows, columns].all()


@pytest.mark.parametrize("largest", [0.2, 2.7, 20.0])
def test_an_rnn_heads_first_biases(largest: float) -> None:
    torch.manual_seed(0)
    vocabulary = vocabulary_of(torch.arange(50), 64)
    markov, rnn = MarkovHead(50, 16, 8), RnnHead(50, 16, 8)
    with torch.no_grad():
        markov.embedding.weight *= largest / markov.embedding.weight.abs().max()
        markov.out.weight.normal_()
    rnn.begin_as(markov)
    embedded = markov.embed(torch.randint(0, 50, (40, 3)), vocabulary)
    hidden = torch.randn(40, 3, 8)
    wanted, found = (head.biases(embedded, hidden, vocabulary) for head in (markov, rnn))
    assert (found - wanted).norm() < 0.02 * wanted.norm()


def test_starting_from_what_does_not_fit(tiny: LlamaTarget, make_fresh: Any, straight: Any, tmp_path: Path) -> None:
    file = kept(straight("markov")[0], tmp_path)
    with pytest.raises(InputError, match=r"field 'gamma': does not fit the drafter, got 4, expected 2"):
        take_weights(make_fresh("markov", gamma=2), tiny, file)
    with pytest.raises(InputError, match="field 'kind': does not fit the drafter, got 'dspark', expected eagle3"):
        take_weights(make_fresh("eagle3"), tiny, file)
    config = make_fresh("markov").config
    other = new_drafter(config, tiny, torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 11]), 0)
    with pytest.raises(InputError, match="has another draft vocabulary"):
        take_weights(other, tiny, file)


def test_a_checkpoint_remembers_what_it_started_from(
    tiny: LlamaTarget, start: Start, straight: Any, tmp_path: Path
) -> None:
    file, part = kept(straight("markov")[0], tmp_path), tmp_path / "part.safetensors"
    trainer = start()
    trainer.started_from = take_weights(trainer.drafter, tiny, file)
    trainer.run(checkpoint=part, progress=False, evaluations=1, until=after(trainer, 2))
    assert trainer.drafter_file().training["started_from"]["anchors"] == straight("markov")[0].anchors
    again = start()
    with pytest.raises(InputError, match="field 'started_from': began with the weights of another drafter"):
        again.resume(part)
    again.started_from = take_weights(again.drafter, tiny, file)
    again.resume(part)
    assert again.step == trainer.step


# -- damaged checkpoints ----------------------------------------------------------------------------------


def test_truncated_flipped_and_foreign_checkpoints(
    start: Start, straight: Any, trained: Drafter, tmp_path: Path
) -> None:
    _, file = straight("markov")
    raw, bad = file.read_bytes(), tmp_path / "bad.safetensors"
    trainer = start()
    flipped = raw[:-1] + bytes([raw[-1] ^ 1])
    for content, message in (
        (raw[:-5], "is no safetensors file, or a damaged one"),
        (b"", "is no safetensors file, or a damaged one"),
        (flipped, "field 'sha256': was changed after it was written"),
    ):
        bad.write_bytes(content)
        with pytest.raises(InputError, match=message):
            trainer.resume(bad)
    write_drafter(trained, bad, trainer.drafter_file())
    with pytest.raises(InputError, match="field 'format': got 'dsim-drafter', expected 'dsim-training'"):
        trainer.resume(bad)
    with pytest.raises(InputError, match="is not there"):
        trainer.resume(tmp_path / "absent.safetensors")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.mask", r"field 'model.mask': missing or misshapen tensor, expected shape \(32,\)"),
        ("optimizer.exp_avg.mask", r"field 'optimizer.exp_avg.mask': missing or misshapen tensor, expected"),
        ("optimizer.step.mask", r"field 'optimizer.step.mask': missing or misshapen tensor, expected shape \(\)"),
    ],
)
def test_a_checkpoint_that_lacks_something(
    name: str, message: str, start: Start, straight: Any, tmp_path: Path
) -> None:
    tensors, header = read_tensors(straight("markov")[1], FORMAT, VERSION)
    trainer, bad = start(), tmp_path / "bad.safetensors"
    before = drafter_hash(trainer.drafter)
    write_tensors({key: value for key, value in tensors.items() if key != name}, bad, header)
    with pytest.raises(InputError, match=message):
        trainer.resume(bad)
    write_tensors({**tensors, name: torch.zeros(2, 3)}, bad, header)
    with pytest.raises(InputError, match=r"missing or misshapen tensor, got \(2, 3\)"):
        trainer.resume(bad)
    write_tensors(tensors, bad, {key: value for key, value in header.items() if key != "step"})
    with pytest.raises(InputError, match="field 'metadata': is no whole checkpoint, expected the keys config, recipe"):
        trainer.resume(bad)
    # Nothing was taken over.
    assert drafter_hash(trainer.drafter) == before
    assert not trainer.optimizer.state


# -- before the first step --------------------------------------------------------------------------------


def trained_on(
    tmp_path: Path, target: LlamaTarget, *, taps: tuple[int, ...] = (0, 1, 3), heat: float = HEAT, tokens: int = 12
) -> Corpus:
    prompts = [Prompt("chat", f"{i}", "x") for i in range(6)]
    folder = tmp_path / f"{target.fingerprint}-{taps}-{heat}-{tokens}"
    generate_corpus(
        target, prompts, folder, split="train", taps=taps, temperature=heat, max_new_tokens=tokens, progress=False
    )
    return Corpus(folder)


def test_text_that_does_not_fit_is_caught_before_the_first_step(
    tiny: LlamaTarget, corpora: tuple[Corpus, Corpus], make_fresh: Any, tmp_path: Path
) -> None:
    drafter = make_fresh("markov")
    other = trained_on(tmp_path, tiny_target(seed=7, vocab_size=12, num_layers=3))
    hot = trained_on(tmp_path, tiny, heat=0.5)
    few = trained_on(tmp_path, tiny, taps=(1, 3))
    for corpus, message in (
        (other, "field 'fingerprint': was generated by tiny-7 .*, not by tiny-1"),
        (hot, "field 'temperature': was sampled at another temperature than the drafter's, got 0.5, expected 0.9"),
        (few, r"field 'taps': the corpus does not hold this layer, got 0, expected layers of \[1, 3\], or -1"),
    ):
        for pair in ((corpus, corpora[1]), (corpora[0], corpus)):
            with pytest.raises(InputError, match=message) as error:
                Trainer(drafter, tiny, *pair, SHORT)
            assert str(corpus.folder) in str(error.value)


def test_features_of_another_width(tiny: LlamaTarget, corpora: tuple[Corpus, Corpus], make_fresh: Any) -> None:
    class Narrow(Corpus):
        def __getitem__(self, index: int) -> Any:
            found = super().__getitem__(index)
            return replace(found, features=found.features[..., :16])

    with pytest.raises(InputError, match="field 'hidden_size': got 16, expected 32"):
        Trainer(make_fresh("markov"), tiny, Narrow(corpora[0].folder), corpora[1], SHORT)


def test_no_answer_is_longer_than_a_block(tiny: LlamaTarget, make_fresh: Any, tmp_path: Path) -> None:
    short, long = trained_on(tmp_path, tiny, tokens=4), trained_on(tmp_path, tiny)
    with pytest.raises(InputError, match="field 'gamma': no answer is longer than a block, got 4"):
        Trainer(make_fresh("markov"), tiny, short, long, SHORT)
    trainer = Trainer(make_fresh("markov"), tiny, long, short, SHORT)
    with pytest.raises(InputError, match="no answer is longer than a block"):
        trainer.evaluate()


def test_held_out_text_may_hold_its_layers_in_another_order(
    tiny: LlamaTarget, corpora: tuple[Corpus, Corpus], make_fresh: Any, tmp_path: Path
) -> None:
    usual = trained_on(tmp_path, tiny)
    turned = trained_on(tmp_path, tiny, taps=(3, 2, 0))
    found = [
        Trainer(make_fresh("markov"), tiny, corpora[0], text, SHORT).evaluate()["alpha"] for text in (usual, turned)
    ]
    assert found[0] == found[1]


def test_columns() -> None:
    assert tap_columns((2, 5, 9), (9, FINAL, 2), "here") == [2, 3, 0]
    with pytest.raises(InputError, match=r"here, field 'taps': the corpus does not hold this layer, got 4"):
        tap_columns((2, 5), (2, 4), "here")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"anchors": 0}, "field 'anchors': got 0, expected at least 1"),
        ({"sequences": 0}, "field 'sequences': got 0, expected at least 1"),
        ({"anchors_per_sequence": -1}, "field 'anchors_per_sequence': got -1, expected at least 1"),
        ({"learning_rate": 0.0}, "field 'learning_rate': got 0.0, expected a finite number > 0"),
        ({"learning_rate": math.inf}, "field 'learning_rate': got inf, expected a finite number > 0"),
        ({"clip": math.nan}, "field 'clip': got nan, expected a finite number > 0"),
        ({"weight_decay": -0.1}, "field 'weight_decay': got -0.1, expected a finite number >= 0"),
        ({"tv": math.nan}, "field 'tv': got nan, expected a finite number >= 0"),
        ({"backbone_rate": 2.0}, "field 'backbone_rate': got 2.0, expected a share, 0 to 1"),
        ({"warmup": 1.5}, "field 'warmup': got 1.5, expected a share, 0 to 1"),
        ({"decay": -0.5}, "field 'decay': got -0.5, expected a share, 0 to 1"),
        ({"warmup": 0.6, "decay": 0.6}, "field 'decay': got 0.6, expected warmup and decay together at most 1"),
        ({"seed": -1}, "field 'seed': got -1, expected at least 0"),
    ],
)
def test_recipes_that_make_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        Recipe(**changes)
    assert str(error.value) == message


def test_the_drafter_file_of_a_training(straight: Any, tiny: LlamaTarget, tmp_path: Path) -> None:
    trainer, _ = straight("markov")
    about = trainer.drafter_file()
    write_drafter(trainer.drafter, tmp_path / "d.safetensors", about)
    _, found = read_drafter(tmp_path / "d.safetensors", tiny)
    assert found.training["anchors"] == trainer.anchors
    assert found.training["recipe"]["seed"] == 0
    assert found.training["corpus"] == {
        "sequences": 72,
        "answer_tokens": trainer.corpus.answer_tokens,
        "temperature": HEAT,
        "split": "train",
        "seed": 0,
        "prompts": trainer.corpus.header.prompts,
    }
    assert "config" not in found.training
