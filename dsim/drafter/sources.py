"""Live draft sources by name: what a scenario's words stand for. Models are loaded once a process."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from importlib import resources
from pathlib import Path

import torch

from dsim.drafter import smollm2
from dsim.drafter.build import Drafter, read_drafter
from dsim.drafter.drafter import FINAL, KINDS, DrafterConfig
from dsim.drafter.live import LiveDrafts
from dsim.drafter.prompts import Prompt, generate_prompts
from dsim.drafter.target import Target
from dsim.drafter.targets import device_text, load_target, pick_device
from dsim.drafter.train import new_drafter
from dsim.drafts.calibrate import read_temperatures
from dsim.errors import InputError
from dsim.files import file_digest

#: Prompts that scenarios ask: generated ones of the evaluation split, all domains in turn.
PROMPTS = 192
#: What a drafter without weights is: the tiny target's only, for first tries.
_UNTRAINED_GAMMA = 7


def open_live(
    *,
    target: str,
    device: str,
    drafter: str,
    weights: str | None,
    gamma: int,
    seed: int,
    temperature: float | None = None,
    calibration: str = "bank",
    max_rows: int = 64,
) -> LiveDrafts:
    """A live draft source by name; models are loaded once a process.

    Parameters
    ----------
    target
        ``smollm2``, ``tiny`` or ``hf:PATH``.
    device
        ``auto``, ``cpu`` or ``cuda``.
    drafter, weights
        Name of the drafter in the scenario, and its file: the name of a shipped one or a ``.safetensors`` path.
        None (tiny target only): an untrained drafter of the kind that `drafter` names.
    calibration
        ``bank``: temperatures of the drafter file; ``none``: 1; a ``.json`` file in the engines' format.
    gamma, seed, temperature, max_rows
        As in `LiveDrafts`.

    Raises
    ------
    InputError
        An unknown name, a missing file, a drafter of another target, a calibration that changes nothing.
    ModuleNotFoundError
        A library of the extra ``[drafter]`` (or ``[hf]``) is not installed.
    """
    where = pick_device(device)
    opened = _target(target, where)
    if weights is None and target != "tiny":
        raise InputError("has no weights", field=f"drafters.{drafter}.weights", expected="a .safetensors file")
    model, temperatures = _drafter(target, where, drafter, weights)
    chosen = temperatures
    if calibration != "bank":
        chosen = () if calibration == "none" else read_temperatures(calibration, model.config.gamma)
        if _all(chosen, model) == _all(temperatures, model):
            raise InputError(
                "changes nothing: the drafter file has these temperatures already",
                field=f"drafters.{drafter}.calibration",
                value=calibration,
                expected="'bank'",
            )
    drafts = LiveDrafts(
        opened,
        model,
        _prompts(),
        gamma=gamma,
        seed=seed,
        temperature=temperature,
        temperatures=chosen,
        max_rows=max_rows,
    )
    marks = [] if weights is not None else ["untrained"]
    if calibration != "bank":
        marks.append("uncalibrated" if calibration == "none" else "recalibrated")
    # The device stays last.
    front, _, last = drafts.label.rpartition(":")
    drafts.label = ":".join([front, *marks, last])
    return drafts


def live_identity(*, target: str, device: str, weights: str | None) -> dict[str, str] | None:
    """What live drafting depends on beside its code, in words and digests; None where that cannot be known.

    The arguments are those of `open_live`. A target that a hub serves by name is what cannot be known.
    """
    found = {
        "device": device_text(pick_device(device)),
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "weights": "untrained",
        "target": target,
    }
    if weights is not None:
        with _weights_file(weights, "") as path:
            found["weights"] = file_digest(path)
    if target == "smollm2":
        found["target"] = file_digest(smollm2.model_path())
    elif target != "tiny":
        folder = Path(target.removeprefix("hf:"))
        if not folder.is_dir():
            return None
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        found["target"] = ",".join(f"{path.relative_to(folder)}={file_digest(path)}" for path in files)
    return found


def _all(temperatures: tuple[float, ...], drafter: Drafter) -> tuple[float, ...]:
    return temperatures or (1.0,) * drafter.config.gamma


@lru_cache(maxsize=2)
def _target(name: str, device: str) -> Target:
    return load_target(name, device=device)


@lru_cache(maxsize=1)
def _prompts() -> tuple[Prompt, ...]:
    return tuple(generate_prompts(PROMPTS, seed=0, split="evaluation"))


@lru_cache(maxsize=8)
def _drafter(target: str, device: str, name: str, weights: str | None) -> tuple[Drafter, tuple[float, ...]]:
    """The drafter and the temperatures of its file."""
    opened = _target(target, device)
    if weights is None:
        return _untrained(opened, name), ()
    with _weights_file(weights, name) as path:
        drafter, about = read_drafter(path, opened)
    return drafter, about.temperatures


def _untrained(target: Target, kind: str) -> Drafter:
    if kind not in KINDS:
        raise InputError(
            f"drafter '{kind}' has no weights", field=f"drafters.{kind}.weights", expected=f"one, or {', '.join(KINDS)}"
        )
    top = target.num_layers
    parallel, sequential = kind in ("dspark", "dflash"), kind == "dspark"
    config = DrafterConfig(
        kind=kind,
        gamma=_UNTRAINED_GAMMA,
        layers=min(2, top) if parallel else 1,
        taps=(FINAL,) if kind == "mtp" else tuple(sorted({1, top // 2, top})),
        head="markov" if sequential else "none",
        rank=8 if sequential else 0,
        vocab_size=target.vocab_size,
        temperature=1.0,
        shape=target.shape,
        target=target.name,
        fingerprint=target.fingerprint,
    )
    return new_drafter(config, target, torch.arange(target.vocab_size), seed=0).eval()


def shipped_drafters() -> tuple[str, ...]:
    """Names of the drafters that come with dsim, in alphabetical order."""
    folder = resources.files("dsim") / "data" / "drafters"
    items = folder.iterdir() if folder.is_dir() else ()
    return tuple(sorted(item.name.removesuffix(_ENDING) for item in items if item.name.endswith(_ENDING)))


_ENDING = ".safetensors"


def _weights_file(weights: str, drafter: str) -> AbstractContextManager[Path]:
    if weights.endswith(_ENDING) or os.sep in weights:
        return nullcontext(Path(weights))
    known = shipped_drafters()
    if weights not in known:
        raise InputError(
            "unknown drafter weights",
            field=f"drafters.{drafter}.weights",
            value=weights,
            expected=f"one of {', '.join(known) or '(none is shipped)'}, or the path of a {_ENDING} file",
        )
    return resources.as_file(resources.files("dsim") / "data" / "drafters" / f"{weights}{_ENDING}")
