"""Shapes of the models that can be timed: decoders, the DSpark drafter on top of them, and presets with their sources.

No torch here: shapes are checked, counted and changed without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from dsim.errors import InputError


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a decoder: pre-norm layers of grouped-query attention and a SwiGLU network, dense or of experts.

    Parameters
    ----------
    name
        In words.
    layers, width, heads, kv_heads, head_dim
        Layers; hidden size; attention heads, those of keys and values, and the width of one.
    ffn
        Inner width of the feed-forward network, or of one expert.
    vocabulary
        Rows of the embedding and of the LM head.
    experts, experts_per_token
        Experts of a layer and how many each token is routed to; 0 and 0 for a dense network.
    tied
        Embedding and LM head are one matrix.
    qk_norm
        Queries and keys are normed head by head, as in Qwen3.
    rope_base, norm_eps
        Base of the rotary frequencies, epsilon of the norms; without effect on time.
    source
        Where the sizes come from.

    Raises
    ------
    InputError
        Sizes that contradict each other or that the kernels cannot take (widths must be multiples of 8: grouped
        matrix products and flash attention read 16 bytes at a time).
    """

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    experts: int = 0
    experts_per_token: int = 0
    tied: bool = False
    qk_norm: bool = True
    rope_base: float = 1e6
    norm_eps: float = 1e-6
    source: str = ""

    def __post_init__(self) -> None:
        for field in ("layers", "width", "heads", "kv_heads", "head_dim", "ffn", "vocabulary"):
            _count(field, getattr(self, field), 1)
        for field in ("experts", "experts_per_token"):
            _count(field, getattr(self, field), 0)
        for field in ("width", "head_dim", "ffn"):
            if getattr(self, field) % 8:
                raise InputError(field=field, value=getattr(self, field), expected="a multiple of 8")
        if self.head_dim > 256:
            raise InputError(field="head_dim", value=self.head_dim, expected="at most 256 (flash attention)")
        if self.heads % self.kv_heads:
            raise InputError(field="heads", value=self.heads, expected=f"a multiple of kv_heads, {self.kv_heads}")
        if (self.experts == 0) != (self.experts_per_token == 0) or self.experts_per_token > self.experts:
            raise InputError(
                field="experts_per_token",
                value=self.experts_per_token,
                expected=f"1 to experts ({self.experts})" if self.experts else "0 without experts",
            )

    @property
    def groups(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    @property
    def kv_elements(self) -> int:
        """Numbers in the KV cache for one token and layer."""
        return 2 * self.kv_heads * self.head_dim

    def layer_elements(self, *, active: bool = False) -> int:
        """Weights of one layer; `active`: only those that one token meets."""
        attention = self.width * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        networks = self.experts_per_token if active else self.experts
        router = self.width * self.experts
        return attention + 3 * self.width * self.ffn * (networks or 1) + router + 2 * self.width

    def elements(self, *, active: bool = False) -> int:
        """Weights of the whole model; `active`: only those that one token meets (embedding and LM head counted)."""
        ends = self.vocabulary * self.width * (1 if self.tied else 2) + self.width
        return ends + self.layers * self.layer_elements(active=active)


@dataclass(frozen=True)
class DrafterShape:
    """Sizes of a DSpark drafter (see `dsim.drafter.parallel`): backbone, KV injection, Markov and confidence head.

    Parameters
    ----------
    layers
        Of the backbone; each is a dense layer of the target's widths.
    gamma
        Drafted tokens a block.
    taps
        Layers of the target whose hidden states are injected.
    rank
        Of the Markov head.
    vocabulary
        Draft vocabulary: rows of the target's LM head that are used.
    ffn
        Inner width of a backbone layer's network.
    """

    layers: int
    gamma: int
    taps: int
    rank: int
    vocabulary: int
    ffn: int

    def __post_init__(self) -> None:
        for item in fields(self):
            _count(f"drafter.{item.name}", getattr(self, item.name), 1)
        if self.ffn % 8:
            raise InputError(field="drafter.ffn", value=self.ffn, expected="a multiple of 8")

    def layer_shape(self, target: DecoderShape) -> DecoderShape:
        """A backbone of these layers as a decoder: the target's widths, a dense network."""
        if self.vocabulary > target.vocabulary:
            raise InputError(
                field="drafter.vocabulary",
                value=self.vocabulary,
                expected=f"at most the target's, {target.vocabulary}",
            )
        return replace(
            target, name="drafter", layers=self.layers, ffn=self.ffn, experts=0, experts_per_token=0, source=""
        )

    def elements(self, target: DecoderShape) -> int:
        """Weights of the drafter's own; embedding and LM head are the target's."""
        width, rank = target.width, self.rank
        heads = (self.vocabulary + 1) * rank + rank * self.vocabulary + width + rank
        return self.layers * self.layer_shape(target).layer_elements() + self.taps * width * width + 3 * width + heads


def _count(field: str, value: object, lowest: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
        raise InputError(field=field, value=value, expected=f"an integer >= {lowest}")


_HUB = "https://huggingface.co"

#: Decoders by name. Sizes of published models are those of their config.json at `source`.
PRESETS: dict[str, DecoderShape] = {
    "qwen3-4b": DecoderShape(
        "Qwen3-4B",
        layers=36,
        width=2560,
        heads=32,
        kv_heads=8,
        ffn=9728,
        tied=True,
        source=f"{_HUB}/Qwen/Qwen3-4B/blob/main/config.json",
        head_dim=128,
        vocabulary=151936,
    ),
    "qwen3-8b": DecoderShape(
        "Qwen3-8B",
        layers=36,
        width=4096,
        heads=32,
        kv_heads=8,
        ffn=12288,
        source=f"{_HUB}/Qwen/Qwen3-8B/blob/main/config.json",
        head_dim=128,
        vocabulary=151936,
    ),
    "qwen3-14b": DecoderShape(
        "Qwen3-14B",
        layers=40,
        width=5120,
        heads=40,
        kv_heads=8,
        ffn=17408,
        source=f"{_HUB}/Qwen/Qwen3-14B/blob/main/config.json",
        head_dim=128,
        vocabulary=151936,
    ),
    "qwen3-30b-a3b": DecoderShape(
        "Qwen3-30B-A3B",
        layers=48,
        width=2048,
        heads=32,
        kv_heads=4,
        ffn=768,
        experts=128,
        experts_per_token=8,
        source=f"{_HUB}/Qwen/Qwen3-30B-A3B/blob/main/config.json",
        head_dim=128,
        vocabulary=151936,
    ),
    "olmoe-1b-7b": DecoderShape(
        "OLMoE-1B-7B",
        layers=16,
        width=2048,
        heads=16,
        kv_heads=16,
        head_dim=128,
        ffn=1024,
        vocabulary=50304,
        experts=64,
        experts_per_token=8,
        source=f"{_HUB}/allenai/OLMoE-1B-7B-0924/blob/main/config.json",
    ),
    "tiny": DecoderShape(
        "tiny", layers=2, width=64, heads=4, kv_heads=2, head_dim=16, ffn=128, vocabulary=512, source="for tests"
    ),
    "tiny-moe": DecoderShape(
        "tiny-moe",
        layers=2,
        width=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        ffn=32,
        vocabulary=512,
        experts=8,
        experts_per_token=2,
        source="for tests",
    ),
}

#: What ``--set`` may change of the decoder, and (after ``drafter.``) of the drafter.
DECODER_KEYS = (
    "layers",
    "width",
    "heads",
    "kv_heads",
    "head_dim",
    "ffn",
    "vocabulary",
    "experts",
    "experts_per_token",
)
DRAFTER_KEYS = tuple(item.name for item in fields(DrafterShape))


def default_drafter(target: DecoderShape) -> DrafterShape:
    """The drafter that DeepSeek published for Qwen3-8B, on this target.

    Five layers, blocks of 7, five tapped layers, a Markov head of rank 256, the target's whole vocabulary
    (https://huggingface.co/deepseek-ai/dspark_qwen3_8b_block7). On a mixture of experts the backbone's network is as
    wide as the experts that one token meets together (our choice).
    """
    small = target.width < 256
    return DrafterShape(
        layers=min(5, target.layers),
        gamma=7,
        taps=min(5, target.layers),
        rank=16 if small else 256,
        vocabulary=target.vocabulary,
        ffn=target.ffn * (target.experts_per_token or 1),
    )


def models(preset: str, changes: Mapping[str, Any] | None = None) -> tuple[DecoderShape, DrafterShape]:
    """A preset's decoder and its drafter, with some sizes changed.

    Parameters
    ----------
    preset
        A name of `PRESETS`.
    changes
        ``layers`` and the other `DECODER_KEYS`, or ``drafter.layers`` and the other `DRAFTER_KEYS`, to integers. The
        drafter's defaults follow the changed decoder.

    Raises
    ------
    InputError
        An unknown name or key (the known ones are listed), or sizes that are refused.

    Examples
    --------
    >>> target, drafter = models("qwen3-8b", {"layers": 12, "drafter.vocabulary": 32000})
    >>> target.name, target.layers, drafter.layers, drafter.vocabulary
    ('Qwen3-8B (layers 12)', 12, 5, 32000)
    """
    if preset not in PRESETS:
        raise InputError("unknown preset", field="preset", value=preset, expected=f"one of {', '.join(PRESETS)}")
    target, own, drafters = PRESETS[preset], {}, {}
    for key, value in (changes or {}).items():
        part, dot, name = key.partition(".")
        if key in DECODER_KEYS:
            own[key] = value
        elif dot and part == "drafter" and name in DRAFTER_KEYS:
            drafters[name] = value
        else:
            known = (*DECODER_KEYS, *(f"drafter.{name}" for name in DRAFTER_KEYS))
            raise InputError("unknown size", field=key, expected=f"one of {', '.join(known)}")
    if own:
        words = ", ".join(f"{key} {value}" for key, value in own.items())
        target = replace(target, name=f"{target.name} ({words})", **own)
    drafter = replace(default_drafter(target), **drafters)
    drafter.layer_shape(target)
    return target, drafter
