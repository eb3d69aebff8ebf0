"""A small Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU (arXiv 2302.13971).

The target adapters that need no transformers library are made of it, and the drafters' layers are the same
`LlamaLayer`, so that they can start from the target's weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama.

    Parameters
    ----------
    vocab_size, hidden_size, num_layers, num_heads, num_kv_heads, ffn_size
        As the names say; `num_heads` is a multiple of `num_kv_heads`.
    rope_base, norm_eps
        Base of the rotary frequencies; epsilon of the RMS norms.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_size: int
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_heads


class RmsNorm(nn.Module):
    """x / rms(x) * weight, in float32 (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return functional.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


def rotary(positions: Tensor, config: LlamaConfig) -> tuple[Tensor, Tensor]:
    """cos and sin, float32[..., head_dim] each, of integer positions [...] (arXiv 2104.09864, half-split layout)."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=positions.device)
    angle = positions.float()[..., None] * config.rope_base ** (-half / config.head_dim)
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


class LlamaLayer(nn.Module):
    """One pre-norm transformer layer; the caller does the attention, so that it can choose keys and masks."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, kv = config.hidden_size, config.num_kv_heads * config.head_dim
        self.config = config
        self.input_norm = RmsNorm(hidden, config.norm_eps)
        self.q = nn.Linear(hidden, hidden, bias=False)
        self.k = nn.Linear(hidden, kv, bias=False)
        self.v = nn.Linear(hidden, kv, bias=False)
        self.o = nn.Linear(hidden, hidden, bias=False)
        self.post_norm = RmsNorm(hidden, config.norm_eps)
        self.gate = nn.Linear(hidden, config.ffn_size, bias=False)
        self.up = nn.Linear(hidden, config.ffn_size, bias=False)
        self.down = nn.Linear(config.ffn_size, hidden, bias=False)

    def queries(self, normed: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[..., S, H] -> rotated queries [..., S, heads, head_dim]."""
        q = self.q(normed).unflatten(-1, (self.config.num_heads, self.config.head_dim))
        return _rotate(q, cos[..., None, :].to(q.dtype), sin[..., None, :].to(q.dtype))

    def keys_values(self, normed: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[..., S, H] -> rotated keys and values, [..., S, kv_heads, head_dim] each."""
        shape = (self.config.num_kv_heads, self.config.head_dim)
        k, v = self.k(normed).unflatten(-1, shape), self.v(normed).unflatten(-1, shape)
        return _rotate(k, cos[..., None, :].to(k.dtype), sin[..., None, :].to(k.dtype)), v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Residual of the attention output [..., heads * head_dim], then the SwiGLU part; [..., H]."""
        x = x + self.o(attended)
        normed = self.post_norm(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


def layers_of(modules: nn.ModuleList) -> list[LlamaLayer]:
    """The members of a ModuleList, which forgets their type."""
    return [layer for layer in modules if isinstance(layer, LlamaLayer)]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Grouped-query attention without repeating keys.

    Parameters
    ----------
    q
        [B, S, heads, head_dim].
    k, v
        [B, kv_heads, L, head_dim].
    mask
        bool[B or 1, S, L], true where a query may look.

    Returns
    -------
    Tensor
        [B, S, heads * head_dim].
    """
    batch, length, heads, width = q.shape
    groups = heads // k.shape[1]
    # The queries of a group share their keys: they become further query rows.
    rows = q.unflatten(2, (k.shape[1], groups)).permute(0, 2, 1, 3, 4).reshape(batch, k.shape[1], -1, width)
    wide = mask[:, None, :, None, :].expand(-1, 1, length, groups, -1).reshape(mask.shape[0], 1, length * groups, -1)
    out = functional.scaled_dot_product_attention(rows, k, v, attn_mask=wide)
    return out.unflatten(2, (length, groups)).permute(0, 2, 1, 3, 4).reshape(batch, length, heads * width)


@dataclass
class KvCache:
    """Keys and values of some sequences: one row a sequence.

    Attributes
    ----------
    k, v
        [layers, rows, kv_heads, capacity, head_dim].
    """

    k: Tensor
    v: Tensor

    @property
    def capacity(self) -> int:
        """Positions a row can hold."""
        return self.k.shape[3]

    def rows(self, first: int, last: int) -> KvCache:
        """A view of rows first..last-1; what is written to it is written here."""
        return KvCache(self.k[:, first:last], self.v[:, first:last])

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a row to another."""
        for part in (self.k, self.v):
            part[:, target, :, :length] = part[:, source, :, :length]


@dataclass(frozen=True)
class Segment:
    """New tokens of one cached sequence in a packed pass.

    Attributes
    ----------
    row
        Of the cache.
    start, length
        Position of the first new token, and how many there are, 1 or more.
    """

    row: int
    start: int
    length: int


class Llama(nn.Module):
    """The whole model, used for inference only (its parameters are frozen)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size), requires_grad=False)
        self.layers = nn.ModuleList(LlamaLayer(config) for _ in range(config.num_layers))
        self.norm = RmsNorm(config.hidden_size, config.norm_eps)
        self.head = self.embedding

    def new_cache(self, rows: int, capacity: int) -> KvCache:
        """An empty cache of the model's dtype and device."""
        c = self.config
        shape = (c.num_layers, rows, c.num_kv_heads, capacity, c.head_dim)
        empty = torch.zeros(shape, dtype=self.embedding.dtype, device=self.embedding.device)
        return KvCache(empty, torch.zeros_like(empty))

    @torch.inference_mode()
    def extend(self, tokens: Tensor, cache: KvCache, start: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Append tokens to the sequences of a cache; see `dsim.drafter.target.Target.extend`."""
        length = tokens.shape[1]
        positions = start[:, None] + torch.arange(length, device=tokens.device)
        cos, sin = rotary(positions, self.config)
        end = int(positions.max()) + 1
        mask = torch.arange(end, device=tokens.device) <= positions[..., None]
        row = torch.arange(tokens.shape[0], device=tokens.device)[:, None]
        x = functional.embedding(tokens, self.embedding)
        kept = {0: x}
        for index, layer in enumerate(layers_of(self.layers)):
            normed = layer.input_norm(x)
            k, v = layer.keys_values(normed, cos, sin)
            cache.k[index].transpose(1, 2)[row, positions] = k
            cache.v[index].transpose(1, 2)[row, positions] = v
            attended = attend(
                layer.queries(normed, cos, sin), cache.k[index, :, :, :end], cache.v[index, :, :, :end], mask
            )
            x = layer.finish(x, attended)
            kept[index + 1] = x
        return _stack(kept, taps, x), self.norm(x)

    @torch.inference_mode()
    def packed(
        self, tokens: Tensor, segments: Sequence[Segment], cache: KvCache, taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Append tokens to some sequences of a cache, to each its own number; see `LlamaTarget.packed`."""
        c, device = self.config, tokens.device
        row = torch.tensor([s.row for s in segments for _ in range(s.length)], device=device)
        at = torch.tensor([p for s in segments for p in range(s.start, s.start + s.length)], device=device)
        cos, sin = rotary(at, c)
        x = functional.embedding(tokens, self.embedding)
        groups = c.num_heads // c.num_kv_heads
        masks = [_causal(s, groups, x) for s in segments]
        kept = {0: x}
        for index, layer in enumerate(layers_of(self.layers)):
            normed = layer.input_norm(x)
            k, v = layer.keys_values(normed, cos, sin)
            cache.k[index][row, :, at] = k
            cache.v[index][row, :, at] = v
            # [kv_heads, T * groups, head_dim]: the queries of a group share their keys, as in `attend`.
            q = layer.queries(normed, cos, sin).unflatten(1, (c.num_kv_heads, groups)).transpose(0, 1).flatten(1, 2)
            out = torch.empty_like(q)
            first = 0
            for s, mask in zip(segments, masks, strict=True):
                # One sequence at a time: padding all to the longest text would cost more than the calls do.
                last, end = first + groups * s.length, s.start + s.length
                keys, values = cache.k[index, s.row, None, :, :end], cache.v[index, s.row, None, :, :end]
                seen = functional.scaled_dot_product_attention(q[None, :, first:last], keys, values, attn_mask=mask)
                out[:, first:last] = seen[0]
                first = last
            x = layer.finish(x, out.unflatten(1, (-1, groups)).transpose(0, 1).flatten(1))
            kept[index + 1] = x
        return _stack(kept, taps, x), self.norm(x)

    @torch.inference_mode()
    def branch(self, tokens: Tensor, positions: Tensor, prefix: Tensor, tree: Tensor, cache: KvCache) -> Tensor:
        """Hidden states of a token tree over one cached sequence; see `dsim.drafter.target.Target.branch`."""
        cos, sin = rotary(positions, self.config)
        end = int(prefix.max())
        mask = torch.cat([torch.arange(end, device=tokens.device) < prefix[:, None], tree], dim=1)[None]
        x = functional.embedding(tokens, self.embedding)
        for index, layer in enumerate(layers_of(self.layers)):
            normed = layer.input_norm(x)
            k, v = layer.keys_values(normed, cos, sin)
            keys = torch.cat([cache.k[index, 0, :, :end], k.transpose(0, 1)], dim=1)
            values = torch.cat([cache.v[index, 0, :, :end], v.transpose(0, 1)], dim=1)
            attended = attend(layer.queries(normed, cos, sin)[None], keys[None], values[None], mask)
            x = layer.finish(x, attended[0])
        return self.norm(x)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] normed hidden states -> float32[..., V]."""
        return functional.linear(hidden.to(self.head.dtype), self.head).float()


def _causal(segment: Segment, groups: int, like: Tensor) -> Tensor | None:
    """What is added to the scores [length * groups, end] of a segment; None where it sees everything."""
    if segment.length == 1:
        return None
    end = segment.start + segment.length
    query = torch.arange(segment.start, end, device=like.device).repeat_interleave(groups)
    hidden = torch.arange(end, device=like.device) > query[:, None]
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill(hidden, float("-inf"))


def _stack(kept: dict[int, Tensor], taps: tuple[int, ...], x: Tensor) -> Tensor:
    if not taps:
        return x.new_empty((*x.shape[:-1], 0, x.shape[-1]))
    return torch.stack([kept[tap] for tap in taps], dim=-2)
