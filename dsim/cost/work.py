"""What a step costs by what it must read, compute and send: a law for machines whose steps nobody profiled.

`StepWork` counts bytes and operations from a model's sizes; `Machine` has the few constants that turn them into time
and that a measurement must give; `WorkCost` is the `StepCost` of both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dsim.errors import InputError
from dsim.profile import FloatArray, IntArray


class DecoderSizes(Protocol):
    """Sizes of a decoder, with the names of `dsim.gpu_profile.shapes.DecoderShape` (experts 0: a dense network)."""

    @property
    def layers(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def ffn(self) -> int: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def experts(self) -> int: ...
    @property
    def experts_per_token(self) -> int: ...


@dataclass(frozen=True)
class StepWork:
    """What one step moves and computes on each GPU. Embedding look-ups, norms and attention scores are left out.

    Parameters
    ----------
    weight_bytes
        Weights that every step reads: attention, router, dense networks, LM head.
    token_flop
        Operations a token in those weights, LM head left out (it runs for the sampled tokens only).
    kv_bytes
        KV cache a token of context.
    expert_bytes, expert_flop
        All routed experts on the GPU; operations that a token of the step costs it in them.
    experts, experts_per_token
        Experts of a layer, and how many each token is routed to; 0 and 0 without.
    link_bytes
        What the GPU sends to the others for each token of the step.
    ranks
        Data-parallel ranks that share the step: each has its part of the requests and tokens, and of the experts.
    gpus
        GPUs that take part.
    """

    weight_bytes: float
    token_flop: float
    kv_bytes: float
    expert_bytes: float = 0.0
    expert_flop: float = 0.0
    experts: int = 0
    experts_per_token: int = 0
    link_bytes: float = 0.0
    ranks: int = 1
    gpus: int = 1

    def touched(self, tokens: FloatArray) -> FloatArray:
        """Share of the experts that a step of so many tokens reads, if the router chose evenly at random."""
        if not self.experts:
            return np.zeros_like(tokens)
        return np.asarray(1.0 - (1.0 - self.experts_per_token / self.experts) ** tokens)


def decoder_work(
    sizes: DecoderSizes, *, tensor_parallel: int = 1, data_parallel: int = 1, bytes_per_number: int = 2
) -> StepWork:
    """Count a decoder's work a step.

    Parameters
    ----------
    sizes
        The model.
    tensor_parallel
        GPUs that share every matrix; two ring all-reduces of the hidden states a layer.
    data_parallel
        Ranks that each hold the dense part and a share of the experts (expert parallelism); one all-gather and one
        reduce-scatter of the hidden states a layer.
    bytes_per_number
        Of weights, hidden states and KV cache.

    Raises
    ------
    InputError
        Counts below 1, both kinds of parallelism at once, or data parallelism without experts (which is two replicas).
    """
    for name, value in (
        ("tensor_parallel", tensor_parallel),
        ("data_parallel", data_parallel),
        ("bytes_per_number", bytes_per_number),
    ):
        if value < 1:
            raise InputError(field=name, value=value, expected="an integer >= 1")
    if data_parallel > 1 and (tensor_parallel > 1 or not sizes.experts):
        why = "experts" if tensor_parallel == 1 else "tensor_parallel = 1"
        raise InputError(field="data_parallel", value=data_parallel, expected=f"1, or a model with {why}")
    attention = sizes.width * sizes.head_dim * (2 * sizes.heads + 2 * sizes.kv_heads)
    network = 3 * sizes.width * sizes.ffn
    dense = sizes.layers * (attention + (sizes.width * sizes.experts or network))
    experts = sizes.layers * network * sizes.experts
    gpus = max(tensor_parallel, data_parallel)
    # A ring of n passes (n - 1)/n of the data around in each half of an all-reduce.
    sent = 2 * (gpus - 1) / gpus * sizes.width * bytes_per_number * sizes.layers
    return StepWork(
        weight_bytes=bytes_per_number * (dense + sizes.width * sizes.vocabulary) / tensor_parallel,
        token_flop=2.0 * dense / tensor_parallel,
        kv_bytes=bytes_per_number * sizes.layers * 2 * sizes.kv_heads * sizes.head_dim / tensor_parallel,
        expert_bytes=bytes_per_number * experts / gpus,
        expert_flop=2.0 * sizes.layers * network * sizes.experts_per_token / gpus,
        experts=sizes.experts,
        experts_per_token=sizes.experts_per_token,
        link_bytes=sent * (2 if tensor_parallel > 1 else 1),
        ranks=data_parallel,
        gpus=gpus,
    )


@dataclass(frozen=True)
class Machine:
    """Effective speeds: what a measurement shows, below what a data sheet promises.

    Parameters
    ----------
    bandwidth_gb_s
        Memory bandwidth of one GPU, 10^9 bytes a second.
    compute_tflop_s
        Arithmetic throughput of one GPU, 10^12 operations a second.
    overhead_ms
        Of every step, whatever is in it: launches, gaps, latencies of collectives.
    request_ms
        Of every request in decode: sampling, preparing its inputs.
    link_gb_s
        What one GPU can send to the others; infinite where nothing is sent.
    """

    bandwidth_gb_s: float
    compute_tflop_s: float
    overhead_ms: float = 0.0
    request_ms: float = 0.0
    link_gb_s: float = math.inf

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            lowest = value >= 0 if item.name.endswith("_ms") else value > 0
            if not lowest or (math.isinf(value) and item.name.endswith("_ms")):
                expected = "a finite number >= 0" if item.name.endswith("_ms") else "a number > 0"
                raise InputError(field=item.name, value=value, expected=expected)


@dataclass(frozen=True, eq=False)
class WorkCost:
    """A `StepCost` from `StepWork` and `Machine`.

    A step with B tokens, R of them of requests in decode with a mean context of c tokens, on n data-parallel ranks:

    ``overhead + max(W / bw, f B / n / F) + max(E touched(B) / bw, e B / F) + (kv c / bw + request) R / n + s B / link``

    Each group of matrices is as slow as the slower of reading it and computing with it; groups, cache and link follow
    one another.

    Parameters
    ----------
    label
        Where the constants come from.
    work, machine
        What is done, and how fast.
    max_tokens, max_verify_requests, contexts
        The region where the constants were seen to hold: tokens and requests of a step, and (int64[2]) mean contexts.
    min_tokens
        Smallest such step.
    allow_extrapolation
        Price what lies outside too, instead of raising. Runs say ``extrapolated`` either way.

    Examples
    --------
    >>> work = StepWork(weight_bytes=16e9, token_flop=15e9, kv_bytes=131072)
    >>> cost = WorkCost("assumed:box", work, Machine(1000.0, 150.0, overhead_ms=2.0), 2048, 128, np.array([0, 8192]))
    >>> table = cost.verify_table(100, 2048, context=1000.0)
    >>> [round(float(table[tokens]), 4) for tokens in (100, 2048)]  # 2 + 16 + 13.1 ms; then 204.8 instead of 16
    [31.1072, 219.9072]
    """

    label: str
    work: StepWork
    machine: Machine
    max_tokens: int
    max_verify_requests: int
    contexts: IntArray
    min_tokens: int = 1
    allow_extrapolation: bool = False
    max_requests: int = field(default=0, init=False)
    capture_limit: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        contexts = np.asarray(self.contexts, dtype=np.int64)
        if contexts.shape != (2,) or not 0 <= contexts[0] <= contexts[1]:
            raise InputError(field="contexts", value=contexts.tolist(), expected="two lengths >= 0, ascending")
        if not 1 <= self.min_tokens <= self.max_tokens:
            raise InputError(field="min_tokens", value=self.min_tokens, expected=f"1 to max_tokens ({self.max_tokens})")
        object.__setattr__(self, "contexts", contexts)

    @property
    def gpus(self) -> int:
        """GPUs of the replica."""
        return self.work.gpus

    @property
    def depends_on_requests(self) -> bool:
        """Always: requests bring their cache and their own overhead."""
        return True

    @property
    def depends_on_context(self) -> bool:
        """Always: a longer context is a larger cache to read."""
        return True

    @property
    def captured_sizes(self) -> IntArray:
        """None."""
        return np.zeros(0, dtype=np.int64)

    @property
    def max_prefill_tokens(self) -> int:
        """Longest prompt that `prefill_ms` prices."""
        return self.max_tokens

    def verify_table(self, requests: int, max_tokens: int, context: float | None = None) -> FloatArray:
        """float64[max_tokens + 1]: ms of a step by the tokens in it; entry 0 is 0.

        Raises
        ------
        InputError
            No context, or (unless extrapolation is allowed) a step outside the region.
        """
        if context is None or not math.isfinite(context) or context < 0:
            raise InputError(field="context", value=context, expected="the batch's mean context, tokens")
        if requests < 0 or max_tokens < 0:
            bad, value = ("requests", requests) if requests < 0 else ("max_tokens", max_tokens)
            raise InputError(field=bad, value=value, expected="an integer >= 0")
        low, high = self.contexts.tolist()
        self._inside("tokens", max_tokens, 0, self.max_tokens)
        self._inside("requests", requests, 0, self.max_verify_requests)
        if requests:
            self._inside("context", context, low, high)
        tokens = np.arange(max_tokens + 1.0)
        table: FloatArray = np.round(self.steps_ms(np.float64(requests), tokens, requests * context), 6)
        table[0] = 0.0
        table.setflags(write=False)
        return table

    def steps_ms(self, requests: npt.ArrayLike, tokens: npt.ArrayLike, context_tokens: npt.ArrayLike) -> FloatArray:
        """Milliseconds of many steps at once, by requests in decode, all tokens, and all tokens of their contexts.

        The arguments are broadcast together. No limits are checked, and nothing is rounded.
        """
        reading, computing, rest = self._parts(requests, tokens, context_tokens)
        return np.asarray(rest + np.maximum(reading, computing).sum(axis=0))

    def floors_ms(
        self, requests: npt.ArrayLike, tokens: npt.ArrayLike, context_tokens: npt.ArrayLike
    ) -> tuple[FloatArray, FloatArray]:
        """The least that reading, and computing, can take at these speeds: no step may be shorter than either.

        Reading: all weights that the step touches and the cache; computing: all operations. Milliseconds.
        """
        reading, computing, _ = self._parts(requests, tokens, context_tokens)
        return np.asarray(reading.sum(axis=0) + self._cache_ms(context_tokens)), np.asarray(computing.sum(axis=0))

    def _cache_ms(self, context_tokens: npt.ArrayLike) -> FloatArray:
        read = self.work.kv_bytes * np.asarray(context_tokens, dtype=np.float64) / self.work.ranks
        return np.asarray(read / self.machine.bandwidth_gb_s * 1e-6)

    def _parts(
        self, requests: npt.ArrayLike, tokens: npt.ArrayLike, context_tokens: npt.ArrayLike
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Reading and computing [2 groups of matrices, steps], and all the rest [steps], milliseconds."""
        work, machine = self.work, self.machine
        size = np.asarray(tokens, dtype=np.float64)
        read = np.stack([np.full_like(size, work.weight_bytes), work.expert_bytes * work.touched(size)])
        flop = np.stack([work.token_flop * size / work.ranks, work.expert_flop * size])
        hosted = machine.request_ms * np.asarray(requests, dtype=np.float64) / work.ranks
        sent = work.link_bytes * size / machine.link_gb_s * 1e-6
        rest = machine.overhead_ms + self._cache_ms(context_tokens) + hosted + sent
        return read / machine.bandwidth_gb_s * 1e-6, flop / machine.compute_tflop_s * 1e-9, rest

    def _inside(self, name: str, value: float, low: float, high: float) -> None:
        if not self.allow_extrapolation and not low <= value <= high:
            raise InputError(
                f"{self.label} says nothing about such a step",
                field=name,
                value=value,
                expected=f"{low:g} to {high:g}, or allow_extrapolation",
            )

    def draft_ms(self, requests: int, passes: int = 1) -> float:
        """0 without a draft; there is no drafter in the law."""
        if requests and passes:
            raise InputError(
                f"{self.label} has no drafter", field="requests", value=requests, expected="a cost model with drafts"
            )
        return 0.0

    def prefill_ms(self, tokens: int) -> float:
        """Milliseconds that a prompt of so many tokens takes alone."""
        return float(self.verify_table(0, tokens, 0.0)[tokens])
