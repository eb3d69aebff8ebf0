"""dsim: a discrete-event simulator for scheduling policies of speculative decoding in LLM serving.

Importing the package is cheap: what is named below is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "InputError": "dsim.errors",
    "Policy": "dsim.policy",
    "PolicyView": "dsim.policy",
    "BasePolicy": "dsim.policy",
    "Traits": "dsim.policy",
    "load_policy": "dsim.policy",
    "check_policy": "dsim.conformance",
    "Profile": "dsim.profile",
    "load_profile": "dsim.profile",
    "fit": "dsim.cost",
    "Scenario": "dsim.scenario",
    "load_scenario": "dsim.scenario",
    "simulate": "dsim.scenario",
}

__all__ = [*sorted(_LAZY), "__version__"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'dsim' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
