"""The target model as the drafters see it: one interface, whatever library runs it.

Adapters: `dsim.drafter.smollm2` (SmolLM2 from a GGUF file), `dsim.drafter.hf` (any causal LM of transformers) and
`dsim.drafter.tiny` (a seeded small transformer for tests).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dsim.drafter.llama import KvCache, Llama, LlamaConfig, Segment


class Tokenizer(Protocol):
    """Text to tokens and back."""

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, no special tokens added."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, special ones left out."""
        ...

    def chat(self, prompt: str) -> list[int]:
        """Tokens of one user turn in the model's chat template, up to where the assistant's answer starts."""
        ...


class Target(Protocol):
    """A frozen causal language model.

    Positions count from 0; a sequence's *hidden state* at s is what predicts token s + 1.

    Attributes
    ----------
    name, fingerprint, license
        For provenance: what it is, and a digest of what must agree for a drafter to fit (weights and tokenizer).
    vocab_size, hidden_size, num_layers
        Sizes.
    eos
        Tokens that end an answer.
    embedding, head
        [V, H] tensors: input embedding and LM head (often the same tensor).
    shape
        A `LlamaConfig`: the sizes that draft layers take over.
    """

    name: str
    fingerprint: str
    license: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    eos: frozenset[int]
    tokenizer: Tokenizer
    shape: LlamaConfig

    @property
    def embedding(self) -> Tensor: ...

    @property
    def head(self) -> Tensor: ...

    @property
    def device(self) -> torch.device: ...

    def new_cache(self, rows: int, capacity: int) -> Any:
        """An empty KV cache for `rows` sequences of up to `capacity` tokens; it has `rows(first, last)` views."""
        ...

    def extend(self, tokens: Tensor, cache: Any, start: Tensor, taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        """Append tokens to cached sequences.

        Parameters
        ----------
        tokens
            int64[B, S], one row a cache row.
        cache
            Holds positions below `start` already; gets the S new ones (written over what stood there).
        start
            int64[B]: position of each row's first new token.
        taps
            Layers whose output is wanted: 0 is the embedding, `num_layers` the last layer before the final norm.

        Returns
        -------
        features, hidden
            [B, S, len(taps), H] and [B, S, H] (after the final norm).
        """
        ...

    def branch(self, tokens: Tensor, positions: Tensor, prefix: Tensor, tree: Tensor, cache: Any) -> Tensor:
        """Run a tree of tokens that continues one cached sequence at several places; the cache stays as it was.

        Parameters
        ----------
        tokens, positions, prefix
            int64[M] each: token, its position, and how many cached positions it sees.
        tree
            bool[M, M]: node i sees node j (its ancestors and itself).
        cache
            Of one row.

        Returns
        -------
        Tensor
            [M, H]: hidden states after the final norm.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] (after the final norm) -> float32[..., V]."""
        ...

    def layer_weights(self, layer: int) -> dict[str, Tensor] | None:
        """State dict for a `LlamaLayer` of this shape from layer 0..num_layers-1; None where there is none."""
        ...


@dataclass
class LlamaTarget:
    """A `Target` run by this project's own `Llama`."""

    model: Llama
    name: str
    fingerprint: str
    license: str
    eos: frozenset[int]
    tokenizer: Tokenizer

    def __post_init__(self) -> None:
        self.shape = self.model.config
        self.vocab_size = self.shape.vocab_size
        self.hidden_size = self.shape.hidden_size
        self.num_layers = self.shape.num_layers

    @property
    def embedding(self) -> Tensor:
        """[V, H]."""
        return self.model.embedding

    @property
    def head(self) -> Tensor:
        """[V, H]."""
        return self.model.head

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.embedding.device

    def new_cache(self, rows: int, capacity: int) -> KvCache:
        """See `Target.new_cache`."""
        return self.model.new_cache(rows, capacity)

    def extend(
        self, tokens: Tensor, cache: KvCache, start: Tensor, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """See `Target.extend`."""
        features, hidden = self.model.extend(tokens, cache, start, taps)
        return features, hidden

    def packed(
        self, tokens: Tensor, segments: Sequence[Segment], cache: KvCache, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """Append tokens to cached sequences, another number to each, without padding.

        Parameters
        ----------
        tokens
            int64[T]: the new tokens of the segments, one after the other.
        segments
            Where they go; no row twice.
        cache
            Rows of which some are continued; the others stay as they are.
        taps
            As in `Target.extend`.

        Returns
        -------
        features, hidden
            [T, len(taps), H] and [T, H] (after the final norm).
        """
        features, hidden = self.model.packed(tokens, segments, cache, taps)
        return features, hidden

    def branch(self, tokens: Tensor, positions: Tensor, prefix: Tensor, tree: Tensor, cache: KvCache) -> Tensor:
        """See `Target.branch`."""
        hidden: Tensor = self.model.branch(tokens, positions, prefix, tree, cache)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Target.logits`."""
        logits: Tensor = self.model.logits(hidden)
        return logits

    def layer_weights(self, layer: int) -> dict[str, Tensor] | None:
        """See `Target.layer_weights`."""
        weights: dict[str, Tensor] = self.model.layers[layer].state_dict()
        return weights
