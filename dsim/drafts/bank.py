"""Draft banks: what a drafter drafted, and what the target thought of it, at every position of some texts.

A bank is one compressed ``.npz`` without pickles:

=================== =============== ========================================================================
member              dtype, shape    meaning
=================== =============== ========================================================================
``header``          uint8[bytes]    UTF-8 JSON: `BankHeader`
``confidence``      uint8[N, gamma] logit of the conditional confidence c_k, affine between the header's limits
``alpha``           uint8[N, gamma] acceptance probability alpha_k, in units of 1/255
``accepted``        uint8[N]        drafts accepted when the whole block is verified
``bounds``          int64[T + 1]    first row of each trajectory, and the end
``domain``          uint8[T]        index into the header's domains
``sha256``          uint8[32]       digest of the members above; a ``recorded`` bank has it, others may
=================== =============== ========================================================================

The digest is the SHA-256 over the members above in this order: for each the line ``"\\n{name} {dtype} {shape}\\n"``
(``"\\naccepted uint8 (74879,)\\n"``), then its bytes. It tells that a file was changed, and is no signature.

Row t of a trajectory is the block drafted after its t-th generated token. Reading unpacks the bank once to a
cache folder (named by the file's SHA-256), where the arrays are memory-mapped and shared by all processes.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dsim.errors import InputError
from dsim.files import cache_dir, replacing

FORMAT = "dsim-bank"
VERSION = 1
KINDS = ("recorded", "synthetic", "visited")
#: Version of the unpacked form in the cache, and of what a file was checked for before it was unpacked.
LAYOUT = 4
#: The members that every bank has, in the order of the digest.
_TYPES: dict[str, type[np.generic]] = {
    "header": np.uint8,
    "confidence": np.uint8,
    "alpha": np.uint8,
    "accepted": np.uint8,
    "bounds": np.int64,
    "domain": np.uint8,
}
_DIGEST = "sha256"


@dataclass(frozen=True)
class BankHeader:
    """What a bank says about itself.

    Parameters
    ----------
    gamma
        Drafted tokens a block.
    kind
        ``recorded`` (a real drafter and target), ``synthetic`` (a generator) or ``visited`` (a log of the positions
        that an engine visited: `dsim.drafts.logs`).
    drafter, target, source, license
        Provenance, free text.
    domains
        Names, in the order of the domain indices.
    logit_low, logit_high
        Confidence logits that the bytes 0 and 255 stand for.
    temperatures
        Divisors of the confidence logits by position (Sequential Temperature Scaling), 1 where uncalibrated.
    """

    gamma: int
    kind: str
    drafter: str
    target: str
    source: str
    license: str
    domains: tuple[str, ...]
    logit_low: float
    logit_high: float
    temperatures: tuple[float, ...]
    notes: str = ""
    format: str = FORMAT
    version: int = VERSION


@dataclass(frozen=True, eq=False)
class Bank:
    """An opened bank. Arrays may be memory maps; treat them as read-only. Two banks are equal if they are the same.

    Attributes
    ----------
    confidence
        float32[N, gamma]: conditional confidences c_k, temperatures applied.
    confidence_bytes, alpha_bytes
        uint8[N, gamma]: as stored.
    accepted
        int64[N] (uint8 in the file): replay indexes it in every step.
    bounds, domain
        int64[T + 1], uint8[T].
    """

    header: BankHeader
    confidence: npt.NDArray[np.float32]
    confidence_bytes: npt.NDArray[np.uint8]
    alpha_bytes: npt.NDArray[np.uint8]
    accepted: npt.NDArray[np.int64]
    bounds: npt.NDArray[np.int64]
    domain: npt.NDArray[np.uint8]

    @property
    def alpha(self) -> npt.NDArray[np.float32]:
        """float32[N, gamma]: acceptance probabilities."""
        return self.alpha_bytes.astype(np.float32) / np.float32(255)

    def usable(self) -> npt.NDArray[np.int64]:
        """int64[T]: positions of each trajectory that may be replayed (none within gamma + 1 of its end)."""
        return np.diff(self.bounds) - (self.header.gamma + 1)


def make_bank(
    header: BankHeader,
    *,
    confidence_logit: npt.NDArray[np.floating[Any]],
    alpha: npt.NDArray[np.floating[Any]],
    accepted: npt.NDArray[np.integer[Any]],
    bounds: npt.NDArray[np.integer[Any]],
    domain: npt.NDArray[np.integer[Any]],
) -> Bank:
    """Quantize arrays to a bank (raw logits, before the header's temperatures) and check it.

    Logits beyond the header's limits are stored as the limits; everything else out of range is an error.
    """
    _check_header(header, "bank")
    values, counts = np.asarray(alpha, dtype=np.float64), np.asarray(accepted)
    if not np.all((values >= 0) & (values <= 1)):
        raise InputError(file="bank", field="alpha", expected="probabilities in [0, 1]")
    if not np.all(np.isfinite(confidence_logit)):
        raise InputError(file="bank", field="confidence_logit", expected="finite numbers")
    if counts.size and not (counts.min() >= 0 and counts.max() <= header.gamma):
        worst = int(counts.min() if counts.min() < 0 else counts.max())
        raise InputError(file="bank", field="accepted", value=worst, expected=f"0..gamma = {header.gamma}")
    span = header.logit_high - header.logit_low
    scaled = (np.clip(confidence_logit, header.logit_low, header.logit_high) - header.logit_low) * (255 / span)
    bank = Bank(
        header=header,
        confidence=np.empty((0, header.gamma), np.float32),
        confidence_bytes=np.rint(scaled).astype(np.uint8),
        alpha_bytes=np.rint(values * 255).astype(np.uint8),
        accepted=counts.astype(np.int64),
        bounds=np.asarray(bounds).astype(np.int64),
        domain=np.asarray(domain).astype(np.uint8),
    )
    check_bank(bank, "bank")
    return _dequantized(bank)


def _dequantized(bank: Bank) -> Bank:
    header = bank.header
    logits = header.logit_low + np.arange(256) * ((header.logit_high - header.logit_low) / 255)
    # One look-up table a position: exact, and 256 exponentials instead of N * gamma.
    table = 1 / (1 + np.exp(-logits[None, :] / np.asarray(header.temperatures)[:, None]))
    confidence = np.empty(bank.confidence_bytes.shape, dtype=np.float32)
    for k in range(header.gamma):
        confidence[:, k] = table[k].astype(np.float32)[bank.confidence_bytes[:, k]]
    return Bank(**{**_shallow(bank), "confidence": confidence})


def _shallow(bank: Bank) -> dict[str, Any]:
    return {field.name: getattr(bank, field.name) for field in fields(bank)}


def recalibrated(bank: Bank, temperatures: npt.ArrayLike) -> Bank:
    """The same bank with other confidence temperatures, one a position (all > 0)."""
    values = np.asarray(temperatures, dtype=np.float64)
    if values.shape != (bank.header.gamma,) or not np.all(np.isfinite(values)) or np.any(values <= 0):
        raise InputError(
            field="temperatures", value=values.tolist(), expected=f"{bank.header.gamma} finite numbers > 0"
        )
    header = BankHeader(**{**asdict(bank.header), "temperatures": tuple(float(v) for v in values)})
    return _dequantized(Bank(**{**_shallow(bank), "header": header}))


def _need(condition: bool, file: str | Path, field: str, value: object, expected: str) -> None:
    if not condition:
        raise InputError(file=file, field=field, value=value, expected=expected)


def _check_header(header: BankHeader, file: str | Path) -> None:
    def need(condition: bool, field: str, expected: str) -> None:
        _need(condition, file, field, getattr(header, field), expected)

    def number(value: object) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")

    need(header.format == FORMAT, "format", repr(FORMAT))
    need(header.version == VERSION, "version", f"{VERSION} (this dsim reads no other)")
    need(header.kind in KINDS, "kind", f"one of {', '.join(KINDS)}")
    need(type(header.gamma) is int and 1 <= header.gamma <= 64, "gamma", "an integer in 1..64")
    for field in ("drafter", "target", "source", "license", "notes"):
        need(isinstance(getattr(header, field), str), field, "text")
    need(0 < len(header.domains) <= 255, "domains", "1 to 255 names")
    need(all(isinstance(name, str) and name for name in header.domains), "domains", "names")
    need(len(set(header.domains)) == len(header.domains), "domains", "distinct names")
    need(number(header.logit_low), "logit_low", "a finite number")
    need(number(header.logit_high) and header.logit_low < header.logit_high, "logit_high", f"> {header.logit_low}")
    need(
        len(header.temperatures) == header.gamma and all(number(t) and t > 0 for t in header.temperatures),
        "temperatures",
        f"{header.gamma} finite numbers > 0",
    )


def check_bank(bank: Bank, file: str | Path) -> None:
    """Raise InputError unless every array has its shape and range."""
    header = bank.header
    _check_header(header, file)
    rows = bank.accepted.shape[0] if bank.accepted.ndim == 1 else -1

    def need(condition: bool, field: str, value: object, expected: str) -> None:
        _need(condition, file, field, value, expected)

    need(bank.accepted.ndim == 1 and rows > 0, "accepted", bank.accepted.shape, "a non-empty vector")
    for name in ("confidence_bytes", "alpha_bytes"):
        array = getattr(bank, name)
        need(array.shape == (rows, header.gamma), name, array.shape, f"shape {(rows, header.gamma)}")
    top = int(bank.accepted.max())
    need(top <= header.gamma, "accepted", top, f"at most gamma = {header.gamma}")
    bounds, domain = bank.bounds, bank.domain
    need(bounds.ndim == 1 and bounds.size >= 2, "bounds", bounds.shape, "at least one trajectory")
    need(
        int(bounds[0]) == 0 and int(bounds[-1]) == rows,
        "bounds",
        bounds[[0, -1]].tolist(),
        f"[0, {rows}] at its ends",
    )
    shortest = int(np.diff(bounds).min())
    need(
        shortest > header.gamma + 1,
        "bounds",
        shortest,
        f"trajectories longer than gamma + 1 = {header.gamma + 1}",
    )
    need(domain.shape == (bounds.size - 1,), "domain", domain.shape, f"one a trajectory ({bounds.size - 1})")
    need(
        int(domain.max()) < len(header.domains),
        "domain",
        int(domain.max()),
        f"an index below {len(header.domains)}",
    )
    missing = [name for i, name in enumerate(header.domains) if not np.any(domain == i)]
    need(not missing, "domain", missing, "at least one trajectory a domain")


def write_bank(bank: Bank, path: str | Path) -> None:
    """Write a bank file with its digest, atomically.

    Raises
    ------
    InputError
        An array out of shape or range, or a header that is not one (`check_bank`).
    """
    path = Path(path)
    check_bank(bank, path)
    members: dict[str, Any] = {
        "header": np.frombuffer(_header_json(bank.header).encode(), dtype=np.uint8),
        "confidence": bank.confidence_bytes,
        "alpha": bank.alpha_bytes,
        "accepted": bank.accepted.astype(np.uint8),
        "bounds": bank.bounds,
        "domain": bank.domain,
    }
    members[_DIGEST] = np.frombuffer(_digest(members), dtype=np.uint8)
    with replacing(path) as part, part.open("wb") as stream:
        np.savez_compressed(stream, **members)


def _digest(members: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """The 32 bytes that belong into the member ``sha256`` of a file with these members."""
    digest = hashlib.sha256()
    for name in _TYPES:
        value = members[name]
        digest.update(f"\n{name} {value.dtype} {value.shape}\n".encode())
        digest.update(value.tobytes())
    return digest.digest()


def _header_json(header: BankHeader) -> str:
    return json.dumps(asdict(header), sort_keys=True, indent=1)


def _parse_header(text: str, file: str | Path) -> BankHeader:
    try:
        raw = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"is not JSON ({error})", file=file, field="header") from None
    if not isinstance(raw, dict):
        raise InputError(file=file, field="header", value=raw, expected="an object")
    if raw.get("format") != FORMAT:
        raise InputError(file=file, field="format", value=raw.get("format"), expected=repr(FORMAT))
    if raw.get("version") != VERSION:
        raise InputError(
            file=file,
            field="version",
            value=raw.get("version"),
            expected=f"{VERSION} (this dsim reads no other)",
        )
    names = {field.name for field in fields(BankHeader)}
    for key in sorted(raw.keys() - names):
        raise InputError("unknown key", file=file, field=key, expected=f"one of {', '.join(sorted(names))}")
    for key in sorted(names - raw.keys() - {"notes"}):
        raise InputError("missing key", file=file, field=key)
    for key in ("domains", "temperatures"):
        if not isinstance(raw[key], list):
            raise InputError(file=file, field=key, value=raw[key], expected="a list")
        raw[key] = tuple(raw[key])
    return BankHeader(**raw)


def cached_bank(key: str, build: Callable[[], Bank]) -> Bank:
    """The bank stored in the cache under `key`, built and stored if it is not there.

    The arrays of the returned bank are memory maps. Where the cache cannot be written the bank stays in memory.
    """
    folder = cache_dir() / f"banks-{LAYOUT}" / key
    if folder.is_dir():
        try:
            return _open_unpacked(folder)
        except (InputError, OSError):
            # Damaged: what is in the cache can be made again.
            shutil.rmtree(folder, ignore_errors=True)
    bank = build()
    try:
        _unpack(bank, folder)
        return _open_unpacked(folder)
    except (InputError, OSError):  # it cannot be written, or stays damaged
        return bank


#: What an unpacked bank consists of, beside the checksums of these.
_HEADER, _CHECKSUMS = "header.json", "checksums.json"
_ARRAYS = tuple(field.name for field in fields(Bank) if field.name != "header")


def _unpack(bank: Bank, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".unpack-"))
    try:
        for name in _ARRAYS:
            np.save(temporary / f"{name}.npy", getattr(bank, name), allow_pickle=False)
        (temporary / _HEADER).write_text(_header_json(bank.header), encoding="utf-8")
        (temporary / _CHECKSUMS).write_text(_checksums(temporary), encoding="utf-8")
        try:
            os.rename(temporary, folder)
        except OSError:
            # Another process was faster: its copy is as good as ours.
            if not (folder / _CHECKSUMS).is_file():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _checksums(folder: Path) -> str:
    """Size and CRC-32 of each file of an unpacked bank, as JSON. 15 MB take some 5 ms whenever a bank is opened."""
    found = {}
    for name in (_HEADER, *(f"{name}.npy" for name in _ARRAYS)):
        size = total = 0
        # Read in pieces: to fault all pages of a map in one by one takes twice as long.
        with (folder / name).open("rb", buffering=0) as stream:
            while piece := stream.read(1 << 16):
                size, total = size + len(piece), zlib.crc32(piece, total)
        found[name] = [size, total]
    return json.dumps(found)


def _open_unpacked(folder: Path) -> Bank:
    """Open an unpacked bank; InputError or OSError where anything of it is not as it was written."""
    if (folder / _CHECKSUMS).read_bytes() != _checksums(folder).encode():
        raise InputError("is damaged: the checksums are those of other content", file=folder)
    header = _parse_header((folder / _HEADER).read_text(encoding="utf-8"), folder / _HEADER)
    arrays: dict[str, Any] = {}
    for name in _ARRAYS:
        # A plain view of the map: numpy.memmap's own indexing costs microseconds a step.
        arrays[name] = np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False))
    bank = Bank(header=header, **arrays)
    check_bank(bank, folder)
    return bank


def shipped_banks() -> tuple[str, ...]:
    """Names of the banks that come with dsim, in alphabetical order."""
    folder = _shipped_folder()
    items = folder.iterdir() if folder.is_dir() else ()
    return tuple(sorted(item.name[:-4] for item in items if item.name.endswith(".npz")))


def shipped_bank_file(name: str) -> Traversable:
    """Where the bank of that name comes with dsim, whether there is one or not."""
    return _shipped_folder() / f"{name}.npz"


def _shipped_folder() -> Traversable:
    return resources.files("dsim") / "data" / "banks"


def load_bank(name_or_path: str | Path) -> Bank:
    """A shipped bank by its name, or any other by the path of its ``.npz`` file.

    Raises
    ------
    InputError
        Unknown name (the known ones are listed), or what `read_bank` raises.
    """
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or text.endswith(".npz") or "/" in text or os.sep in text:
        return read_bank(name_or_path)
    known = shipped_banks()
    if text not in known:
        expected = f"one of {', '.join(known) or '(none is shipped)'}, or the path of a bank's .npz file"
        raise InputError("unknown bank", field="bank", value=text, expected=expected)
    with resources.as_file(shipped_bank_file(text)) as path:
        return read_bank(path)


def read_bank(path: str | Path) -> Bank:
    """Open a bank file: check it, unpack it once to the cache, map it.

    Raises
    ------
    InputError
        Not a bank, another version, a damaged file, a digest that is not that of the content, a recorded bank
        without one, or arrays out of shape or range.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError("bank not found", file=path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", file=path) from None
    # What is unpacked is what was hashed, even if the file is being changed.
    return cached_bank(hashlib.sha256(content).hexdigest(), lambda: _read_packed(path, content))


def _read_packed(path: Path, content: bytes) -> Bank:
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            members = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, KeyError) as error:
        raise InputError(f"is not a readable bank ({type(error).__name__}: {error})", file=path) from None
    except Exception as error:  # zlib.error and what else a damaged archive raises
        raise InputError(f"is damaged ({type(error).__name__}: {error})", file=path) from None
    for name in _TYPES:
        if name not in members:
            raise InputError("missing array", file=path, field=name, expected=", ".join(_TYPES))
    for name, dtype in (_TYPES | {_DIGEST: np.uint8}).items():
        if name in members and members[name].dtype != dtype:
            raise InputError(file=path, field=name, value=str(members[name].dtype), expected=str(np.dtype(dtype)))
    # The header first: another version may have another digest.
    header = _parse_header(members["header"].tobytes().decode("utf-8", errors="replace"), path)
    _check_digest(members, header.kind, path)
    bank = Bank(
        header=header,
        confidence=np.empty((0, 0), np.float32),
        confidence_bytes=members["confidence"],
        alpha_bytes=members["alpha"],
        accepted=members["accepted"].astype(np.int64),
        bounds=members["bounds"],
        domain=members["domain"],
    )
    check_bank(bank, path)
    return _dequantized(bank)


def _check_digest(members: Mapping[str, npt.NDArray[Any]], kind: str, path: Path) -> None:
    """Only "recorded" claims that a real drafter and target said this, so only there a digest has to be."""
    if _DIGEST in members:
        if members[_DIGEST].tobytes() != _digest(members):
            message = "does not match its digest: it was changed after it was written"
            raise InputError(message, file=path, field=_DIGEST)
    elif kind == "recorded":
        message = "is a recorded bank without a digest: record it again, or write it again (make_bank, write_bank)"
        raise InputError(message, file=path, field=_DIGEST)
