"""Which loop runs a cluster: the compiled one where it can, the step-by-step one everywhere."""

from __future__ import annotations

from typing import Any

from dsim.cluster import run_cluster
from dsim.compiled import run_compiled, why_not
from dsim.errors import InputError
from dsim.telemetry import Records

#: ``auto``: compiled where that is possible; the records are the same bytes either way.
ENGINES = ("auto", "step", "compiled")


def serve(engine: str = "auto", **options: Any) -> Records:
    """Run a cluster; the options are those of `dsim.cluster.Cluster`.

    Parameters
    ----------
    engine
        One of `ENGINES`: ``step`` goes through SimPy and the policy's own `plan` at every step, ``compiled`` refuses
        what it cannot compile and says why.

    Raises
    ------
    InputError
        An unknown engine, a run that cannot be compiled, or whatever the run itself refuses.
    """
    if engine not in ENGINES:
        raise InputError(field="engine", value=engine, expected=f"one of {', '.join(ENGINES)}")
    if engine == "step" or (engine == "auto" and why_not(options["policy"], options["drafts"]) is not None):
        return run_cluster(**options)
    return run_compiled(**options)
