"""The command ``python -m dsim.convert``."""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from dsim.convert.from_profile import charged, from_profile
from dsim.convert.to_profile import to_profile
from dsim.drafts.bank import Bank, load_bank, write_bank
from dsim.drafts.calibrate import checked_temperatures, write_temperatures
from dsim.drafts.logs import ConfidenceLog, LogSummary, bank_from_log, read_log
from dsim.drafts.source import BankDrafts
from dsim.engines import (
    FORMATS,
    EngineFile,
    PriceTable,
    StsTemperatures,
    read_engine_file,
    write_engine_file,
)
from dsim.errors import InputError
from dsim.profile import Profile, load_profile, shipped_profiles, write_profile
from dsim.profile.profile import IDENTITY
from dsim.schema import parse_override

#: What OUT can be: the engines' formats, temperatures as dsim reads them, a profile, a bank.
OUTPUTS = (*FORMATS, "temperatures", "profile", "bank")

_SETTABLE = {
    "profile": tuple(key for key in IDENTITY if key not in ("name", "captured_sizes", "capture_limit")),
    "bank": ("drafter", "target", "source", "license"),
}

#: Largest block anywhere in dsim.
MOST_GAMMA = 64
#: Seeds are taken modulo 2**64: a larger one would be another one's draws.
MOST_SEED = (1 << 64) - 1

Source = EngineFile | Profile | Bank | ConfidenceLog


@dataclass(frozen=True)
class Options:
    """Options of the command; None (or empty) where not given."""

    format: str | None = None
    gamma: int | None = None
    context: int | None = None
    like: Path | None = None
    seed: int | None = None
    settings: tuple[tuple[str, Any], ...] = ()


def convert(source: str | Path, out: str | Path, options: Options | None = None) -> list[str]:
    """Read `source`, write `out`, and say what was lost or assumed.

    Parameters
    ----------
    source
        An engine's file (``.json``), a profile (``.toml``, ``.csv``, or a shipped one's name), a confidence log
        (``.jsonl``) or a bank (``.npz``).
    out
        The file to write; a profile is two.
    options
        See ``python -m dsim.convert --help``.

    Raises
    ------
    InputError
        Bad input, a conversion that cannot be, or an option that would change nothing. Nothing is written then.
    """
    options, source, out = options or Options(), str(source), Path(out)
    found = _read(source)
    wanted = options.format or _guess(found, out)
    _suffix(wanted, out)
    _refuse_unused(found, wanted, options)
    if not out.absolute().parent.is_dir():
        raise InputError("there is no such folder", file=out.absolute().parent)
    for file in _written(wanted, out):
        if file.is_dir():
            raise InputError("is a folder", file=file, field="OUT", expected="a file to write")
        if any(_same(file, read) for read in _read_from(source, options)):
            raise InputError("would replace what it is made of", file=file, field="OUT", expected="another name")
    if wanted == "bank":
        return _log_to_bank(found, Path(source), out, options)
    if wanted in ("sts", "temperatures"):
        return _temperatures(found, wanted, out)
    return _table(found, source, wanted, out, options)


# -- reading -----------------------------------------------------------------------------------------------


def _read(source: str) -> Source:
    suffix = Path(source).suffix
    if suffix == ".jsonl":
        return read_log(source)
    if suffix == ".npz":
        return load_bank(source)
    if suffix in (".toml", ".csv") or source in shipped_profiles():
        return load_profile(source)
    if suffix == ".json":
        return read_engine_file(source)
    kinds = "a .json (engine), .toml or .csv (profile), .jsonl (log) or .npz (bank) file, or a shipped profile's name"
    raise InputError("cannot be told from its name", file=source, field="IN", expected=kinds)


def _guess(found: Source, out: Path) -> str:
    if out.suffix in (".toml", ".csv"):
        return "profile"
    if out.suffix == ".npz":
        return "bank"
    if not isinstance(found, Profile | Bank | ConfidenceLog):
        return found.format
    if isinstance(found, Bank):
        return "temperatures"
    raise InputError("OUT's name does not tell it", field="--format", expected=f"one of {', '.join(OUTPUTS)}")


def _suffix(wanted: str, out: Path) -> None:
    allowed = {"profile": (".toml", ".csv"), "bank": (".npz",)}.get(wanted, (".json",))
    if out.suffix not in allowed:
        raise InputError(file=out, field="OUT", value=out.suffix, expected=f"{' or '.join(allowed)} for {wanted}")


def _written(wanted: str, out: Path) -> list[Path]:
    return [out.with_suffix(".toml"), out.with_suffix(".csv")] if wanted == "profile" else [out]


