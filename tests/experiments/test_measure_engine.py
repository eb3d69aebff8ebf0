"""measure_engine.py and the validation case `here`, on a tiny target under a clock that knows what everything costs."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

torch = pytest.importorskip("torch")

from dsim.drafter.build import DrafterFile, write_drafter  # noqa: E402
from dsim.drafter.drafter import FINAL, DrafterConfig  # noqa: E402
from dsim.drafter.parallel import ParallelDrafter  # noqa: E402
from dsim.drafter.target import LlamaTarget  # noqa: E402
from dsim.drafter.tiny import tiny_target  # noqa: E402
from dsim.drafter.train import new_drafter  # noqa: E402
from dsim.policy import load_policy, make_view  # noqa: E402
from dsim.profile import read_profile  # noqa: E402
from experiments import _engine_measure, _engine_runs, _validate_here, measure_engine, record_banks, validate  # noqa: E402
from experiments._common import run_main  # noqa: E402
from experiments._engine_runs import Prices, fitted_host, open_measurement, read_measured  # noqa: E402
from experiments._validate import RunOptions, error_summary  # noqa: E402
from experiments._validate_here_page import headline, page_section  # noqa: E402

ARMS = ("none", "fixed:k=1", "dspark")


class KnownClock:
    """Time that passes with what the models do, and with nothing else; the machine gets slower and faster."""

    def __init__(self) -> None:
        self.ms = 0.0

    def __call__(self) -> int:
        self.ms += 0.1  # the host: a reading a part
        return round(self.ms * 1e6)

    def spend(self, ms: float) -> None:
        self.ms += ms * (1 + 0.2 * np.sin(self.ms / 20_000))

    def install(self, patch: pytest.MonkeyPatch) -> None:
        packed, logits, draft = LlamaTarget.packed, LlamaTarget.logits, ParallelDrafter.draft

        def timed_packed(target: Any, tokens: Any, segments: Any, cache: Any, taps: Any = ()) -> Any:
            # 20 ms, 1 ms a token (3 tokens are slow), and each text's length.
            read = sum(s.length * (s.start + s.length / 2) for s in segments)
            self.spend(20 + len(tokens) + 4 * (len(tokens) == 3) + 0.5 * len(segments) + 0.004 * read)
            return packed(target, tokens, segments, cache, taps)

        def timed_logits(target: Any, hidden: Any) -> Any:
            self.spend(0.4 * len(hidden))
            return logits(target, hidden)

        def timed_draft(drafter: Any, context: Any, anchors: Any, *rest: Any) -> Any:
            self.spend(3 + 0.5 * len(anchors))
            return draft(drafter, context, anchors, *rest)

        patch.setattr(LlamaTarget, "packed", timed_packed)
        patch.setattr(LlamaTarget, "logits", timed_logits)
        patch.setattr(ParallelDrafter, "draft", timed_draft)
        patch.setitem(_engine_measure.CLOCKS, "wall", self)


def run(main: Any, *arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        run_main(lambda: main([str(argument) for argument in arguments]))
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a drafter of the tiny target and its bank, recorded on 20 prompts, two draws each."""
    folder = tmp_path_factory.mktemp("models")
    target = tiny_target()
    config = DrafterConfig(
        kind="dspark",
        gamma=3,
        layers=1,
        taps=(1, 3, FINAL),
        head="markov",
        rank=8,
        vocab_size=28,
        temperature=1.0,
        shape=target.shape,
        target=target.name,
        fingerprint=target.fingerprint,
    )
    drafter = new_drafter(config, target, torch.arange(28), 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    write_drafter(drafter, folder / "drafter.safetensors", DrafterFile(config, {"anchors": 5}, ()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSIM_CACHE_DIR", str(folder / "cache"))
        record_banks.main(
            [
                *("--target", "tiny", "--drafter", f"d={folder / 'drafter.safetensors'}", "--temperature", "1.0"),
                *("--prompts", "20", "--calibration", "6", "--max-new-tokens", "40", "--shard", "20"),
                *("--draws", "2", "--jobs", "1", "--out", str(folder)),
            ]
        )
    return folder


def arguments(models: Path, out: Path, *more: object) -> tuple[object, ...]:
    usual = ("--target", "tiny", "--drafter", models / "drafter.safetensors", "--bank", models / "d.npz")
    sizes = ("--users", "1,3", "--requests", 12, "--per-user", 2, "--max-tokens", 20, "--prefill-chunk", 12)
    return (*usual, *sizes, "--policies", *ARMS, "--rounds", 2, "--passes", 2, "--out", out, *more)


@pytest.fixture(scope="module")
def measured(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A measurement under the known clock."""
    out = tmp_path_factory.mktemp("measured") / "m"
    with pytest.MonkeyPatch.context() as patch:
        KnownClock().install(patch)
        measure_engine.main([str(argument) for argument in arguments(models, out)])
    return out


# -- the measurement -------------------------------------------------------------------------------------


def test_a_measurement_has_its_files_and_says_what_it_is(measured: Path) -> None:
    files = {file.name for file in measured.iterdir()}
    assert {"here-tiny.csv", "here-tiny.toml", "host.csv", "passes.csv", "runs.csv", "requests.csv"} <= files
    assert {"cells.csv", "drift.csv", "bank.npz", "measurement.json", "measure_engine.png"} <= files
    said = read_measured(measured / "measurement.json")
    assert (said.arms, said.users, said.rounds, said.gamma) == (ARMS, (1, 3), 2, 3)
    assert set(said.about) == {"processor", "python", "dspark-sim", "torch", "numpy"}
    runs = pd.read_csv(measured / "runs.csv")
    assert len(runs) == len(ARMS) * 2 * 2
    assert (runs["n_scored"] == 12).all()
    none = runs[runs["arm"] == "none"]
    assert set(none["verification_budget"]) == set(none["accepted_length"]) == {1.0}
    fixed = runs[runs["arm"] == "fixed:k=1"]
    assert set(fixed["verification_budget"]) == {2.0}
    assert fixed["accepted_length"].between(1.05, 1.9).all()
    assert np.allclose(runs[[f"{part}_ms" for part in ("draft", "verify", "plan", "prefill", "rest")]].sum(axis=1),
                       runs["mean_step_ms"])  # fmt: skip


def test_rounds_sample_their_own_texts_for_the_same_prompts(measured: Path) -> None:
    requests = pd.read_csv(measured / "requests.csv")
    one, two = (
        requests[(requests["round"] == number) & (requests["arm"] == "none") & (requests["users"] == 1)]
        for number in (0, 1)
    )
    assert one["prompt_tokens"].tolist() == two["prompt_tokens"].tolist()
    assert one["output_tokens"].tolist() != two["output_tokens"].tolist()


def test_the_profile_is_the_clocks_law(measured: Path) -> None:
    assert len(read_profile(measured / "here-tiny.toml").samples) == pd.read_csv(measured / "runs.csv")["passes"].sum()
    host = fitted_host(pd.read_csv(measured / "host.csv"))
    found = Prices.of(pd.read_csv(measured / "passes.csv"), "here-tiny", host)
    # 20 ms, 1.4 ms a token, 0.5 ms a request, 0.004 ms a token of text; all of it at the machine's usual speed.
    law = {(r, n): 20 + 1.4 * n + 0.5 * r + 0.004 * n * 40 for r, n in ((1, 1), (1, 4), (3, 6), (3, 12), (6, 24))}
    ratios = {(r, n): found.verify_ms(r, np.array([float(n)]), 40)[0] / ms for (r, n), ms in law.items()}
    speed = np.median(list(ratios.values()))
    assert 0.8 <= speed <= 1.2
    assert list(ratios.values()) == pytest.approx([speed] * len(law), rel=0.04)
    slow, usual = (found.verify_ms(1, np.array([float(n)]), 40)[0] for n in (3, 4))
    assert slow > usual + 1.0
    assert found.cost.draft_ms(3) == pytest.approx(4.6 * speed, rel=0.06)
    assert found.host.ms(1) == pytest.approx(0.3)
    assert found.host.ms(3) == pytest.approx(0.3)


def test_drift_is_what_the_machine_did(measured: Path) -> None:
    runs = pd.read_csv(measured / "runs.csv")
    assert runs["drift"].max() / runs["drift"].min() > 1.15
    # The same time, told by the passes between the steps and by the steps themselves.
    assert np.corrcoef(runs["drift"], runs["time_ratio"])[0, 1] > 0.9
    assert (runs["time_ratio"] / runs["drift"]).std() < 0.5 * runs["time_ratio"].std()


def test_a_second_call_measures_nothing_and_changes_nothing(
    models: Path, measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "m"
    shutil.copytree(measured, out)
    before = {file: file.read_bytes() for file in sorted(out.iterdir()) if file.suffix in (".csv", ".json", ".npz")}
    monkeypatch.setattr(_engine_measure, "run_of", lambda *_: pytest.fail("measured again"))
    assert run(measure_engine.main, *arguments(models, out)) == 0
    assert {file: file.read_bytes() for file in before} == before


def test_what_is_missing_is_measured_and_nothing_else(
    models: Path, measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "m"
    shutil.copytree(measured, out)
    (out / "parts" / "round-01-002.npz").unlink()
    KnownClock().install(monkeypatch)
    made: list[tuple[int, int]] = []
    real = _engine_measure.run_of
    monkeypatch.setattr(_engine_measure, "run_of", lambda plan, *rest: made.append(rest[:2]) or real(plan, *rest))
    assert run(measure_engine.main, *arguments(models, out)) == 0
    assert made == [(1, 2)]
    # Other times, the same texts.
    columns = ["round", "arm", "users", "request", "output_tokens"]
    old, new = (pd.read_csv(folder / "requests.csv")[columns] for folder in (measured, out))
    assert old.equals(new)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--seed", 3), "'seed': a measurement of other settings is there, got 0, expected 3, or another --out"),
        (("--max-tokens", 16), "'max_tokens': a measurement of other settings is there, got 20"),
        (("--policies", "none"), "'arms'"),
        (("--clock", "cpu"), "'clock': a measurement of other settings is there, got 'wall'"),
    ],
)
def test_a_measurement_of_other_settings_is_not_gone_on_with(
    models: Path, measured: Path, more: tuple[object, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(measure_engine.main, *arguments(models, measured, *more)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--seed", -1), "'--seed': got -1"),
        (("--users", "3,1"), "ascending integers"),
        (("--users", "x"), "ascending integers"),
        (("--policies", "none", "none"), "each policy once"),
        (("--policies", "oracle"), "no real engine can run it"),
        (("--policies", "fixed:k=9"), "longer blocks than 3"),
        (("--policies", "nobody"), "unknown policy 'nobody'"),
        (("--clock", "cpu", "--threads", 2), "'--clock': sums the time of all threads, got 'cpu'"),
        (("--requests", 40), "holds too few prompts"),
        (("--drafter", "nowhere.safetensors"), "is not there"),
        (("--bank", "nowhere.npz"), "bank not found"),
        (("--temperatures", "nowhere.json"), "nowhere.json"),
        (("--temperature", 1.5), "'temperature': was recorded otherwise, got 1.0, expected 1.5"),
        (("--temperature", 0), "'temperature'"),
        (("--name", "runs"), "'--name': got 'runs'"),
        (("--name", "a/b"), "'--name': got 'a/b'"),
        (("--name", "Upper"), "'--name': got 'Upper'"),
    ],
)
def test_bad_options_are_one_line(
    models: Path, tmp_path: Path, more: tuple[object, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(measure_engine.main, *arguments(models, tmp_path / "m", *more)) == 2
    text = capsys.readouterr().err
    assert message in text
    assert text.count("\n") == 1
    assert not (tmp_path / "m").exists()


def test_a_temperature_that_no_engine_has_leaves_nothing_behind(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--drafter", models / "drafter.safetensors", "--target", "tiny", "--quick", "--out", tmp_path / "m"]
    assert run(measure_engine.main, *given, "--temperature", -1) == 2
    assert "'temperature': got -1.0, expected a finite number > 0" in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


def test_the_same_texts_where_that_is_asked_for(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    KnownClock().install(monkeypatch)
    more = ("--same-texts", "--quick", "--policies", "fixed:k=1", "--users", "1", "--max-tokens", 9, "--requests", 4)
    assert run(measure_engine.main, *arguments(models, tmp_path, *more)) == 0
    requests = pd.read_csv(tmp_path / "requests.csv")
    one, two = (requests[requests["round"] == number]["output_tokens"].tolist() for number in (0, 1))
    assert one == two
    assert "fixed:k=1" in capsys.readouterr().out


# -- the prediction --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tables(measured: Path) -> dict[str, pd.DataFrame]:
    # On a clock whose swings are longer than a run, each run is predicted at its own speed.
    full = replace(_validate_here.FULL, statistic="usual_ms", drift=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_validate_here.VARIABLE, str(measured))
        patch.setattr(_validate_here, "DRAWS", 4)
        patch.setattr(_validate_here, "FULL", full)
        return _validate_here.run_case(RunOptions(jobs=1, ablate=True))


def test_what_is_no_luck_is_predicted_to_three_percent(tables: dict[str, pd.DataFrame]) -> None:
    cells = tables["cells"].set_index(["arm", "users"])
    for users in (1, 3):
        for name in ("throughput_tok_s", "tps_per_user"):
            cell = cells.loc[("none", users)]
            assert cell[f"{name}_predicted"] / cell[name] == pytest.approx(1, abs=0.03)
    # The others have the luck of 24 short answers in them.
    for name in ("throughput_tok_s", "tps_per_user"):
        assert (cells[f"{name}_predicted"] / cells[name] - 1).abs().max() < 0.12
    scored = tables["validation"]
    assert not scored["extrapolated"].any()
    # What the policy alone decides is no prediction.
    budgets = scored[scored["metric"] == "verification_budget"]
    assert set(budgets["arm"]) == {"dspark"}
    assert "none" not in set(scored.loc[scored["metric"] == "accepted_length", "arm"])
    assert (cells["luck"] > 0).tolist() == [arm != "none" for arm, _ in cells.index]
    assert cells.loc[("fixed:k=1", 1), "verification_budget_predicted"] == 2.0
    assert set(tables["validation"]["cost_source"]) == {"measured:here-tiny:additive"}


def test_where_all_hours_are_priced_alike_swings_are_errors(measured: Path, tables: dict[str, pd.DataFrame]) -> None:
    found = open_measurement(measured)
    found = replace(found, runs=found.runs[found.runs["arm"] == "none"])
    errors = []
    for drift in (False, True):
        variant = replace(_validate_here.FULL, drift=drift, statistic="usual_ms" if drift else "mean_ms")
        both = _validate_here.predicted(found, variant, 1, 1).merge(found.runs, on=["arm", "users", "round"])
        errors.append((both["throughput_tok_s_x"] / both["throughput_tok_s_y"] - 1).to_numpy())
    alike, own = errors
    assert np.abs(alike).max() > 2 * np.abs(own).max()
    # Over the hours they cancel, since the means are of all of them.
    assert abs(alike.mean()) < 0.5 * np.abs(alike).max()


def test_policies_are_told_what_the_engines_were(measured: Path) -> None:
    seen = []

    class Spy:
        traits = load_policy("dspark").traits

        def plan(self, view: Any) -> Any:
            seen.append(view)
            return np.zeros(view.requests, dtype=np.int64)

    found = open_measurement(measured)
    told = _engine_runs.told_prices(found.pilot, found.pilot_host, found.measured)
    policy = _validate_here.Told(Spy(), told, prompt=30.0, stretch=4.0)
    view = make_view(np.full((2, 3), 0.5), verify_ms=np.arange(60.0), prefill_tokens=3, draft_ms=9.0)
    policy.plan(view._replace(produced=np.array([3, 5])))
    (got,) = seen
    # Three replayed tokens of a prompt stand for twelve.
    assert got.base_tokens == 2 + 12
    assert got.verify_ms.tolist() == told.verify(2, 35.0)[1].tolist() != view.verify_ms.tolist()
    assert got.draft_ms == pytest.approx(told.draft_ns[2] * 1e-6)
    assert got.confidence is view.confidence
    # The pilot is the one that the policies of the runs were given.
    pilot = _engine_measure.read_piece(measured / "parts" / "pilot.npz").passes
    assert found.pilot["passes"].sum() == len(pilot)


def test_each_mechanism_counts(tables: dict[str, pd.DataFrame]) -> None:
    ablation = tables["ablation"].set_index("variant")
    mean = ablation["throughput_tok_s_mean_error"]
    assert mean["free-prompts"] > mean["full"] + 0.03
    assert mean["whole-prompts"] < mean["full"] - 0.005
    assert mean["short-texts"] > mean["full"]
    assert mean["domains"] != mean["full"]
    assert mean["own-prices"] != mean["full"]
    assert mean["medians"] != mean["full"] == mean["drift"]


def test_the_page_and_the_headline_come_from_the_tables(tables: dict[str, pd.DataFrame], tmp_path: Path) -> None:
    text = page_section(tables)
    for arm in ARMS:
        assert f"| {arm} |" in text
    allowed = error_summary(tables["validation"]).set_index("metric").loc["throughput_tok_s", "target"]
    cells = tables["cells"]
    machine = cells["machine"].to_numpy()
    assert allowed == pytest.approx(0.03 + np.sqrt((machine**2).mean()))
    assert "3 policies at 2 loads" in headline(tables)
    again = {}
    for name, table in tables.items():
        table.to_csv(tmp_path / f"{name}.csv", index=False)
        again[name] = pd.read_csv(tmp_path / f"{name}.csv", keep_default_na=False, na_values=[""])
    assert page_section(again) == text
    _validate_here.draw_case(again, tmp_path, "validation")
    assert (tmp_path / "validation.png").is_file()


def test_the_command_runs(measured: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv(_validate_here.VARIABLE, str(measured))
    assert run(validate.main, "--case", "here", "--quick", "--jobs", 1, "--out", tmp_path) == 0
    out = capsys.readouterr().out
    assert "beside the repeatability" in out
    assert (tmp_path / "validation.csv").is_file()


def test_measurements_that_cannot_be_predicted_are_refused(
    measured: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    def refused() -> str:
        assert run(validate.main, "--case", "here", "--jobs", 1, "--out", tmp_path / "v") == 2
        return str(capsys.readouterr().err)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_validate_here, "SHIPPED", tmp_path / "nothing")
    assert "there is no measurement" in refused()
    out = tmp_path / "m"
    shutil.copytree(measured, out)
    monkeypatch.setenv(_validate_here.VARIABLE, str(out))
    (out / "bank.npz").unlink()
    assert "has no bank" in refused()
    (out / "runs.csv").write_text("round,arm\n", encoding="utf-8")
    assert "column is missing" in refused()
    raw = json.loads((out / "measurement.json").read_text(encoding="utf-8"))
    (out / "measurement.json").write_text(json.dumps(raw | {"more": 1}), encoding="utf-8")
    assert "unknown key" in refused()
    (out / "measurement.json").unlink()
    assert "cannot be read" in refused()


def test_a_measurement_is_found_where_it_is_written(measured: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(_validate_here.VARIABLE, raising=False)
    shutil.copytree(measured, tmp_path / "results" / "measure_engine")
    assert _validate_here.measurement_folder() == Path("results/measure_engine")
    assert open_measurement(_validate_here.measurement_folder()).measured.profile == "here-tiny"
