"""Clocks: one for the host, one for CUDA devices. All that only CUDA can do is in `CudaTimer`.

A timer makes a step ready and hands out a function that runs and times it once. On CUDA a step is either captured as a
graph and replayed, which is timed as the device's own time, or launched kernel by kernel (*eager*), where the time that
the host needs to launch counts where it is longer than the kernels.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

#: Runs a step once and returns its milliseconds; True for the first, cold one.
Run = Callable[[bool], float]

#: Passes before a capture, on the stream that captures: libraries set themselves up and choose their kernels.
WARM_UPS = 2
#: Work queued before a timed replay, milliseconds, and the seconds of it before the first size of a run.
PRIMER_MS, SPIN_UP_S = 2.0, 1.5
_PRIMER_WIDTH = 4096


class Timer(Protocol):
    """What `dsim.gpu_profile.measure` needs of a clock.

    Attributes
    ----------
    graphs
        Whether steps can be replayed as graphs.
    """

    graphs: bool

    def session(self) -> AbstractContextManager[None]:
        """Everything that is allocated or timed happens inside."""
        ...

    def ready(self, step: Callable[[], object], *, graph: bool) -> AbstractContextManager[Run]:
        """A step made ready; what was captured for it is given back at the end."""
        ...


class HostTimer:
    """Wall time of the host. No graphs."""

    graphs = False

    @contextmanager
    def session(self) -> Iterator[None]:
        """No gradients."""
        with torch.inference_mode():
            yield

    @contextmanager
    def ready(self, step: Callable[[], object], *, graph: bool) -> Iterator[Run]:
        """See `Timer.ready`; `graph` must be False."""
        if graph:
            raise RuntimeError("there are no graphs on the host")

        def run(cold: bool) -> float:
            began = time.perf_counter()
            step()
            return 1e3 * (time.perf_counter() - began)

        yield run


class CudaTimer:
    """Events of a CUDA device, with graphs.

    Parameters
    ----------
    device
        The device.
    cuda
        Stand-in for ``torch.cuda``, for tests without a device.

    Notes
    -----
    Facts that this follows (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs and torch/cuda/graphs.py):

    - A step is warmed up on a side stream, and captured on the *same* one: workspaces of cuBLAS belong to a stream,
      and would otherwise be allocated in the middle of a capture.
    - Graphs share a memory pool. None runs beside another and no result is read later, so later graphs may overwrite
      what earlier ones left; captured largest first, the smaller ones find their memory there. A pool lives as long as
      one of its graphs, and a handle whose graphs are all gone must not be used again ("use_count > 0 INTERNAL ASSERT",
      https://github.com/vllm-project/vllm/issues/28426): so the first graph that is made ready has to stay until the
      others are done (`dsim.gpu_profile.measure` keeps it, to watch for drift).
    - A graph replays addresses: the tensors that its step reads are allocated before the capture, outside the pool, and
      live as long as it does.
    - On Hopper and Blackwell PyTorch 2.13 prefers cuDNN for attention, which builds a plan for each size of the cache.
      Flash attention is asked for instead; it splits long caches over the whole device.

    Before a timed pass a few matrix products are queued. They keep the clocks up between sizes, and put other data into
    the caches. Before a replay they are still running while the host launches the graph, so the events enclose the
    device's work and nothing else. Before an eager pass they are waited for: there the launches are part of the time.
    The cold first pass has no such work before it.
    """

    graphs = True

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._stream: Any = None
        self._pool: Any = None
        self._primer: Callable[[], object] = lambda: None
        self._products = 1

    @contextmanager
    def session(self) -> Iterator[None]:
        """A side stream of the device, no gradients, flash attention; clocks are brought up."""
        kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            stack.enter_context(self._cuda.device(self._device))
            self._stream = self._cuda.Stream()
            self._stream.wait_stream(self._cuda.current_stream())
            stack.enter_context(self._cuda.stream(self._stream))
            stack.enter_context(sdpa_kernel(kernels))
            self._primer = self._make_primer()
            self._spin_up()
            yield
            self._cuda.synchronize()

    @contextmanager
    def ready(self, step: Callable[[], object], *, graph: bool) -> Iterator[Run]:
        """See `Timer.ready`; inside `session` only."""
        if not graph:
            yield lambda cold: self._time(step, queued=False, cold=cold)
            return
        for _ in range(WARM_UPS):
            step()
        captured = self._cuda.CUDAGraph()
        if self._pool is None:
            self._pool = self._cuda.graph_pool_handle()
        with self._cuda.graph(captured, pool=self._pool, stream=self._stream):
            step()
        try:
            yield lambda cold: self._time(captured.replay, queued=True, cold=cold)
        finally:
            self._cuda.synchronize()
            captured.reset()

    def _time(self, work: Callable[[], object], *, queued: bool, cold: bool) -> float:
        """Milliseconds between two events around `work`, on the session's stream."""
        start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        if not cold:
            self._prime(self._products)
        if cold or not queued:
            self._cuda.synchronize()
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    def _make_primer(self) -> Callable[[], object]:
        left: Tensor = torch.ones(_PRIMER_WIDTH, _PRIMER_WIDTH, device=self._device, dtype=torch.bfloat16)
        out = torch.empty_like(left)
        return lambda: torch.mm(left, left, out=out)

    def _prime(self, products: int) -> None:
        for _ in range(products):
            self._primer()

    def _spin_up(self) -> None:
        """Run matrix products until the clocks are up; how many of them last `PRIMER_MS` is what came last."""
        until = time.monotonic() + SPIN_UP_S
        while True:
            each = self._time(lambda: self._prime(8), queued=False, cold=True) / 8
            if time.monotonic() >= until:
                break
        self._products = max(1, math.ceil(PRIMER_MS / max(each, 1e-3)))


def timer_for(device: torch.device) -> Timer:
    """The clock of a device."""
    return CudaTimer(device) if device.type == "cuda" else HostTimer()