def _refuse_unused(found: Source, wanted: str, options: Options) -> None:
    """An option that would change nothing is an error."""
    to_table = wanted in FORMATS and wanted != "sts"
    reads = getattr(found, "format", None)
    copied = reads == wanted and options.like is None
    for name, used, when in (
        ("gamma", "sglang-diagonal" in (reads, wanted) and not copied, "a diagonal table is read or made"),
        ("context", isinstance(found, Profile) and to_table, "a table is made of a profile"),
        ("like", to_table, "an engine's table is made"),
        ("seed", wanted == "bank", "a bank is made of a log"),
    ):
        if getattr(options, name) is not None and not used:
            raise InputError(f"has an effect only where {when}", field=f"--{name}", value=str(getattr(options, name)))
    known = _SETTABLE.get(wanted, ()) if not isinstance(found, Profile) else ()
    seen: set[str] = set()
    for key, value in options.settings:
        if key in seen:
            raise InputError("is given twice", field=f"--set {key}", value=value)
        seen.add(key)
        if key not in known:
            expected = f"one of {', '.join(known)}" if known else "no --set: OUT has nothing that could be named"
            raise InputError(field=f"--set {key}", value=value, expected=expected)


def _read_from(source: str, options: Options) -> list[Path]:
    """The files that are read; of a profile there are two."""
    path = Path(source)
    pair = [path.with_suffix(".toml"), path.with_suffix(".csv")] if path.suffix in (".toml", ".csv") else [path]
    return pair if options.like is None else [*pair, options.like]


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # one of them is not there
        return False


# -- temperatures ------------------------------------------------------------------------------------------


def _temperatures(found: Source, wanted: str, out: Path) -> list[str]:
    if isinstance(found, Bank):
        values, told = found.header.temperatures, ["everything but the bank's temperatures is dropped"]
    elif isinstance(found, StsTemperatures):
        values = tuple(float(value) for value in found.temperatures)
        if wanted == "sts":
            write_engine_file(found, out)
            return []
        dropped = [*found.extra, *(key for key in found.spellings if key != "temperatures")]
        told = [f"dropped: {', '.join(dropped)}"] if dropped else []
    else:
        raise _impossible(found, wanted, "temperatures or a bank")
    write_temperatures(out, checked_temperatures(values))
    return told


def _impossible(found: Source, wanted: str, needed: str) -> InputError:
    kind = {Profile: "a profile", Bank: "a bank", ConfidenceLog: "a confidence log"}.get(type(found))
    return InputError(
        f"{kind or getattr(found, 'format', 'this')} cannot become {wanted}",
        field="--format",
        value=wanted,
        expected=f"a format that IN can be turned into ({wanted} is made of {needed})",
    )


# -- tables and profiles -----------------------------------------------------------------------------------


def _table(found: Source, source: str, wanted: str, out: Path, options: Options) -> list[str]:
    if not isinstance(found, Profile | PriceTable):
        raise _impossible(found, wanted, "a cost table or a profile")
    if isinstance(found, Profile) and wanted == "profile":
        raise _impossible(found, wanted, "an engine's table; a profile is copied with its two files")
    if isinstance(found, PriceTable) and found.format == wanted and options.like is None:
        write_engine_file(found, out)
        return []
    told: list[str] = []
    profile, original, gamma = found, None, options.gamma
    if isinstance(profile, PriceTable):
        original = profile
        name = out.stem if wanted == "profile" else "converted"
        timed_at = gamma if original.format == "sglang-diagonal" else None
        gamma = gamma if timed_at is None else None
        identity = dict(options.settings)
        try:
            profile, told = to_profile(original, name, source=Path(source).name, gamma=timed_at, identity=identity)
        except InputError as error:
            if error.field != "name":
                raise
            raise InputError(
                "a profile is named like its file", field="OUT", value=name, expected=error.expected
            ) from None
    if wanted == "profile":
        assert original is not None
        told += charged(profile, original)
        write_profile(profile, out)
        return [*told, f"kind = '{profile.kind}' (--set kind=... if the file's numbers are of another kind)"]
    table, more = from_profile(
        profile,
        wanted,
        gamma=gamma,
        context=options.context,
        like=None if options.like is None else read_engine_file(options.like),
        source_sha256=_sha256(source),
        original=original,
    )
    write_engine_file(table, out)
    return told + more


def _sha256(source: str) -> str | None:
    path = Path(source)
    path = path.with_suffix(".csv") if path.suffix == ".toml" else path
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


# -- logs --------------------------------------------------------------------------------------------------


def _log_to_bank(found: Source, source: Path, out: Path, options: Options) -> list[str]:
    if not isinstance(found, ConfidenceLog):
        raise _impossible(found, "bank", "a confidence log (.jsonl)")
    header = {"source": source.stem} | dict(options.settings)
    for key, value in header.items():
        if not isinstance(value, str) or not value:
            raise InputError(field=f"--set {key}", value=value, expected="text that is not empty")
    try:
        bank, summary = bank_from_log(found, seed=options.seed or 0, **header)
    except InputError as error:
        raise InputError(
            error.message, file=source, field=error.field, value=error.value, expected=error.expected
        ) from None
    write_bank(bank, out)
    return _summarized(summary, found, BankDrafts(bank).label)


