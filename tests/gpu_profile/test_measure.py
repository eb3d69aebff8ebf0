"""The run: repeats, the cold one, the budget, drift, and that a profile broken off anywhere can be used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from dsim.cost import fit
from dsim.errors import InputError
from dsim.gpu_profile.grid import Case, Grid, Memory, schedule
from dsim.gpu_profile.measure import Bench, Drift, Step, Timed, measure, profile_of, samples_of
from dsim.gpu_profile.shapes import models
from dsim.gpu_profile.timers import HostTimer, Run
from dsim.profile import MISSING, Profile

TARGET, DRAFTER = models("tiny")
GRID = Grid(
    contexts=(16, 32),
    capture_limit=32,
    eager=(48, 64),
    tokens_per_request=(4,),
    max_requests=8,
    draft_context=16,
    prefill=(8, 64),
)
A, B, C = (Case("verify", tokens, 1, 16, graph=True) for tokens in (8, 4, 2))


@dataclass
class Script:
    """A clock, a timer and steps in one: every call goes to `log`, a pass takes 1 ms a token (cold: 10 ms more)."""

    log: list[str] = field(default_factory=list)
    now: float = 0.0
    graphs: bool = True

    def step(self, case: Case) -> Step:
        self.log.append(f"make {case.tokens}")
        return Step(lambda: case.tokens, lambda: self.log.append(f"refresh {case.tokens}"))

    @contextmanager
    def ready(self, step: Callable[[], object], *, graph: bool) -> Iterator[Run]:
        tokens = step()
        assert isinstance(tokens, int)
        self.now += 1.0
        self.log.append(f"ready {tokens} {graph}")

        def run(cold: bool) -> float:
            self.log.append(f"run {tokens}{' cold' if cold else ''}")
            return tokens + 10.0 * cold

        try:
            yield run
        finally:
            self.log.append(f"done {tokens}")

    def session(self) -> object:
        raise NotImplementedError

    def times(self, cases: list[Case], deadline: float = np.inf) -> tuple[list[Timed], Drift]:
        drift = Drift()
        found = measure(
            cases,
            self.step,
            self,  # type: ignore[arg-type]
            repeats=3,
            drift=drift,
            deadline=deadline,
            clock=lambda: self.now,
        )
        return list(found), drift


def test_each_case_is_made_run_and_given_back_and_the_first_one_last() -> None:
    script = Script()
    timed, drift = script.times([A, B])
    assert timed == [Timed(A, (18.0, 8.0, 8.0)), Timed(B, (14.0, 4.0, 4.0))]
    assert script.log == [
        "make 8",
        "ready 8 True",
        *("refresh 8", "run 8 cold", "refresh 8", "run 8", "refresh 8", "run 8"),
        "run 8",  # drift
        "make 4",
        "ready 4 True",
        *("refresh 4", "run 4 cold", "refresh 4", "run 4", "refresh 4", "run 4"),
        "done 4",
        "run 8",
        "done 8",
    ]
    assert (drift.case, drift.ms) == (A, [8.0, 8.0])


def test_a_case_is_begun_only_if_the_longest_so_far_would_still_fit() -> None:
    # Each takes a second: the third would end at 3.
    assert [item.case for item in Script().times([A, B, C], deadline=3.0)[0]] == [A, B, C]
    assert [item.case for item in Script().times([A, B, C], deadline=2.9)[0]] == [A, B]
    assert Script().times([A, B, C], deadline=-1.0)[0] == []


def test_what_is_open_is_closed_when_the_run_is_left_early() -> None:
    script = Script()
    results = measure([A, B, C], script.step, script, repeats=1, drift=Drift())  # type: ignore[arg-type]
    next(results)
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert script.log[-2:] == ["done 4", "done 8"]


def test_out_of_memory_names_the_case() -> None:
    script = Script()

    def step(case: Case) -> Step:
        if case is B:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return script.step(case)

    results = measure([A, B], step, script, repeats=1, drift=Drift())  # type: ignore[arg-type]
    assert next(results).case is A
    with pytest.raises(InputError, match=r"ran out of memory, got 'verify of 4 tokens, 1 requests at context 16'"):
        next(results)
    assert script.log[-1] == "done 8"


def test_drift_in_words() -> None:
    assert str(Drift()) == "no step was timed again"
    assert str(Drift(A, [8.0, 10.0, 11.0])) == (
        "the verify of 8 tokens, 1 requests at context 16 was timed 3 times over the run: median 10.0000 ms, "
        "-20.0 to +10.0 %"
    )


def profile(timed: list[Timed]) -> Profile:
    return profile_of(timed, name="t", hardware="h", model="m", engine="e", source="s", notes="")


def test_samples_stand_in_the_order_that_a_profile_needs() -> None:
    timed = [
        Timed(Case("draft", 14, 2, 16, True), (2.0,)),
        Timed(Case("verify", 8, 2, 32, True), (9.0, 8.0)),
        Timed(Case("prefill", 8, 1, 0, True), (5.0,)),
        Timed(Case("verify", 8, 2, 16, True), (7.0, 6.0)),
        Timed(Case("verify", 4, 1, 32, True), (4.0,)),
    ]
    found = samples_of(timed)
    assert list(zip(found.kind, found.tokens, found.requests, found.context_tokens, found.ms, found.repeat)) == [  # noqa: B905
        ("verify", 8, 2, 16, 7.0, 0),
        ("verify", 8, 2, 16, 6.0, 1),
        ("verify", 4, 1, 32, 4.0, 0),
        ("verify", 8, 2, 32, 9.0, 0),
        ("verify", 8, 2, 32, 8.0, 1),
        ("draft", 14, 2, 16, 2.0, 0),
        ("prefill", 8, 1, MISSING, 5.0, 0),
    ]
    made = profile(timed)
    assert (made.captured_sizes.tolist(), made.capture_limit) == ([4, 8], 8)
    with pytest.raises(InputError, match="no verify samples"):
        profile(timed[:1])


@pytest.mark.parametrize("graphs", [True, False])
def test_a_run_broken_off_anywhere_leaves_a_profile_that_can_be_fitted(graphs: bool) -> None:
    cases = schedule(GRID, DRAFTER, graphs=graphs)
    timed = [Timed(case, tuple(case.tokens + case.context / 64 + extra for extra in (5.0, 0.1, 0.0))) for case in cases]
    for end in range(1, len(timed) + 1):
        cost = fit(profile(timed[:end]))
        assert cost.verify_table(8, 32, 16.0)[32] == pytest.approx(32.35)
    assert cost.max_tokens == 64
    assert cost.contexts.tolist() == [16, 32]
    assert cost.verify_table(8, 64, 24.0)[64] == pytest.approx(64 + 24 / 64 + 0.1)
    assert cost.draft_ms(8) == pytest.approx(56 + 0.25 + 0.1)
    assert cost.prefill_ms(8) == pytest.approx(8.1)


def test_a_coarse_profile_is_coarse_at_all_contexts_alike() -> None:
    cases = schedule(GRID, DRAFTER, graphs=True)
    for end in range(2, len(cases) + 1):
        counts = [sum(case.kind == "verify" and case.context == at for case in cases[:end]) for at in GRID.contexts]
        assert counts[0] - counts[1] in (0, 1)


def test_several_request_counts_are_for_the_additive_fit() -> None:
    grid = Grid((16,), 16, (), (1, 4), 8, 16, ())
    timed = [
        Timed(case, (1.0 + 0.5 * case.requests + 0.25 * case.tokens,)) for case in schedule(grid, DRAFTER, graphs=True)
    ]
    made = profile(timed)
    with pytest.raises(InputError, match="several request counts"):
        fit(made)
    table = fit(made, "additive").verify_table(2, 16)
    assert table[16] == pytest.approx(1.0 + 1.0 + 4.0)


@pytest.mark.parametrize("preset", ["tiny", "tiny-moe"])
def test_the_whole_run_on_the_host(preset: str) -> None:
    target, drafter = models(preset)
    timer = HostTimer()
    cases = schedule(Grid((8,), 4, (6,), (2,), 2, 8, (4,)), drafter, graphs=False)
    with timer.session():
        bench = Bench(target, drafter, Memory(2, 1 << 16), device=torch.device("cpu"), dtype=torch.float32, seed=1)
        timed = list(measure(cases, bench.step, timer, repeats=2, drift=Drift()))
    assert [item.case for item in timed] == list(cases)
    assert all(len(item.ms) == 2 and min(item.ms) > 0 for item in timed)
    assert fit(profile(timed)).max_requests == 2


def test_a_deep_model_in_bfloat16_stays_finite() -> None:
    target, drafter = models("tiny-moe", {"layers": 40})
    with torch.inference_mode():
        bench = Bench(target, drafter, Memory(40, 1 << 18), device=torch.device("cpu"), dtype=torch.bfloat16, seed=1)
        hidden: list[torch.Tensor] = []
        bench.target.hidden, inner = (
            lambda ids, batch: hidden.append(inner(ids, batch)) or hidden[-1],
            bench.target.hidden,
        )  # type: ignore[method-assign,func-returns-value,assignment]
        bench.step(Case("verify", 12, 4, 8, graph=False)).run()
    assert torch.isfinite(hidden[0]).all()
    assert hidden[0].float().square().mean().sqrt().item() == pytest.approx(1.0, abs=0.05)
