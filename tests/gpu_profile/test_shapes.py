"""The presets are the models that they name, and impossible shapes are refused."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from dsim.errors import InputError
from dsim.gpu_profile.shapes import PRESETS, DrafterShape, default_drafter, models

# Parameters as the model cards give them, billions: total, without embedding and LM head, met by a token.
CARDS = {
    "qwen3-4b": (4.0, 3.6, None),
    "qwen3-8b": (8.2, 6.95, None),
    "qwen3-14b": (14.8, 13.2, None),
    "qwen3-30b-a3b": (30.5, 29.9, 3.3),
    "olmoe-1b-7b": (6.9, None, 1.3),
}


@pytest.mark.parametrize("name", CARDS)
def test_presets_have_as_many_weights_as_the_model_cards_say(name: str) -> None:
    shape = PRESETS[name]
    total, inner, active = CARDS[name]
    assert shape.elements() / 1e9 == pytest.approx(total, abs=0.06)
    if inner is not None:
        assert shape.layers * shape.layer_elements() / 1e9 == pytest.approx(inner, abs=0.06)
    if active is not None:
        assert shape.elements(active=True) / 1e9 == pytest.approx(active, abs=0.06)
    assert shape.source.startswith("https://huggingface.co/")


def test_the_drafter_of_qwen3_8b_is_the_published_one() -> None:
    # 2B weights (https://huggingface.co/deepseek-ai/dspark_qwen3_8b_block7), where embedding and LM head count too.
    target = PRESETS["qwen3-8b"]
    drafter = default_drafter(target)
    assert (drafter.layers, drafter.gamma, drafter.taps, drafter.rank) == (5, 7, 5, 256)
    whole = drafter.elements(target) + 2 * target.vocabulary * target.width
    assert round(whole / 1e9) == 2


def test_weights_counted_by_hand() -> None:
    # 2 (4 x 16) (4 + 2) for attention, 3 x 64 x 32 an expert, 64 x 8 for the router, 2 x 64 for the norms.
    layer = 64 * 16 * (2 * 4 + 2 * 2) + 8 * 3 * 64 * 32 + 64 * 8 + 2 * 64
    moe = PRESETS["tiny-moe"]
    assert moe.layer_elements() == layer
    assert moe.layer_elements(active=True) == layer - 6 * 3 * 64 * 32
    assert moe.elements() == 2 * layer + 2 * 512 * 64 + 64


def test_changed_sizes() -> None:
    target, drafter = models("qwen3-30b-a3b", {"layers": 3, "drafter.gamma": 5})
    assert (target.name, target.layers, target.experts) == ("Qwen3-30B-A3B (layers 3)", 3, 128)
    # The backbone is not deeper than the target, and as wide as eight experts of 768.
    assert (drafter.layers, drafter.gamma, drafter.ffn) == (3, 5, 6144)
    assert drafter.layer_shape(target).experts == 0


@pytest.mark.parametrize(
    ("preset", "changes", "message"),
    [
        ("qwen3-80b", {}, "unknown preset, got 'qwen3-80b', expected one of qwen3-4b, qwen3-8b"),
        ("tiny", {"depth": 3}, "field 'depth': unknown size, expected one of layers, width"),
        ("tiny", {"drafter.depth": 3}, "field 'drafter.depth': unknown size"),
        ("tiny", {"layers": 0}, "field 'layers': got 0, expected an integer >= 1"),
        ("tiny", {"layers": "many"}, "field 'layers': got 'many', expected an integer >= 1"),
        ("tiny", {"layers": True}, "field 'layers': got True"),
        ("tiny", {"width": 63}, "field 'width': got 63, expected a multiple of 8"),
        ("tiny", {"heads": 5}, "field 'heads': got 5, expected a multiple of kv_heads, 2"),
        ("tiny", {"head_dim": 264}, "field 'head_dim': got 264, expected at most 256"),
        ("tiny", {"experts_per_token": 2}, "field 'experts_per_token': got 2, expected 0 without experts"),
        ("tiny-moe", {"experts_per_token": 9}, "field 'experts_per_token': got 9, expected 1 to experts (8)"),
        (
            "tiny",
            {"drafter.vocabulary": 513},
            "field 'drafter.vocabulary': got 513, expected at most the target's, 512",
        ),
        ("tiny", {"drafter.ffn": 12}, "field 'drafter.ffn': got 12, expected a multiple of 8"),
        ("tiny", {"drafter.rank": 0}, "field 'drafter.rank': got 0, expected an integer >= 1"),
    ],
)
def test_impossible_shapes_are_refused(preset: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        models(preset, changes)


def test_a_drafter_may_use_part_of_the_vocabulary() -> None:
    target = PRESETS["tiny"]
    drafter: DrafterShape = replace(default_drafter(target), vocabulary=100)
    by_one = replace(drafter, vocabulary=101)
    # One row more of the Markov head's two matrices.
    assert by_one.elements(target) - drafter.elements(target) == 2 * drafter.rank
