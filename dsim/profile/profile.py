"""The `Profile`: timed passes, and what they were measured on."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsim.errors import InputError
from dsim.profile.samples import LARGEST_STEP, SIZE_EXPECTED, IntArray, Samples, check_samples

PROFILE_KINDS = ("measured", "derived")

#: What a profile says about itself, in the order of its TOML file.
IDENTITY = (
    "name",
    "hardware",
    "gpus",
    "model",
    "engine",
    "kind",
    "captured_sizes",
    "capture_limit",
    "draft_included",
    "source",
    "license",
    "notes",
)

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")


@dataclass(frozen=True, eq=False)
class Profile:
    """Step times of one model on one machine, with where they come from.

    Parameters
    ----------
    name
        Lower-case name, the stem of the two files.
    hardware, model, engine
        What was measured, in words.
    gpus
        Accelerators that one replica occupies; 1, and a word in `notes`, where the source does not say.
    captured_sizes
        int64[S] strictly increasing: token counts for which the engine holds a captured graph (a smaller
        step is padded to the next one). Empty where unknown or none.
    capture_limit
        The largest of them: above it the engine runs eagerly. 0 where nothing is captured.
    source, license
        Where the figures come from, and under what terms.
    kind
        ``measured``: timed steps or their published medians. ``derived``: computed from other figures.
    samples
        The timed passes.
    notes
        Accuracy, context, what was changed.
    draft_included
        The verify samples time the whole step, drafting included, so that a draft costs nothing more.

    Raises
    ------
    InputError
        Anything that the description above rules out, no verify samples, sizes out of order, or a repeated
        (kind, size, context, repeat).
    """

    name: str
    hardware: str
    gpus: int
    model: str
    engine: str
    captured_sizes: IntArray
    capture_limit: int
    source: str
    license: str
    kind: str
    samples: Samples
    notes: str = ""
    draft_included: bool = False

    def __post_init__(self) -> None:
        check_identity({key: getattr(self, key) for key in IDENTITY})
        sizes = np.array(self.captured_sizes, dtype=np.int64)
        sizes.setflags(write=False)
        object.__setattr__(self, "captured_sizes", sizes)
        check_samples(self.samples)
        if self.draft_included and "draft" in self.samples.kind:
            raise InputError(
                "has draft samples, so its verify samples cannot include the draft",
                file=self.name,
                field="draft_included",
                value=True,
                expected="false",
            )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Profile)
            and all(getattr(self, key) == getattr(other, key) for key in IDENTITY if key != "captured_sizes")
            and np.array_equal(self.captured_sizes, other.captured_sizes)
            and self.samples == other.samples
        )

    __hash__ = None  # type: ignore[assignment]


def check_identity(
    found: dict[str, Any],
    file: str | None = None,
    line_of: Callable[[str], int | None] = lambda _key: None,
) -> None:
    """Refuse what is wrong with the values of `IDENTITY`; `line_of` gives a key's line in `file`, for the errors."""

    def refuse(key: str, value: object, expected: str) -> InputError:
        return InputError(file=file, line=line_of(key), field=key, value=value, expected=expected)

    for key in ("name", "hardware", "model", "engine", "source", "license", "kind", "notes"):
        value = found[key]
        if not isinstance(value, str) or (not value.strip() and key != "notes"):
            raise refuse(key, value, "text" if key == "notes" else "text that is not empty")
    if not _NAME.fullmatch(found["name"]):
        raise refuse("name", found["name"], "lower-case letters, digits, '.', '_' and '-'")
    if found["kind"] not in PROFILE_KINDS:
        raise refuse("kind", found["kind"], f"one of {', '.join(PROFILE_KINDS)}")
    if not isinstance(found["draft_included"], bool):
        raise refuse("draft_included", found["draft_included"], "true or false")
    if not is_int(found["gpus"]) or found["gpus"] < 1:
        raise refuse("gpus", found["gpus"], SIZE_EXPECTED)
    if found["gpus"] > LARGEST_STEP:
        raise refuse("gpus", found["gpus"], f"at most {LARGEST_STEP}")

    sizes = found["captured_sizes"]
    if isinstance(sizes, np.ndarray):
        sizes = sizes.tolist()
    if not isinstance(sizes, list | tuple):
        raise refuse("captured_sizes", sizes, "a list of token counts (empty where nothing is captured)")
    last = 0
    for size in sizes:
        if not is_int(size) or size <= last:
            raise refuse("captured_sizes", size, f"an integer > {last} (the sizes must increase)")
        if size > LARGEST_STEP:
            raise refuse("captured_sizes", size, f"at most {LARGEST_STEP}")
        last = int(size)
    limit = found["capture_limit"]
    if not is_int(limit) or limit != last:
        why = "the largest captured size" if last else "nothing is captured"
        raise refuse("capture_limit", limit, f"{last} ({why})")


def is_int(value: object) -> bool:
    """Whether a value is an integer, of Python or numpy (True and False are not)."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
