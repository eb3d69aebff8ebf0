"""The profiling script at toy size on the CPU: what it writes is a profile, and bad input is one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dsim.cost import FITS, fit
from dsim.gpu_profile.grid import plan_memory, schedule
from dsim.gpu_profile.measure import Bench, Step
from dsim.gpu_profile.shapes import models
from dsim.profile import load_profile
from experiments import profile_gpu, profile_report
from experiments._common import run_main

TOY = ("--device", "cpu", "--preset", "tiny", "--contexts", "16,48", "--capture-limit", "16", "--max-requests", "4")
SMALL = (*TOY, "--eager", "24,32", "--prefill", "8,16", "--repeats", "3")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(*arguments: str) -> int:
    """Exit code of the script."""
    with pytest.raises(SystemExit) as ended:
        run_main(lambda: profile_gpu.main(arguments))
    assert isinstance(ended.value.code, int)
    return ended.value.code


def files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_a_toy_profile_is_read_fitted_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run(*SMALL, "--set", "layers=3", "--set", "drafter.gamma=3", "--name", "toy", "--out", str(out)) == 0
    assert files(out) == ["profile_gpu.png", "profile_gpu.svg", "toy.csv", "toy.toml"]
    profile = load_profile(out / "toy.toml")
    verify, draft, prefill = (profile.samples.of(kind) for kind in ("verify", "draft", "prefill"))
    # 1, 2, 4, 8, 16 and the two eager ones, at two contexts, three repeats each.
    assert sorted(set(verify.tokens.tolist())) == [1, 2, 4, 8, 16, 24, 32]
    assert len(verify) == 7 * 2 * 3
    sizes = {(int(tokens), int(requests)) for tokens, requests in zip(verify.tokens, verify.requests, strict=True)}
    assert {(4, 1), (8, 2), (24, 4), (32, 4)} <= sizes
    assert sorted(set(draft.requests.tolist())) == [1, 2, 4]
    assert set(draft.context_tokens.tolist()) == {48}
    assert set((draft.tokens / draft.requests).tolist()) == {3.0}
    assert sorted(set(prefill.tokens.tolist())) == [8, 16]
    assert set(verify.repeat.tolist()) == {0, 1, 2}
    assert profile.capture_limit == 0  # the host replays no graphs
    assert "tiny (layers 3)" in profile.model
    assert "block 3" in profile.model
    assert "All sizes timed." in profile.notes
    for name in FITS:
        if name != "roofline-moe":  # which needs ten sizes
            cost = fit(profile, name)
            assert cost.verify_table(4, 32, 32.0)[32] > 0
    assert cost.contexts.tolist() == [16, 48]

    text = capsys.readouterr().out
    assert "ms at 16  ms at 48" in text
    assert f"profile_report.py {out / 'toy.toml'}" in text
    profile_report.main(
        [str(out / "toy.toml"), "--fit", "staircase", "--context", "48", "--out", str(tmp_path / "report")]
    )
    assert "toy (measured)" in capsys.readouterr().out


def test_the_page_counts_the_sizes_of_the_prepared_run() -> None:
    given = profile_gpu.options().parse_args([])
    assert (given.preset, given.contexts, given.minutes) == ("qwen3-8b", (512, 2048, 8192), 8.0)
    target, drafter = models(given.preset)
    cases = schedule(profile_gpu.grid_of(given, target.vocabulary), drafter, graphs=True)
    counts = [sum(case.kind == kind for case in cases) for kind in ("verify", "draft", "prefill")]
    page = (Path(__file__).parents[2] / "docs" / "profile-gpu.md").read_text(encoding="utf-8")
    assert "{} verify sizes, {} drafts and {} prefills".format(*counts) in page
    # It fits on a device of 80 GB, with all weights held.
    memory = plan_memory(target, drafter, cases, item_bytes=2, free_bytes=79 * 2**30)
    assert memory.held_layers == target.layers


def test_experts_run_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_gpu, "draw", lambda folder, profile: None)
    options = ("--preset", "tiny-moe", "--contexts", "16", "--prefill", "none", "--eager", "none")
    assert run(*TOY, *options, "--repeats", "1", "--out", str(tmp_path)) == 0
    profile = load_profile(tmp_path / "cpu-tiny-moe.toml")
    assert "8 experts of 32, 2 a token" in profile.model
    assert "prefill" not in profile.samples.kind


def test_a_run_that_is_interrupted_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, made = Bench.step, []

    def step(self: Bench, case: object) -> Step:
        made.append(case)
        if len(made) == 6:
            raise KeyboardInterrupt
        return plain(self, case)  # type: ignore[arg-type]

    monkeypatch.setattr(Bench, "step", step)
    out = tmp_path / "out"
    assert run(*SMALL, "--name", "toy", "--out", str(out)) == 130
    assert files(out) == ["toy.csv", "toy.toml"]
    profile = load_profile(out / "toy.toml")
    assert "5 of 19 sizes timed" in profile.notes
    assert sorted(set(profile.samples.of("verify").tokens.tolist())) == [1, 16]
    assert fit(profile).contexts.tolist() == [16, 48]
    assert "kept: 5 of 19 sizes" in capsys.readouterr().err


def test_the_budget_ends_a_run_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Each look at this clock takes a second. A minute less its tenth leaves 54: the folder and the models take 1, and
    # each size 3 (its begin, its end, whether to save).
    clock = iter(range(10_000))
    monkeypatch.setattr(profile_gpu, "draw", lambda folder, profile: None)
    monkeypatch.setattr(profile_gpu, "_clock", lambda: next(clock))
    monkeypatch.setattr(profile_gpu, "SAVE_EVERY_S", 1e9)
    assert run(*SMALL, "--minutes", "1", "--name", "toy", "--out", str(tmp_path)) == 0
    profile = load_profile(tmp_path / "toy.toml")
    assert " 18 of 19 sizes timed, coarse to fine." in profile.notes


def test_no_time_at_all_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*SMALL, "--minutes", "1e-9", "--out", str(tmp_path / "out")) == 2
    assert "field '--minutes': no size was timed, got 1e-09" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "cuda:99"), "field '--device': there are"),
        (("--device", "tpu"), "field '--device'"),
        (("--device", "meta"), "field '--device': there are"),
        (("--preset", "gpt"), "unknown preset, got 'gpt'"),
        (("--set", "layers"), "expected KEY=VALUE"),
        (("--set", "layers=2", "--set", "layers=3"), "field '--set': a size is set twice"),
        (("--set", "width=2.5"), "field 'width': got 2.5, expected an integer >= 1"),
        (("--set", "depth=2"), "field 'depth': unknown size"),
        (("--contexts", "48,16"), "field 'contexts': got [48, 16]"),
        (("--contexts", "none"), "field 'contexts': got [], expected at least one"),
        (("--contexts", "a,b"), "got 'a,b', expected integers with commas between, or none"),
        (("--draft-context", "17"), "field 'draft_context': got 17, expected one of 16, 48"),
        (("--capture-limit", "20"), "field 'capture_limit': got 20"),
        (("--eager", "8"), "field 'eager': got 8, expected sizes above the capture limit, 16"),
        (("--prefill", "1024"), "field 'vocabulary': the tokens of a pass are distinct, got 512"),
        (("--minutes", "0"), "got '0', expected a number > 0"),
        (("--repeats", "0"), "got '0', expected an integer >= 1"),
        (("--name", "A B"), "field '--name': got 'A B'"),
        (("--preset", "qwen3-8b"), "Qwen3-8B does not fit"),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*SMALL, *arguments, "--out", str(tmp_path / "out")) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    assert message in text
    assert not (tmp_path / "out").exists() or files(tmp_path / "out") == []


def test_the_folder_is_checked_before_anything_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert run(*SMALL, "--out", str(tmp_path / "file")) == 2
    assert "is a file" in capsys.readouterr().err
