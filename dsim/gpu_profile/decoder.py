"""The timed decoder: a target's verify step and prefill, at full size with random weights.

It does the work of an engine's step and nothing that only training or text needs: fused projections, rotary positions,
a write of the new keys and values into the cache, grouped-query attention over the cache, a SwiGLU network or routed
experts, logits of the tokens that are scored and their argmax. No pass asks the host for a number of the device (on a
mixture of experts: where `graphable` says so), so that it can be captured as a graph.

One thing differs from a real step: in a verify step the tokens of a request see each other both ways and not causally.
The queries that share a key head can then be rows of one matrix, so that a key is read once for all of them, as in the
engines' own kernels; how many keys are read is the same up to the few of the step itself. A prefill is causal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from dsim.gpu_profile.grid import lengths
from dsim.gpu_profile.shapes import DecoderShape

# Larger tensors are filled in pieces of so many numbers.
_PIECE = 1 << 28


class Maker:
    """Random tensors on one device, reproducible by seed."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.device, self.dtype = device, dtype
        # Tensors without data (device meta) have no generator.
        self.generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, std: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of independent normal numbers."""
        made = torch.empty(shape, device=self.device, dtype=dtype or self.dtype)
        for piece in made.view(-1).split(_PIECE):
            piece.normal_(0.0, std, generator=self.generator)
        return made

    def matrix(self, *shape: int) -> Tensor:
        """Weights [..., out, in] that keep the size of what they are applied to."""
        return self.normal(*shape, std=shape[-1] ** -0.5)

    def ones(self, size: int) -> Tensor:
        """Scales of a norm."""
        return torch.ones(size, device=self.device, dtype=self.dtype)

    def exponential(self, *shape: int) -> Tensor:
        """float32: independent exponential numbers, to draw tokens with."""
        made = torch.empty(shape, device=self.device, dtype=torch.float32)
        return made.exponential_(generator=self.generator)

    def distinct(self, count: int, below: int) -> Tensor:
        """int64[count]: different tokens, in random order."""
        return torch.randperm(below, device=self.device, generator=self.generator)[:count]

    def count(self, count: int) -> Tensor:
        """int64[count]: 0, 1, and so on."""
        return torch.arange(count, device=self.device)


@dataclass
class Layer:
    """Weights of one layer.

    Attributes
    ----------
    norm, ffn_norm
        [W]: scales before attention and network.
    qkv, out
        [(heads + 2 kv_heads) head_dim, W] and [W, heads head_dim].
    up, down
        Gate and up [2 F, W] in one, and down [W, F]; with experts [E, 2 F, W] and [E, W, F].
    router
        [E, W], or None.
    """

    norm: Tensor
    ffn_norm: Tensor
    qkv: Tensor
    out: Tensor
    up: Tensor
    down: Tensor
    router: Tensor | None

    @classmethod
    def random(cls, shape: DecoderShape, maker: Maker) -> Layer:
        """A layer of this shape."""
        inner = (shape.experts,) if shape.experts else ()
        return cls(
            norm=maker.ones(shape.width),
            ffn_norm=maker.ones(shape.width),
            qkv=maker.matrix((shape.heads + 2 * shape.kv_heads) * shape.head_dim, shape.width),
            out=maker.matrix(shape.width, shape.heads * shape.head_dim),
            up=maker.matrix(*inner, 2 * shape.ffn, shape.width),
            down=maker.matrix(*inner, shape.width, shape.ffn),
            router=maker.matrix(shape.experts, shape.width) if shape.experts else None,
        )


@dataclass
class Batch:
    """What a pass over R requests needs beside its tokens: fixed tensors, made before a graph is captured.

    Attributes
    ----------
    requests, longest, keys
        R, tokens of the longest request in the pass, and keys of each request (cached ones and its own; a shorter
        request has the more cached ones).
    slots
        int64[B]: rows of the cache [R * keys] that the tokens write.
    cos, sin
        [B, 1, head_dim]: rotary factors; the sine has the sign of the half that it is applied to.
    padded, packed
        int64[R * longest] (a token for each row of the attention, a request's last one again where it is shorter) and
        int64[B] (the row of each token). None where all requests are equally long.
    scored
        int64[S]: tokens whose logits are computed; None for all.
    ramp, experts
        int64[B * experts_per_token] and int64[E], each counting up from 0; None without experts.
    causal
        A prefill: one request without cached tokens.
    """

    requests: int
    longest: int
    keys: int
    slots: Tensor
    cos: Tensor
    sin: Tensor
    padded: Tensor | None
    packed: Tensor | None
    scored: Tensor | None
    ramp: Tensor | None
    experts: Tensor | None
    causal: bool


def make_batch(
    shape: DecoderShape, maker: Maker, *, tokens: int, requests: int, context: int, scored: int, causal: bool = False
) -> Batch:
    """The fixed part of a pass.

    Parameters
    ----------
    shape, maker
        Of the model.
    tokens, requests, context
        As in `dsim.gpu_profile.grid.Case`.
    scored
        Logits are computed of the last so many tokens of each request.
    causal
        Tokens see earlier ones only (a prefill: one request, no context).
    """
    each = lengths(tokens, requests)
    longest = int(each[0])
    keys = context + longest
    counts = torch.as_tensor(each)
    owner = torch.repeat_interleave(torch.arange(requests), counts)
    first = torch.cumsum(counts, 0) - counts
    place = torch.arange(tokens) - first[owner]  # among the request's own tokens
    position = keys - counts[owner] + place
    even = bool((counts == longest).all())
    padded = torch.minimum(torch.arange(longest), counts[:, None] - 1) + first[:, None]
    late = place >= counts[owner] - scored
    cos, sin = rotary(position, shape)
    return Batch(
        requests=requests,
        longest=longest,
        keys=keys,
        slots=(owner * keys + position).to(maker.device),
        cos=cos.to(maker.device, maker.dtype),
        sin=sin.to(maker.device, maker.dtype),
        padded=None if even else padded.flatten().to(maker.device),
        packed=None if even else (owner * longest + place).to(maker.device),
        scored=None if bool(late.all()) else late.nonzero().flatten().to(maker.device),
        ramp=maker.count(tokens * shape.experts_per_token) if shape.experts else None,
        experts=maker.count(shape.experts) if shape.experts else None,
        causal=causal,
    )


def rotary(position: Tensor, shape: DecoderShape) -> tuple[Tensor, Tensor]:
    """float32[..., 1, head_dim] each: cosine, and sine with the sign of the half-split layout (arXiv 2104.09864)."""
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32)
    angle = position.float()[..., None, None] * shape.rope_base ** (-half / shape.head_dim)
    return torch.cat([angle.cos()] * 2, dim=-1), torch.cat([-angle.sin(), angle.sin()], dim=-1)


def norm(x: Tensor, weight: Tensor | None, eps: float, size: int) -> Tensor:
    """x / rms(x) over the last axis, times `weight`."""
    return functional.rms_norm(x, (size,), weight, eps)


def turn(heads: Tensor, cos: Tensor, sin: Tensor, shape: DecoderShape) -> Tensor:
    """Norm (where the shape has it) and rotate queries or keys [B, any, head_dim], in place."""
    normed = norm(heads, None, shape.norm_eps, shape.head_dim) if shape.qk_norm else heads
    swapped = normed.roll(shape.head_dim // 2, -1)
    return torch.addcmul(normed * cos, swapped, sin, out=heads)


def attend(q: Tensor, cache: Tensor, batch: Batch, shape: DecoderShape) -> Tensor:
    """Attention of a pass over its cache.

    Parameters
    ----------
    q
        [B, heads, head_dim].
    cache
        [R * keys, 2 kv_heads, head_dim]: keys, then values.

    Returns
    -------
    Tensor
        [B, heads * head_dim].
    """
    kv, dim, groups = shape.kv_heads, shape.head_dim, shape.groups
    k, v = cache.view(batch.requests, batch.keys, 2 * kv, dim).transpose(1, 2).split(kv, dim=1)
    if batch.causal:
        one = q.transpose(0, 1)[None]
        out = functional.scaled_dot_product_attention(one, k, v, is_causal=True, enable_gqa=groups > 1)
        return out[0].transpose(0, 1).reshape(q.shape[0], -1)
    if batch.padded is not None:
        q = q[batch.padded]
    # The queries that share a key head are rows of one matrix: see the head of this module.
    rows = q.unflatten(0, (batch.requests, batch.longest)).unflatten(2, (kv, groups)).permute(0, 2, 1, 3, 4)
    rows = rows.reshape(batch.requests, kv, batch.longest * groups, dim)
    out = functional.scaled_dot_product_attention(rows, k, v)
    out = out.unflatten(2, (batch.longest, groups)).permute(0, 2, 1, 3, 4).reshape(-1, shape.heads * dim)
    return out if batch.packed is None else out[batch.packed]


def graphable(device: torch.device) -> bool:
    """Whether a grouped matrix product runs here without asking the host how large its groups are.

    It does on GPUs of compute capability 9 and 10 (Hopper, Blackwell) with PyTorch 2.8 or later. Elsewhere PyTorch
    copies the sizes to the host and loops (``use_fast_path`` in aten/src/ATen/native/cuda/GroupedBlas.cpp of
    https://github.com/pytorch/pytorch), which no graph can capture. So it is tried, with synchronization forbidden
    (https://docs.pytorch.org/docs/stable/generated/torch.cuda.set_sync_debug_mode.html).
    """
    if device.type != "cuda" or not hasattr(torch, "_grouped_mm"):
        return False
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        rows = torch.zeros(8, 64, device=device, dtype=torch.bfloat16)
        weights = torch.zeros(2, 64, 64, device=device, dtype=torch.bfloat16)
        grouped(rows, weights, torch.full((2,), 8, device=device, dtype=torch.int32), fused=True)
    except RuntimeError:
        return False
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return True


def grouped(rows: Tensor, weights: Tensor, ends: Tensor, *, fused: bool) -> Tensor:
    """Each group of rows times its own matrix.

    Parameters
    ----------
    rows
        [N, K], sorted by group.
    weights
        [E, M, K].
    ends
        int32[E]: where each group ends.
    fused
        As one kernel (see `graphable`); otherwise a product a group.

    Returns
    -------
    Tensor
        [N, M].
    """
    if fused:
        product = getattr(functional, "grouped_mm", None) or torch._grouped_mm
        out: Tensor = product(rows, weights.transpose(1, 2), offs=ends)
        return out
    out = rows.new_empty(rows.shape[0], weights.shape[1])
    first = 0
    for expert, last in enumerate(ends.tolist()):
        if last > first:
            torch.mm(rows[first:last], weights[expert].t(), out=out[first:last])
        first = last
    return out


def swiglu(inner: Tensor) -> Tensor:
    """[..., 2 F] -> [..., F]: silu of the first half times the second."""
    gate, up = inner.chunk(2, dim=-1)
    return functional.silu(gate) * up


def route(x: Tensor, router: Tensor, shape: DecoderShape) -> tuple[Tensor, Tensor]:
    """[B, W] -> weights [B, k], summing to one, and experts int64[B, k]: the k likeliest of each token."""
    chance, expert = functional.linear(x, router).float().softmax(dim=-1).topk(shape.experts_per_token, dim=-1)
    return (chance / chance.sum(dim=-1, keepdim=True)).to(x.dtype), expert


def experts(x: Tensor, layer: Layer, batch: Batch, shape: DecoderShape, *, fused: bool) -> Tensor:
    """[B, W] -> [B, W]: the network of a mixture of experts.

    Tokens are sorted by expert, multiplied in groups, put back into order and summed with the router's weights.
    """
    if layer.router is None or batch.ramp is None or batch.experts is None:
        raise RuntimeError("experts without a router")
    each = shape.experts_per_token
    weights, expert = route(x, layer.router, shape)
    expert, order = expert.flatten().sort(stable=True)
    ends = torch.searchsorted(expert, batch.experts, right=True, out_int32=True)
    rows = x[order // each]
    out = grouped(swiglu(grouped(rows, layer.up, ends, fused=fused)), layer.down, ends, fused=fused)
    place = torch.empty_like(order).scatter_(0, order, batch.ramp)
    return torch.bmm(weights[:, None], out[place].unflatten(0, (-1, each)))[:, 0]


class TimedDecoder:
    """A decoder with random weights, and the KV cache that target and drafter share.

    Parameters
    ----------
    shape
        Its sizes.
    maker
        Makes its weights.
    held_layers, cache_elements
        See `dsim.gpu_profile.grid.Memory`.
    fused
        Grouped products as one kernel; see `graphable`.
    """

    def __init__(
        self, shape: DecoderShape, maker: Maker, *, held_layers: int, cache_elements: int, fused: bool
    ) -> None:
        self.shape, self.maker, self.fused = shape, maker, fused
        self.embedding = maker.normal(shape.vocabulary, shape.width)
        self.head = self.embedding if shape.tied else maker.matrix(shape.vocabulary, shape.width)
        self.norm = maker.ones(shape.width)
        self.layers = [Layer.random(shape, maker) for _ in range(held_layers)]
        self.cache = maker.normal(cache_elements)

    def cache_of(self, index: int, batch: Batch) -> Tensor:
        """[R * keys, 2 kv_heads, head_dim]: what layer `index` reads and writes in this pass.

        Layers have parts of their own as far as the cache reaches, and then take turns.
        """
        size = batch.requests * batch.keys * self.shape.kv_elements
        first = index % (self.cache.numel() // size) * size
        return self.cache[first : first + size].view(-1, 2 * self.shape.kv_heads, self.shape.head_dim)

    def layer(self, x: Tensor, layer: Layer, cache: Tensor, batch: Batch, shape: DecoderShape) -> Tensor:
        """One layer: [B, W] -> [B, W]."""
        turned = shape.heads + shape.kv_heads
        qkv = functional.linear(norm(x, layer.norm, shape.norm_eps, shape.width), layer.qkv)
        heads = qkv.unflatten(-1, (-1, shape.head_dim))
        turn(heads[:, :turned], batch.cos, batch.sin, shape)
        cache.index_copy_(0, batch.slots, heads[:, shape.heads :])
        x = x + functional.linear(attend(heads[:, : shape.heads], cache, batch, shape), layer.out)
        normed = norm(x, layer.ffn_norm, shape.norm_eps, shape.width)
        if shape.experts:
            return x + experts(normed, layer, batch, shape, fused=self.fused)
        return x + functional.linear(swiglu(functional.linear(normed, layer.up)), layer.down)

    def hidden(self, ids: Tensor, batch: Batch) -> Tensor:
        """int64[B] -> [B, W]: hidden states after the final norm."""
        x = functional.embedding(ids, self.embedding)
        for index in range(self.shape.layers):
            held = self.layers[index % len(self.layers)]
            x = self.layer(x, held, self.cache_of(index, batch), batch, self.shape)
        return norm(x, self.norm, self.shape.norm_eps, self.shape.width)

    def step(self, ids: Tensor, batch: Batch) -> Tensor:
        """int64[B] -> int64[S]: a whole verify step or prefill, up to the likeliest next token of each scored one."""
        hidden = self.hidden(ids, batch)
        if batch.scored is not None:
            hidden = hidden[batch.scored]
        return functional.linear(hidden, self.head).argmax(dim=-1)
