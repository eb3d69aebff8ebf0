"""Where numbers come from, in words for captions. The exact labels are in the CSV files (``cost_source``, ...)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dsim.profile import Profile
from dsim.wording import DRAFTER_NAMES, counted

_PRESETS = {
    "dsv4": "DeepSeek-V4's published level",
    "dsv4-flash-0731": "DeepSeek-V4-Flash-0731's published level",
    "qwen3-4b": "Qwen3-4B's published level",
}
_HEADS = {"markov": "Markov head", "gated": "gated head", "rnn": "RNN head"}
_TRACES = {
    "azure2023-code": "Azure LLM inference trace 2023, code",
    "azure2023-conv": "Azure LLM inference trace 2023, conversation",
    "mooncake-conversation": "Mooncake conversation trace",
}
_FITS = {
    "additive": "as bias + requests + tokens, fitted",
    "roofline": "on a smooth roofline fitted to them",
    "roofline-moe": "on a smooth roofline with experts fitted to them",
}
# What a label has behind the drafter's name; several may follow each other.
_CUT = re.compile(r":first-(\d+)-of-(\d+)$")
_QUALITY = r"perfect|constant|shuffled|overconfident|underconfident"
_MARK = re.compile(
    rf":(tilted|uncalibrated|recalibrated|online-sts|(?:{_QUALITY})(?:-by-domain)?(?:-[\d.e+-]+)?|bias\(.*\))$"
)
_MARKS = {
    "online-sts": "calibrated online",
    "perfect": "perfect confidences",
    "recalibrated": "calibrated again",
    "tilted": "shifted by the scenario",
    "uncalibrated": "not calibrated",
}
_PRICED = re.compile(r";draft=(\d+)x([^:;]+):([^;]*)")
_TILTED = re.compile(r"tilted:(.+?):((?:recorded|synthetic|visited):.*)$")


def cost_words(labels: Mapping[str, str], profile: Profile | None = None) -> str:
    """A sentence about step times and what drafting costs.

    Parameters
    ----------
    labels
        The different values of ``cost_source``, of one profile and fit, and whose drafts each is about.
    profile
        The profile, where it is at hand: machine and model are named, too.

    Examples
    --------
    >>> cost_words({"measured:box:roofline": "none", "measured:box:roofline;draft=5x0.333:assumed": "mtp"})
    "Step times: measured (profile box), on a smooth roofline fitted to them; MTP drafts at 5 x 0.333 of the profiled \
drafter's pass (assumed)."
    """
    base = next(iter(labels)).split(";")[0]
    kind, _, rest = base.partition(":")
    name, _, fit = rest.partition(":")
    if kind not in ("measured", "derived") or not fit or ":" in fit:
        said = f"Step times {base}"
    else:
        where, stairs = "", f"fit {fit}"
        if profile is not None and profile.name == name:
            where = f"{profile.model} on {profile.hardware}, "
            stairs = "priced " + ("at the next captured size" if profile.capture_limit else "between timed ones")
        how = "measured" if kind == "measured" else "computed, not timed"
        said = f"Step times: {how} ({where}profile {name}), {_FITS.get(fit, stairs)}"
    if any("draft=included" in label.split(";") for label in labels):
        said += "; the draft's time is in them"
    priced: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for label, whose in labels.items():
        if found := _PRICED.search(label):
            priced.setdefault((found[2], found[3]), []).append((int(found[1]), whose))
    for (scale, note), own in priced.items():
        names = ", ".join(dict.fromkeys(DRAFTER_NAMES.get(whose, whose) for _, whose in own))
        passes = _either(sorted({count for count, _ in own}))
        said += f"; {names} drafts at {passes} x {scale} of the profiled drafter's pass ({note})"
    return f"{said}."


def drafts_words(labels: Sequence[str], targets: Mapping[str, str] | None = None) -> str:
    """Sentences about where drafts come from; empty where nothing is drafted.

    Parameters
    ----------
    labels
        The different values of ``drafts_source``.
    targets
        Whose text was drafted, by the part of a label that a bank gives it (``recorded:dsim:dspark markov 2 layers``).

    Examples
    --------
    >>> drafts_words(["none", "recorded:dsim:mtp 1 layers", "recorded:dsim:mtp 1 layers:first-1-of-5"])
    "Drafts: recorded from this project's own small drafters (MTP, 1 layer, blocks whole or cut to 1 of 5)."
    """
    groups: dict[tuple[str, str, str], list[_Label]] = {}
    for label in labels:
        if label != "none":
            found = _parsed(label)
            groups.setdefault((found.kind, found.source, found.to), []).append(found)
    sentences = []
    for (kind, source, to), members in groups.items():
        drafters = _listed_drafters(members)
        marks = _listed_marks(members)
        known = targets or {}
        over = ", ".join(dict.fromkeys(known[one.base] for one in members if one.base in known))
        text = f" on texts of {over}" if over else ""
        if kind == "recorded":
            whose = "this project's own small drafters" if source == "dsim" else source
            said = f"recorded from {whose} ({drafters}){text}"
        elif kind == "visited":
            said = f"from an engine's log ({source}: {drafters}){text}; where it did not go, drafts nearby stand in"
        elif kind == "synthetic":
            said = f"synthetic ({drafters}), at {_level(source)}"
        elif kind == "live":
            said = f"live, drafter ({drafters}) and target ({source}) themselves; step times are the profile's"
        else:
            said = drafters
        if to:
            said += f"; tilted: luck and confidences as recorded, their level moved to {_level(to)}"
        sentences.append(f"Drafts: {said}{f'; {marks}' if marks else ''}.")
    return " ".join(sentences)


def requests_words(label: str) -> str:
    """A sentence about the requests.

    Examples
    --------
    >>> requests_words("recorded:azure2023-conv:window")
    'Requests: Azure LLM inference trace 2023, conversation (recorded), window; results are conditional on this trace.'
    """
    kind, _, rest = label.partition(":")
    name, *done = rest.split(":")
    changes = "".join(f", {text.replace('-', ' ')}" for text in done)
    return f"Requests: {_TRACES.get(name, name)} ({kind}){changes}; results are conditional on this trace."


def drafter_words(text: str) -> str:
    """A drafter's own description, as banks have it, for people.

    >>> drafter_words("dspark markov 2 layers"), drafter_words("mtp 1 layers"), drafter_words("mine")
    ('DSpark, Markov head, 2 layers', 'MTP, 1 layer', 'mine')
    """
    name, _, rest = text.partition(":")  # a live one says its device behind the name
    found = re.fullmatch(r"([a-z0-9-]+)(?: (markov|gated|rnn))? (\d+) layers", text)
    if not found or found[1] not in DRAFTER_NAMES:
        return (
            f"{DRAFTER_NAMES[name]}{', '.join(['', *filter(None, rest.split(':'))])}" if name in DRAFTER_NAMES else text
        )
    layers = counted(int(found[3]), "layer")
    return ", ".join(part for part in (DRAFTER_NAMES[found[1]], _HEADS.get(found[2] or ""), layers) if part)


@dataclass(frozen=True)
class _Label:
    """The parts of a ``drafts_source``. `cut`: the first so many of a block of so many, or zeros."""

    kind: str
    source: str
    drafter: str
    to: str = ""
    cut: tuple[int, int] = (0, 0)
    marks: tuple[str, ...] = ()

    @property
    def base(self) -> str:
        return f"{self.kind}:{self.source}:{self.drafter}"


def _parsed(label: str) -> _Label:
    rest, to = label, ""
    if found := _TILTED.fullmatch(label):
        to, rest = found[1], found[2]
    cut = (0, 0)
    marks: list[str] = []
    while found := _CUT.search(rest) or _MARK.search(rest):
        if found.re is _CUT:
            cut = (int(found[1]), int(found[2]))
        else:
            marks.insert(0, _MARKS.get(found[1], f"confidences: {found[1]}"))
        rest = rest[: found.start()]
    kind, _, behind = rest.partition(":")
    source, _, drafter = behind.partition(":")
    if kind not in ("recorded", "synthetic", "visited", "live") or not source:
        return _Label("", "", label)
    return _Label(kind, source, drafter, to, cut, tuple(marks))


def _listed_drafters(members: Sequence[_Label]) -> str:
    """Each drafter once, with what of its blocks is used."""
    said = []
    for drafter in dict.fromkeys(one.drafter for one in members):
        own = [one.cut for one in members if one.drafter == drafter]
        cuts = sorted({cut for cut in own if cut[1]})
        blocks = ""
        if cuts:
            whole = "whole or " if (0, 0) in own else ""
            blocks = f", blocks {whole}cut to {_either([first for first, _ in cuts])} of {cuts[0][1]}"
        said.append(f"{drafter_words(drafter)}{blocks}")
    return "; ".join(said)


def _listed_marks(members: Sequence[_Label]) -> str:
    """What was done to the drafts, and whether to those of all."""
    said = []
    for mark in dict.fromkeys(mark for one in members for mark in one.marks):
        some = "" if all(mark in one.marks for one in members) else " in some arms"
        said.append(f"{mark}{some}")
    return "; ".join(said)


def _either(numbers: Sequence[int]) -> str:
    """``1``, ``1 or 5``, ``1, 2 or 5``."""
    words = [str(number) for number in numbers]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _level(name: str) -> str:
    preset = name.partition(":")[0]
    if preset in _PRESETS:
        derived = "; math and chat derived from code" if preset == "dsv4" else ""
        return f"{_PRESETS[preset]} (preset {name}{derived})"
    return "the scenario's own curve" if name == "scenario" else f"the curve {name}"
