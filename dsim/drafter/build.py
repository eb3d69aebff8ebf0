"""Drafters by description, and the files they are kept in.

A drafter file is a safetensors file; its metadata holds one JSON text with the description, and the draft
vocabulary is one of its tensors. A SHA-256 over the description and the tensors, also in that text, tells a file that
was changed. Nothing in it is executed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from dsim.drafter.autoregressive import AutoregressiveDrafter
from dsim.drafter.drafter import DrafterConfig
from dsim.drafter.heads import MarkovHead, RnnHead
from dsim.drafter.llama import LlamaConfig
from dsim.drafter.parallel import ParallelDrafter
from dsim.drafter.target import Target
from dsim.errors import InputError

FORMAT = "dsim-drafter"
VERSION = 1
VOCABULARY = "vocabulary"
#: How the names of a drafter's weights begin that belong to its sequential head or its confidence head.
HEAD_WEIGHTS = ("sequential.", "confidence.")
Drafter = ParallelDrafter | AutoregressiveDrafter


def build_drafter(config: DrafterConfig, target: Target, tokens: Tensor) -> Drafter:
    """A drafter with the weights that training starts from.

    Raises
    ------
    InputError
        The description is not for this target, or the vocabulary not of the described size.
    """
    check_target(config, target, "drafter")
    if tokens.numel() != config.vocab_size:
        raise InputError(field="vocab_size", value=tokens.numel(), expected=f"{config.vocab_size} tokens")
    kind = ParallelDrafter if config.kind in ("dspark", "dflash") else AutoregressiveDrafter
    return kind(config, target, tokens.to(target.device)).to(target.device)


def check_target(config: DrafterConfig, target: Target, file: str | Path) -> None:
    """Raise InputError unless the drafter was made for this target: sizes first, then weights and tokenizer."""
    for item in fields(LlamaConfig):
        ours, theirs = getattr(config.shape, item.name), getattr(target.shape, item.name)
        if ours != theirs:
            raise InputError(
                "does not fit the target", file=file, field=item.name, value=ours, expected=f"{theirs} ({target.name})"
            )
    if config.fingerprint != target.fingerprint:
        raise InputError(
            f"was made for {config.target}, not for {target.name}",
            file=file,
            field="fingerprint",
            value=config.fingerprint,
            expected=target.fingerprint,
        )


@dataclass(frozen=True)
class DrafterFile:
    """What a drafter file says.

    Attributes
    ----------
    config
        Architecture.
    training
        How it was trained, and how far: free JSON.
    temperatures
        Of the confidence logits, one a position (1 where uncalibrated).
    """

    config: DrafterConfig
    training: dict[str, Any] = field(default_factory=dict)
    temperatures: tuple[float, ...] = ()


def write_drafter(
    drafter: Drafter, path: str | Path, about: DrafterFile, *, dtype: torch.dtype = torch.float32
) -> None:
    """Write a drafter, atomically; float16 halves the file (weights are well inside its range)."""
    tensors = {name: value.to(dtype).contiguous() for name, value in drafter.state_dict().items()}
    tensors.pop("vocabulary_head.tokens")
    tensors[VOCABULARY] = drafter.vocabulary_head.tokens.to(torch.int32)
    header = {"format": FORMAT, "version": VERSION, **asdict(about)}
    write_tensors(tensors, path, header)


def _digest(header: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name, value in sorted(tensors.items()):
        digest.update(f"\n{name} {value.dtype} {tuple(value.shape)}\n".encode())
        # As bytes: NumPy has no bfloat16. (A scalar has no last axis to view.)
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def write_tensors(tensors: dict[str, Tensor], path: str | Path, header: dict[str, Any]) -> None:
    """A safetensors file with one JSON text in its metadata, written whole or not at all."""
    from safetensors.torch import save

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A folder of its own, so that the file gets the usual permissions (those of mkstemp are private).
    folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-"))
    try:
        cpu = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        # One text and not two: safetensors writes several in any order.
        text = json.dumps({**header, "sha256": _digest(header, cpu)}, sort_keys=True)
        (folder / "new").write_bytes(save(cpu, metadata={"dsim": text}))
        os.replace(folder / "new", path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def read_tensors(path: str | Path, form: str, version: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and header of a file that `write_tensors` wrote, the format and the digest checked."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as archive:
            metadata = archive.metadata() or {}
            tensors = {name: archive.get_tensor(name) for name in archive.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise InputError("is not there", file=path) from None
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"is no safetensors file, or a damaged one ({error})", file=path) from None
    try:
        header = json.loads(metadata["dsim"])
    except (KeyError, ValueError, RecursionError):
        raise InputError("has no description", file=path, field="metadata", expected="the key 'dsim' (JSON)") from None
    if not isinstance(header, dict) or header.get("format") != form:
        found = header.get("format") if isinstance(header, dict) else header
        raise InputError(file=path, field="format", value=found, expected=repr(form))
    if header.get("version") != version:
        raise InputError(file=path, field="version", value=header.get("version"), expected=str(version))
    found = header.pop("sha256", None)
    if found != _digest(header, tensors):
        raise InputError("was changed after it was written", file=path, field="sha256", value=found)
    return tensors, header


def read_drafter(path: str | Path, target: Target) -> tuple[Drafter, DrafterFile]:
    """Open a drafter for a target.

    Raises
    ------
    InputError
        A damaged or foreign file, a description that does not fit the target, missing or misshapen weights.
    """
    tensors, header = read_tensors(path, FORMAT, VERSION)
    about = _about(header, path)
    check_target(about.config, target, path)
    if VOCABULARY not in tensors:
        raise InputError("missing tensor", file=path, field=VOCABULARY)
    tokens = _checked_vocabulary(tensors.pop(VOCABULARY), about.config, path)
    drafter = build_drafter(about.config, target, tokens)
    own = drafter.state_dict()
    own.pop("vocabulary_head.tokens")
    for name in sorted(own.keys() | tensors.keys()):
        if name not in tensors or name not in own:
            what = "missing tensor" if name not in tensors else "unknown tensor"
            raise InputError(what, file=path, field=name)
        if own[name].shape != tensors[name].shape:
            expected = f"shape {tuple(own[name].shape)}"
            raise InputError(file=path, field=name, value=tuple(tensors[name].shape), expected=expected)
        if not tensors[name].is_floating_point():
            raise InputError(file=path, field=name, value=str(tensors[name].dtype), expected="floating-point numbers")
        if not torch.isfinite(tensors[name].float()).all():
            raise InputError("holds values that are not finite", file=path, field=name)
        own[name] = tensors[name].float()
    drafter.load_state_dict({**own, "vocabulary_head.tokens": tokens})
    return drafter.eval(), about


def take_weights(drafter: Drafter, target: Target, path: str | Path) -> dict[str, Any]:
    """Put the weights of a drafter file into another drafter, as what its training starts from.

    An RNN head begins as the file's Markov head of the same rank (`dsim.drafter.heads.RnnHead.begin_as`). Between other
    pairs of heads only the backbone is taken: what one learned means nothing to the other, nor do the confidences about
    its drafts.

    Returns
    -------
    dict
        For provenance: kind, head, hash and anchors of the file's drafter.

    Raises
    ------
    InputError
        As `read_drafter`; or the two are not of one kind, width, depth, block or draft vocabulary.
    """
    other, about = read_drafter(path, target)
    for item in fields(DrafterConfig):
        ours, theirs = getattr(drafter.config, item.name), getattr(about.config, item.name)
        if item.name not in ("head", "rank", "temperature") and ours != theirs:
            raise InputError("does not fit the drafter", file=path, field=item.name, value=theirs, expected=str(ours))
    if not torch.equal(other.vocabulary_head.tokens, drafter.vocabulary_head.tokens):
        raise InputError("has another draft vocabulary", file=path, field=VOCABULARY)
    pair = (about.config.head, drafter.config.head)
    as_wide = about.config.rank == drafter.config.rank
    same, grows = as_wide and pair[0] == pair[1], as_wide and pair == ("markov", "rnn")
    left = () if same else HEAD_WEIGHTS[:1] if grows else HEAD_WEIGHTS
    weights = {name: value for name, value in other.state_dict().items() if not name.startswith(left)}
    drafter.load_state_dict({**drafter.state_dict(), **weights})
    if grows:
        cast(RnnHead, drafter.sequential).begin_as(cast(MarkovHead, other.sequential))
    return {
        "kind": about.config.kind,
        "head": about.config.head,
        "hash": drafter_hash(other),
        "anchors": about.training.get("anchors"),
    }


def _checked_vocabulary(tokens: Tensor, config: DrafterConfig, path: str | Path) -> Tensor:
    if tokens.dtype != torch.int32:
        raise InputError(file=path, field=VOCABULARY, value=str(tokens.dtype), expected="int32")
    if tokens.ndim != 1 or tokens.numel() != config.vocab_size:
        expected = f"shape ({config.vocab_size},)"
        raise InputError(file=path, field=VOCABULARY, value=tuple(tokens.shape), expected=expected)
    if torch.unique(tokens).numel() != tokens.numel() or tokens.min() < 0 or tokens.max() >= config.shape.vocab_size:
        raise InputError(file=path, field=VOCABULARY, expected=f"distinct tokens below {config.shape.vocab_size}")
    return tokens.long()


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_layers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_integer, value))


#: By annotation of the dataclasses: how the JSON form is checked, and what it should be.
_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (_is_integer, "an integer"),
    "float": (_is_number, "a number"),
    "str": (_is_text, "text"),
    "tuple[int, ...]": (_is_layers, "a list of integers"),
    "LlamaConfig": (lambda value: isinstance(value, dict), "an object"),
}


def config_from(raw: Any, file: str | Path) -> DrafterConfig:
    """A description from its JSON form, every key and type checked."""
    _check_keys(raw, DrafterConfig, file, "config")
    shape = raw["shape"]
    _check_keys(shape, LlamaConfig, file, "shape")
    for name, value in shape.items():
        if not 0 < value < float("inf"):
            raise InputError(file=file, field=f"shape.{name}", value=value, expected="a finite number > 0")
    try:
        return DrafterConfig(**{**raw, "shape": LlamaConfig(**shape), "taps": tuple(raw["taps"])})
    except InputError as error:
        raise InputError(
            error.message, file=file, field=error.field, value=error.value, expected=error.expected
        ) from None


def _about(header: dict[str, Any], file: str | Path) -> DrafterFile:
    training, temperatures = header.get("training"), header.get("temperatures")
    if not isinstance(training, dict):
        raise InputError(file=file, field="training", value=training, expected="an object")
    checked = config_from(header.get("config"), file)
    if not isinstance(temperatures, list) or len(temperatures) not in (0, checked.gamma):
        expected = f"none or {checked.gamma} numbers > 0"
        raise InputError(file=file, field="temperatures", value=temperatures, expected=expected)
    if not all(isinstance(t, int | float) and not isinstance(t, bool) and 0 < t < float("inf") for t in temperatures):
        raise InputError(file=file, field="temperatures", value=temperatures, expected="finite numbers > 0")
    return DrafterFile(checked, training, tuple(float(t) for t in temperatures))


def _check_keys(raw: Any, kind: type, file: str | Path, where: str) -> None:
    if not isinstance(raw, dict):
        raise InputError(file=file, field=where, value=raw, expected="an object")
    types = {item.name: str(item.type) for item in fields(kind)}
    for key in sorted(raw.keys() ^ types):
        what = "missing key" if key in types else "unknown key"
        raise InputError(what, file=file, field=f"{where}.{key}")
    for key, value in raw.items():
        fits, expected = _TYPES[types[key]]
        if not fits(value):
            raise InputError(file=file, field=f"{where}.{key}", value=value, expected=expected)


def drafter_hash(drafter: Drafter) -> str:
    """16 hex digits over all weights and the vocabulary, for provenance."""
    digest = hashlib.sha256()
    for name, value in sorted(drafter.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
