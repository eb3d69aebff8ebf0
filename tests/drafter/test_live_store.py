"""Live runs are kept too: by the models' files, the device and the threads."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from dsim import sweep as sweeps  # noqa: E402
from dsim.drafter import sources  # noqa: E402
from dsim.drafter.sources import live_identity  # noqa: E402
from dsim.schema import parse_scenario  # noqa: E402
from dsim.sweep import grid, run  # noqa: E402

torch.set_num_threads(1)

STUDY = {
    "name": "alive",
    "cluster": {"max_seqs": 4},
    "drafts": {"source": "live", "gamma": 3, "live": {"target": "tiny", "device": "cpu"}},
    "workload": {"synthetic": {"lengths": "fixed", "prompt_mean": 200.0, "output_mean": 8.0, "requests": 100}},
    "load": {"users": (2,), "scored_min": 4, "scored_per_user": 2},
    "measure": {"mode": "whole-run", "seeds": 2},
    "arms": ({"name": "fixed", "policy": "fixed:k=3"}, {"name": "none", "policy": "none", "gamma": 0}),
}


def test_live_runs_are_kept(tmp_path, monkeypatch, capsys):
    scenario = parse_scenario(STUDY)
    points = grid(scenario)
    first = run(scenario, points, progress=False, store=tmp_path)
    assert capsys.readouterr().err == ""

    def fails(*_, **__):
        raise AssertionError("is kept already")

    monkeypatch.setattr(sweeps, "simulate", fails)
    assert run(scenario, points, progress=False, store=tmp_path).table.to_csv() == first.table.to_csv()


def test_other_models_devices_and_threads_are_other_runs(tmp_path, monkeypatch):
    usual = {"target": "tiny", "device": "cpu", "weights": None}
    assert live_identity(**usual) == live_identity(**usual)
    seen = [live_identity(**usual)]
    weights = tmp_path / "w.safetensors"
    for content in (b"a", b"b"):
        weights.write_bytes(content)
        seen.append(live_identity(**usual | {"weights": str(weights)}))
    folder = tmp_path / "model"
    folder.mkdir()
    for content in ("a", "b"):
        (folder / "config.json").write_text(content)
        seen.append(live_identity(**usual | {"target": f"hf:{folder}"}))
    monkeypatch.setattr(sources.torch, "get_num_threads", lambda: 7)
    seen.append(live_identity(**usual))
    assert all(a != b for i, a in enumerate(seen) for b in seen[:i])


def test_a_target_from_a_hub_is_not_kept(tmp_path, capsys):
    assert live_identity(target="hf:somebody/model", device="cpu", weights=None) is None
    (tmp_path / "w.safetensors").write_bytes(b"")
    drafts = {"source": "live", "gamma": 3, "live": {"target": "hf:somebody/model"}}
    study = STUDY | {"drafts": drafts, "drafters": {"dspark": {"weights": str(tmp_path / "w.safetensors")}}}
    scenario = parse_scenario(study)
    known = sweeps._identified(sweeps._Study(scenario, None, None, None, "auto"), grid(scenario))
    assert list(known.identities) == [("none", False)]
    assert "not kept: fixed (live drafts of 'hf:somebody/model'" in capsys.readouterr().err
