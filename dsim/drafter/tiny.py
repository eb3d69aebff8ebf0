"""A tiny seeded transformer: a complete target for tests and first tries, made in milliseconds, no file needed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from dsim.drafter.llama import Llama, LlamaConfig
from dsim.drafter.target import LlamaTarget
from dsim.errors import InputError


class ByteTokenizer:
    """Letters to tokens: the UTF-8 bytes modulo the vocabulary, 0 and 1 kept for end and start of an answer."""

    def __init__(self, vocab_size: int) -> None:
        self._size = vocab_size

    def encode(self, text: str) -> list[int]:
        """See `dsim.drafter.target.Tokenizer`."""
        return [2 + byte % (self._size - 2) for byte in text.encode()]

    def decode(self, tokens: Sequence[int]) -> str:
        """Letters that stand for the tokens (not the text that was encoded: the vocabulary is too small)."""
        return "".join(chr(ord("a") + token - 2) if token < 28 else "?" for token in tokens if token > 1)

    def chat(self, prompt: str) -> list[int]:
        """See `dsim.drafter.target.Tokenizer`."""
        return [1, *self.encode(prompt)[:24], 1]


def tiny_target(
    *, seed: int = 0, vocab_size: int = 32, hidden_size: int = 32, num_layers: int = 3, sharpness: float = 2.0
) -> LlamaTarget:
    """A random Llama whose next-token distributions are neither flat nor certain.

    Parameters
    ----------
    seed
        Of the weights; another seed is another target.
    vocab_size, hidden_size, num_layers
        Sizes; `hidden_size` a multiple of 16.
    sharpness
        Standard deviation of the logits, about.
    """
    if vocab_size < 4 or hidden_size % 16:
        raise InputError(field="vocab_size, hidden_size", value=(vocab_size, hidden_size), expected=">= 4, 16 n")
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        ffn_size=2 * hidden_size,
    )
    model = Llama(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            scale = 1.0 if name == "embedding" else 1.5
            parameter.data = torch.randn(parameter.shape, generator=generator) * scale * parameter.shape[1] ** -0.5
    # Logits are head . normed state: their spread is the head's row length.
    model.embedding.data *= sharpness
    model.head = model.embedding
    model.requires_grad_(False).eval()
    digest = hashlib.sha256(repr((seed, config, sharpness)).encode()).hexdigest()[:16]
    return LlamaTarget(
        model=model,
        name=f"tiny-{seed} (random weights)",
        fingerprint=digest,
        license="Apache-2.0",
        eos=frozenset({0}),
        tokenizer=ByteTokenizer(vocab_size),
    )