def _summarized(summary: LogSummary, log: ConfidenceLog, label: str) -> list[str]:
    visited, censored = summary.blocks / summary.rows, summary.censored / summary.blocks
    told = [
        f"drafts_source is '{label}'",
        f"visited positions only, {summary.blocks} of {summary.rows} ({100 * visited:.0f} %): the others get the block "
        "of a visited position nearby, so a policy that goes elsewhere meets drafts that are not quite its own",
        f"{summary.censored} blocks ({100 * censored:.0f} %) end in drafts that were not verified: accepted or not by "
        "the calibrated confidences",
        "acceptance probabilities are the calibrated confidences",
    ]
    for k, (seen, temperature, bias) in enumerate(
        zip(summary.observed, summary.temperatures, summary.bias, strict=True), start=1
    ):
        what = f"logit / {temperature:.3f} {bias:+.3f}" if seen else "never verified: confidences as they are"
        told.append(f"position {k}: {seen} outcomes; {what}")
    if summary.dropped:
        told.append(
            f"{summary.dropped} of {summary.requests} requests are dropped: no longer than {log.gamma + 1} tokens"
        )
    if summary.missed:
        told.append(f"at least {summary.missed} steps of the requests are missing in the log")
    return told


# -- the command line --------------------------------------------------------------------------------------


class _OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line, like all others of the command."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (--help shows the options)\n")


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = _OneLineParser(
        prog="python -m dsim.convert",
        description="Convert cost tables of serving engines, profiles and confidence logs. What is lost or assumed is "
        "printed. docs/engine-files.md describes all formats.",
        epilog="IN is recognized by its suffix and, for .json, by its fields. Ends with 0 when OUT was written, with 2 "
        "and one line when IN is wrong or cannot become OUT.",
    )
    made.add_argument(
        "source",
        metavar="IN",
        help="engine file (.json), profile (.toml or .csv, or a shipped profile's name), log (.jsonl) or bank (.npz)",
    )
    made.add_argument("out", metavar="OUT", help="file to write: .json, .toml or .csv (a profile is both), .npz")
    made.add_argument(
        "--format",
        choices=OUTPUTS,
        help="what OUT is to be; left out: a profile for .toml and .csv, a bank for .npz, and for .json the engine "
        "format of IN",
    )
    made.add_argument(
        "--like",
        metavar="FILE",
        type=Path,
        help="a file of OUT's format that the engine itself wrote: what prices do not determine (fingerprint, factors, "
        "minimum gain, further fields; for vllm and trtllm-v2 also the sizes) is taken from it. trtllm-v2 needs it, "
        "and a vLLM engine takes no other file",
    )
    made.add_argument(
        "--gamma",
        metavar="N",
        type=int,
        help="block size of a diagonal table: N + 1 tokens a request. Reading one: gives its requests. Making one: "
        "folds the draft curve in, or chooses the diagonal of a profile with two axes",
    )
    made.add_argument("--context", metavar="TOKENS", type=int, help="which context of a profile with several")
    made.add_argument("--seed", metavar="N", type=int, help="of the draws for what a log does not tell (default: 0)")
    made.add_argument(
        "--set",
        metavar="KEY=VALUE",
        dest="settings",
        action="append",
        default=[],
        help=f"name what IN does not; may be repeated. Profile: {', '.join(_SETTABLE['profile'])}. Bank: "
        f"{', '.join(_SETTABLE['bank'])}",
    )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    given = vars(parser().parse_args(arguments))
    try:
        given["settings"] = tuple(parse_override(text) for text in given["settings"])
        for name, least in (("gamma", 1), ("context", 1), ("seed", 0)):
            if given[name] is not None and given[name] < least:
                raise InputError(field=f"--{name}", value=given[name], expected=f"an integer >= {least}")
        if (given["seed"] or 0) > MOST_SEED:
            raise InputError(field="--seed", value=given["seed"], expected=f"at most {MOST_SEED}")
        if (given["gamma"] or 0) > MOST_GAMMA:
            raise InputError(field="--gamma", value=given["gamma"], expected=f"at most {MOST_GAMMA}")
        options = Options(**{item.name: given[item.name] for item in fields(Options)})
        told = convert(given["source"], given["out"], options)
    except InputError as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 2
    except MemoryError:
        print(f"error: {given['source']}: out of memory; a size in it is too large", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {given['out']}: cannot be written ({error.strerror})", file=sys.stderr)
        return 2
    out = Path(given["out"])
    pair = out.suffix in (".toml", ".csv")
    print(f"wrote {out.with_suffix('.toml')} and {out.with_suffix('.csv')}" if pair else f"wrote {out}")
    for text in told:
        print(f"- {text}")
    if not told:
        print("nothing was lost")
    return 0
