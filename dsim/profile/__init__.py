"""Measured step times of one machine: the `Profile`, its two files, and the profiles that come with dsim.

A profile is two files side by side. ``NAME.csv`` holds the samples, one timed forward pass a row::

    kind,tokens,requests,context_tokens,ms,repeat
    verify,8,,8192,5.3451,1
    draft,,16,8192,1.3171,1

``NAME.toml`` says what was measured (see `Profile`). `docs/cost-model.md` has a complete example.
"""

from __future__ import annotations

from dsim.profile.files import COLUMNS, load_profile, read_profile, shipped_profiles, write_profile
from dsim.profile.profile import PROFILE_KINDS, Profile
from dsim.profile.samples import MISSING, SAMPLE_KINDS, FloatArray, IntArray, Samples, StrArray

__all__ = [
    "COLUMNS",
    "DEFAULT_PROFILE",
    "MISSING",
    "PROFILE_KINDS",
    "SAMPLE_KINDS",
    "FloatArray",
    "IntArray",
    "Profile",
    "Samples",
    "StrArray",
    "load_profile",
    "read_profile",
    "shipped_profiles",
    "write_profile",
]

#: The profile that scenarios use unless they name another.
DEFAULT_PROFILE = "b300x4-dsv4-flash-0731"
