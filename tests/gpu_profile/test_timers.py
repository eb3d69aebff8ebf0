"""The CUDA clock's order of calls, on a stand-in for ``torch.cuda``; the host's clock as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from dsim.gpu_profile import timers
from dsim.gpu_profile.timers import CudaTimer, HostTimer, timer_for


class ScriptedCuda:
    """What `CudaTimer` uses of ``torch.cuda``: every call goes to a log, and events read a clock that steps advance."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = 0.0
        self.current, self.capturing = "default", False
        self.streams = self.graphs = self.pools = 0

    def note(self, text: str) -> None:
        self.log.append(text if self.current == "default" else f"{self.current}: {text}")

    def synchronize(self) -> None:
        assert not self.capturing, "synchronized inside a capture"
        self.note("synchronize")

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.note(f"device {device}")
        yield

    def current_stream(self) -> str:
        return self.current

    def Stream(self) -> Any:
        self.streams += 1
        cuda = self

        class Stream:
            name = f"stream{self.streams}"

            def wait_stream(self, other: str) -> None:
                cuda.note(f"{self.name} waits for {other}")

        return Stream()

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def graph_pool_handle(self) -> str:
        self.pools += 1
        return f"pool{self.pools}"

    def CUDAGraph(self) -> Any:
        self.graphs += 1
        cuda, name = self, f"graph{self.graphs}"

        class Graph:
            work: Callable[[], object]

            def replay(self) -> None:
                cuda.note(f"replay {name}")
                cuda.now += 7.0

            def reset(self) -> None:
                cuda.note(f"reset {name}")

            def __str__(self) -> str:
                return name

        return Graph()

    @contextmanager
    def graph(self, graph: Any, *, pool: str, stream: Any) -> Iterator[None]:
        self.note(f"capture {graph} in {pool} on {stream.name}")
        self.capturing = True
        yield
        self.capturing = False
        self.note("captured")

    def Event(self, *, enable_timing: bool) -> Any:
        assert enable_timing
        cuda = self

        class Event:
            at = 0.0

            def record(self) -> None:
                self.at = cuda.now
                cuda.note("event")

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, other: Any) -> float:
                return float(other.at - self.at)

        return Event()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> ScriptedCuda:
    """A stand-in, with a primer that takes half a millisecond and no spinning up."""
    made = ScriptedCuda()

    def primer(self: CudaTimer) -> Callable[[], object]:
        def work() -> None:
            made.now += 0.5
            made.note("primer")

        return work

    monkeypatch.setattr(CudaTimer, "_make_primer", primer)
    monkeypatch.setattr(timers, "SPIN_UP_S", 0.0)
    monkeypatch.setattr(timers, "PRIMER_MS", 1.0)
    return made


def step_of(cuda: ScriptedCuda, ms: float) -> Callable[[], None]:
    def step() -> None:
        cuda.note("step")
        cuda.now += 0.0 if cuda.capturing else ms

    return step


def test_a_graph_is_warmed_up_captured_and_replayed_on_one_side_stream(cuda: ScriptedCuda) -> None:
    timer = CudaTimer(torch.device("cuda", 0), cuda)
    with timer.session():
        assert cuda.log[:2] == ["device cuda:0", "stream1 waits for default"]
        cuda.log.clear()
        with timer.ready(step_of(cuda, 3.0), graph=True) as run:
            assert cuda.log == [
                "stream1: step",
                "stream1: step",
                "stream1: capture graph1 in pool1 on stream1",
                "stream1: step",
                "stream1: captured",
            ]
            cuda.log.clear()
            assert run(True) == 7.0
            assert cuda.log == [f"stream1: {what}" for what in ("synchronize", "event", "replay graph1", "event")]
            cuda.log.clear()
            # Warm: two products of half a millisecond are queued, and nobody waits for them before the replay.
            assert run(False) == 7.0
            assert cuda.log == [f"stream1: {what}" for what in ("primer", "primer", "event", "replay graph1", "event")]
            cuda.log.clear()
            with timer.ready(step_of(cuda, 3.0), graph=True):
                assert "stream1: capture graph2 in pool1 on stream1" in cuda.log
            assert cuda.log[-2:] == ["stream1: synchronize", "stream1: reset graph2"]
        assert cuda.log[-1] == "stream1: reset graph1"
    assert cuda.pools == 1


def test_an_eager_pass_is_timed_from_its_first_launch(cuda: ScriptedCuda) -> None:
    timer = CudaTimer(torch.device("cuda"), cuda)
    with timer.session():
        cuda.log.clear()
        with timer.ready(step_of(cuda, 3.0), graph=False) as run:
            assert cuda.log == []  # the first pass is the cold one
            assert run(True) == 3.0
            assert cuda.log == [f"stream1: {what}" for what in ("synchronize", "event", "step", "event")]
            cuda.log.clear()
            assert run(False) == 3.0
            wanted = ("primer", "primer", "synchronize", "event", "step", "event")
            assert cuda.log == [f"stream1: {what}" for what in wanted]
    assert cuda.graphs == 0


def test_the_stand_in_offers_what_torch_has() -> None:
    for name in ("synchronize", "device", "current_stream", "Stream", "stream", "graph_pool_handle", "CUDAGraph"):
        assert hasattr(torch.cuda, name), name
    assert {"pool", "stream"} <= set(torch.cuda.graph.__init__.__code__.co_varnames)
    assert hasattr(torch.cuda.CUDAGraph, "replay")
    assert hasattr(torch.cuda.CUDAGraph, "reset")


def test_the_primer_multiplies_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers, "_PRIMER_WIDTH", 4)
    assert torch.equal(CudaTimer(torch.device("cpu"))._make_primer()(), torch.full((4, 4), 4.0, dtype=torch.bfloat16))


def test_the_host_times_a_pass_and_has_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 1.25])
    monkeypatch.setattr(timers.time, "perf_counter", lambda: next(clock))
    timer = timer_for(torch.device("cpu"))
    assert isinstance(timer, HostTimer)
    calls: list[bool] = []
    with timer.session(), timer.ready(lambda: calls.append(torch.is_inference_mode_enabled()), graph=False) as run:
        assert calls == []
        assert run(True) == 250.0
    assert calls == [True]
    with pytest.raises(RuntimeError, match="no graphs"), timer.ready(lambda: None, graph=True):
        pass


def test_a_cuda_device_gets_the_cuda_clock() -> None:
    assert isinstance(timer_for(torch.device("cuda")), CudaTimer)
