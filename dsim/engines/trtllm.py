"""TensorRT-LLM's cost tables for DSpark: the additive one, and the one of exact graphs.

Facts from two open pull requests, https://github.com/NVIDIA/TensorRT-LLM/pull/17056 (`TrtllmV1`:
``dspark_planner.py``, ``dspark_sps_profiler.py``) and https://github.com/NVIDIA/TensorRT-LLM/pull/18392 (`TrtllmV2`,
``schema_version`` 2). "v1" is our name; its files carry no version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from dsim.engines.checks import (
    Number,
    digest,
    need,
    need_int,
    need_list,
    need_number,
    need_numbers,
    need_sha256,
    need_sizes,
    need_text,
    only,
    require,
    rest_of,
)
from dsim.engines.table import FloatArray, PriceTable
from dsim.errors import InputError
from dsim.lookup import StepTable

#: What the engine takes where a v1 file names no minimum gain.
DEFAULT_GAIN = 0.01


@dataclass(frozen=True, kw_only=True)
class TrtllmV1(PriceTable):
    """Milliseconds of a step as fixed overhead + batch overhead(requests) + step time(tokens).

    Both curves are linear between their sizes and hold the first and the last value outside them. (Early versions
    of the engine took the next smaller size's step time. Files that were written for those drop the sizes at which
    a shelf ends, so that today's engine prices the shelf as a slope; ``_meta.lookup`` = ``interp`` marks files that
    were not.) The engine ignores fields that it does not know; they are kept in `extra`.

    Parameters
    ----------
    token_counts, step_time_ms
        Tokens, strictly increasing, >= 0, and milliseconds, > 0: the term that verifying less saves.
    fixed_overhead_ms
        Milliseconds, >= 0; None where the file has none, which counts as 0.
    batch_sizes, batch_overhead_ms
        Requests, strictly increasing, >= 1, and milliseconds, >= 0; None where the file has none (0).
    minimum_predicted_gain
        Share by which a trimmed step must be better; None where the file has none (`DEFAULT_GAIN`).

    Examples
    --------
    >>> table = TrtllmV1(token_counts=(1, 3), step_time_ms=(4.0, 8.0), fixed_overhead_ms=1.0)
    >>> table.prices(2, 4).tolist()
    [5.0, 5.0, 7.0, 9.0, 9.0]
    """

    format: ClassVar[str] = "trtllm-v1"

    token_counts: tuple[int, ...]
    step_time_ms: tuple[Number, ...]
    fixed_overhead_ms: Number | None = None
    batch_sizes: tuple[int, ...] | None = None
    batch_overhead_ms: tuple[Number, ...] | None = None
    minimum_predicted_gain: Number | None = None

    __hash__ = None

    FIELDS: ClassVar[tuple[str, ...]] = (
        "token_counts",
        "step_time_ms",
        "fixed_overhead_ms",
        "batch_sizes",
        "batch_overhead_ms",
        "minimum_predicted_gain",
    )

    def __post_init__(self) -> None:
        need_sizes(self.token_counts, "token_counts", 0)
        need_numbers(self.step_time_ms, "step_time_ms", len(self.token_counts), zero=False)
        for name in ("fixed_overhead_ms", "minimum_predicted_gain"):
            if getattr(self, name) is not None:
                need_number(getattr(self, name), name, zero=True)
        if self.batch_sizes or self.batch_overhead_ms:
            need_sizes(self.batch_sizes, "batch_sizes")
            need_numbers(self.batch_overhead_ms, "batch_overhead_ms", len(self.batch_sizes or ()), zero=True)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> TrtllmV1:
        """From the file's object."""
        require(raw, ("token_counts", "step_time_ms"))
        found: dict[str, Any] = {}
        for key in cls.FIELDS:
            if key in raw:
                need(raw[key] is not None, key, raw[key], "a value, or no such field")
                if key in ("token_counts", "step_time_ms", "batch_sizes", "batch_overhead_ms"):
                    need(isinstance(raw[key], list), key, raw[key], "a list")
                    found[key] = tuple(raw[key])
                else:
                    found[key] = raw[key]
        return cls(**found, extra=rest_of(raw, cls.FIELDS))

    def to_json(self) -> dict[str, Any]:
        """See `PriceTable.to_json`."""
        found = {key: getattr(self, key) for key in self.FIELDS if getattr(self, key) is not None}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()} | dict(
            self.extra
        )

    @property
    def gain(self) -> float:
        """Minimum predicted gain that the engine works with."""
        return DEFAULT_GAIN if self.minimum_predicted_gain is None else float(self.minimum_predicted_gain)

    @property
    def interpolated(self) -> bool:
        """Whether the file says that it was written for linear interpolation."""
        meta = self.extra.get("_meta")
        return isinstance(meta, Mapping) and meta.get("lookup") == "interp"

    @property
    def depends_on_requests(self) -> bool:
        """Whether the batch overhead is more than a constant."""
        return len(set(self.batch_overhead_ms or ())) > 1

    @property
    def is_flat(self) -> bool:
        """See `PriceTable.is_flat`. The engine refuses to trim on a flat table."""
        return len(set(self.step_time_ms)) == 1

    @property
    def largest(self) -> int:
        """See `PriceTable.largest`."""
        return self.token_counts[-1]

    def _build(self, requests: int, last: int) -> FloatArray:
        floor = float(self.fixed_overhead_ms or 0)
        if self.batch_sizes and self.batch_overhead_ms:
            floor += float(np.interp(requests, self.batch_sizes, self.batch_overhead_ms))
        ms = np.array(self.step_time_ms, dtype=np.float64) + floor
        return StepTable(np.array(self.token_counts), ms, "linear", hold=True).prices(last)


#: What a v2 file must hold, at each level; nothing else is allowed.
_TOP = (
    "schema_version",
    "minimum_predicted_gain",
    "cost_tables",
    "engine_fingerprint",
    "engine_fingerprint_sha256",
    "measurements",
)
_GUARD = "iteration_drain_guard"
_TABLE = ("token_counts", "step_time_ms")
_FINGERPRINT = (
    "gpu",
    "gpu_count",
    "gpu_snapshot_sha256",
    "global_graph_batch_sizes",
    "max_draft_len",
    "rank_local_graph_batch_sizes",
    "runtime_snapshot",
    "source_diff_sha256",
    "source_head",
    "topology",
)
_MEASUREMENT = ("rank_local_graph_batch_size", "rank_local_verifier_budget", "source_result_sha256", "step_time_ms")
_DRAIN = (
    "loss_multiplier",
    "mean_output_tokens_per_request_iteration",
    "minimum_group_value_ms",
    "source_result_sha256",
    "tail_graph_batch_size",
)
#: Compact cells (fewer tokens than the whole block) that the engine captures graphs for, a G and in all.
CELLS_A_GRAPH, CELLS = 4, 32

Row = tuple[tuple[int, ...], tuple[Number, ...]]


@dataclass(frozen=True, kw_only=True)
class TrtllmV2(PriceTable):
    """Whole steps timed at exact pairs (G, V), between which nothing is interpolated.

    G is the batch size of a captured graph, V the tokens submitted to the target, one a request for the anchor and
    those of padding requests included. V = 0 stands for the native path, in which every request verifies all K
    drafts: G (K + 1) tokens. A step of R requests runs in the graph of the smallest G >= R, and its tokens are padded
    to the next V, or else it is native. `prices` are those of the padded step, by the tokens of the R requests. No step
    of this engine has more than R (K + 1) tokens: beyond, the native price holds; policies refuse another block size.

    The engine refuses files with unknown fields, and so does dsim: `extra` is always empty.

    Parameters
    ----------
    cost_tables
        By G: the V (0 first, strictly increasing, the others G to G (K + 1)) and their milliseconds.
    minimum_predicted_gain
        Share by which a compact step must be better than the native one, >= 0.
    engine_fingerprint
        What the engine recognizes itself by; ``max_draft_len`` is K.
    measurements
        Where each cell comes from: the same cells and times, with the SHA-256 of the result they were read from.
    iteration_drain_guard
        What a compact step may cost in later steps: the engine subtracts ``loss_multiplier`` x (tokens a request lost)
        x (native step of ``tail_graph_batch_size``) / ``mean_output_tokens_per_request_iteration`` from the time saved
        and wants more than ``minimum_group_value_ms``. Without it the engine never runs a compact step.

    Raises
    ------
    InputError
        What the engine's own loader would refuse, the comparison with the running engine left out.
    """

    format: ClassVar[str] = "trtllm-v2"

    cost_tables: Mapping[int, Row]
    minimum_predicted_gain: Number
    engine_fingerprint: Mapping[str, Any]
    measurements: tuple[Mapping[str, Any], ...]
    iteration_drain_guard: Mapping[str, Any] | None = None

    __hash__ = None

    def __post_init__(self) -> None:
        need(not self.extra, "extra", dict(self.extra), "no further fields: the engine refuses them")
        need_number(self.minimum_predicted_gain, "minimum_predicted_gain", zero=True)
        _check_fingerprint(self.engine_fingerprint)
        need(bool(self.cost_tables), "cost_tables", dict(self.cost_tables), "a table for each graph batch size")
        for graph, (tokens, ms) in self.cost_tables.items():
            self._check_row(graph, tokens, ms)
        compact = sum(len(self._compact(graph)) for graph in self.cost_tables)
        need(compact <= CELLS, "cost_tables", f"{compact} compact cells", f"at most {CELLS}")
        graphs, print_ = sorted(self.cost_tables), self.engine_fingerprint
        for key, factor in (("rank_local_graph_batch_sizes", 1), ("global_graph_batch_sizes", print_["gpu_count"])):
            expected = [graph * factor for graph in graphs]
            need(sorted(print_[key]) == expected, f"engine_fingerprint.{key}", print_[key], f"{expected}, any order")
        self._check_measurements()
        if self.iteration_drain_guard is not None:
            _check_guard(self.iteration_drain_guard, graphs)

    def _check_row(self, graph: int, tokens: Any, ms: Any) -> None:
        name = f"cost_tables.{graph}"
        need_int(graph, name, 1)
        need_sizes(tokens, f"{name}.token_counts", 0)
        need_numbers(ms, f"{name}.step_time_ms", len(tokens), zero=False)
        need(tokens[0] == 0, f"{name}.token_counts[0]", tokens[0], "0, the native path")
        most = graph * (self.max_draft_len + 1)
        need_int(most, f"{name} x (max_draft_len + 1)", 1)
        for i, budget in enumerate(tokens[1:], start=1):
            need(graph <= budget <= most, f"{name}.token_counts[{i}]", budget, f"an integer in {graph}..{most}")
        compact = len([budget for budget in tokens[1:] if budget < most])
        expected = f"at most {CELLS_A_GRAPH} below {most}"
        need(compact <= CELLS_A_GRAPH, f"{name}.token_counts", f"{compact} compact cells", expected)

    def _check_measurements(self) -> None:
        cells = {(g, v): t for g, (tokens, ms) in self.cost_tables.items() for v, t in zip(tokens, ms, strict=True)}
        need_list(list(self.measurements), "measurements", of="objects")
        seen = set()
        for i, item in enumerate(self.measurements):
            name = f"measurements[{i}]."
            need(isinstance(item, Mapping), name[:-1], item, "an object")
            require(item, _MEASUREMENT, name)
            only(item, _MEASUREMENT, name)
            need_int(item["rank_local_graph_batch_size"], f"{name}rank_local_graph_batch_size", 1)
            need_int(item["rank_local_verifier_budget"], f"{name}rank_local_verifier_budget", 0)
            need_sha256(item["source_result_sha256"], f"{name}source_result_sha256")
            cell = item["rank_local_graph_batch_size"], item["rank_local_verifier_budget"]
            need(cell in cells and cell not in seen, name[:-1], list(cell), "each (G, V) of 'cost_tables' once")
            ms = item["step_time_ms"]
            need_number(ms, f"{name}step_time_ms", zero=False)
            need(ms == cells[cell], f"{name}step_time_ms", ms, f"{cells[cell]}, as in 'cost_tables'")
            seen.add(cell)
        missing = sorted(cells.keys() - seen)
        need(not missing, "measurements", f"none of {missing[:3]}", "one for each cell of 'cost_tables'")

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> TrtllmV2:
        """From the file's object."""
        require(raw, _TOP)
        only(raw, (*_TOP, _GUARD))
        need(
            type(raw["schema_version"]) is int and raw["schema_version"] == 2,
            "schema_version",
            raw["schema_version"],
            "2",
        )
        tables: dict[int, Row] = {}
        need(isinstance(raw["cost_tables"], dict), "cost_tables", raw["cost_tables"], "an object by graph batch size")
        for key, row in raw["cost_tables"].items():
            name = f"cost_tables.{key}"
            canonical = key.isascii() and key.isdecimal() and not key.startswith("0")
            need(canonical, name, key, "an integer >= 1 as text")
            need(isinstance(row, dict), name, row, "an object")
            require(row, _TABLE, f"{name}.")
            only(row, _TABLE, f"{name}.")
            for field in _TABLE:
                need(isinstance(row[field], list), f"{name}.{field}", row[field], "a list")
            tables[int(key)] = tuple(row["token_counts"]), tuple(row["step_time_ms"])
        need(isinstance(raw["measurements"], list), "measurements", raw["measurements"], "a list of objects")
        guard = raw.get(_GUARD)
        need(_GUARD not in raw or isinstance(guard, dict), _GUARD, guard, "an object, or no such field")
        table = cls(
            cost_tables=tables,
            minimum_predicted_gain=raw["minimum_predicted_gain"],
            engine_fingerprint=raw["engine_fingerprint"],
            measurements=tuple(raw["measurements"]),
            iteration_drain_guard=guard,
        )
        given, expected = raw["engine_fingerprint_sha256"], digest(table.engine_fingerprint)
        need(given == expected, "engine_fingerprint_sha256", given, f"the SHA-256 of 'engine_fingerprint', {expected}")
        return table

    def to_json(self) -> dict[str, Any]:
        """See `PriceTable.to_json`."""
        found = {
            "schema_version": 2,
            "minimum_predicted_gain": self.minimum_predicted_gain,
            "cost_tables": {
                str(graph): {"token_counts": list(tokens), "step_time_ms": list(ms)}
                for graph, (tokens, ms) in self.cost_tables.items()
            },
            "engine_fingerprint": dict(self.engine_fingerprint),
            "engine_fingerprint_sha256": digest(self.engine_fingerprint),
            "measurements": [dict(item) for item in self.measurements],
        }
        if self.iteration_drain_guard is not None:
            found[_GUARD] = dict(self.iteration_drain_guard)
        return found

    @property
    def max_draft_len(self) -> int:
        """K: drafts of a whole block."""
        return int(self.engine_fingerprint["max_draft_len"])

    @property
    def gamma(self) -> int:
        """See `PriceTable.gamma`: a native step has the price of whole blocks of K drafts."""
        return self.max_draft_len

    @property
    def gain(self) -> float:
        """Minimum predicted gain that the engine works with."""
        return float(self.minimum_predicted_gain)

    def _compact(self, graph: int) -> list[tuple[int, Number]]:
        """(V, ms) of a graph's compact cells: not the native path, nor a control that submits the whole block."""
        most = graph * (self.max_draft_len + 1)
        return [(v, t) for v, t in zip(*self.cost_tables[graph], strict=True) if 0 < v < most]

    def native_ms(self, graph: int) -> float:
        """Milliseconds of the native path at one G."""
        return float(self.cost_tables[graph][1][0])

    @property
    def is_flat(self) -> bool:
        """Whether no graph has a compact cell, or all cells of each cost the same."""
        return all({ms for _, ms in self._compact(graph)} <= {self.native_ms(graph)} for graph in self.cost_tables)

    @property
    def largest(self) -> int:
        """See `PriceTable.largest`."""
        return max(self.cost_tables) * (self.max_draft_len + 1)

    def reach(self, requests: int) -> int:
        """See `PriceTable.reach`: whole blocks."""
        return requests * (self.max_draft_len + 1)

    def graph_of(self, requests: int) -> int:
        """The smallest G that holds so many requests."""
        fits = [graph for graph in self.cost_tables if graph >= requests]
        if not fits:
            raise InputError(
                "the table has no graph for so many requests",
                field="requests",
                value=requests,
                expected=f"at most {max(self.cost_tables)}",
            )
        return min(fits)

    def _build(self, requests: int, last: int) -> FloatArray:
        graph = self.graph_of(requests)
        sizes, ms = zip(*self._compact(graph), (graph * (self.max_draft_len + 1), self.native_ms(graph)), strict=True)
        padding = graph - requests  # a token for each padding request
        table = StepTable(np.array(sizes), np.array(ms, dtype=np.float64), "next", hold=True)
        return table.prices(last + padding)[padding:].copy()


def _check_fingerprint(found: Any) -> None:
    name = "engine_fingerprint"
    need(isinstance(found, Mapping), name, found, "an object")
    require(found, _FINGERPRINT, f"{name}.")
    only(found, _FINGERPRINT, f"{name}.")
    for key in ("gpu", "runtime_snapshot", "source_head", "topology"):
        need_text(found[key], f"{name}.{key}")
    for key in ("gpu_snapshot_sha256", "source_diff_sha256"):
        need_sha256(found[key], f"{name}.{key}")
    for key in ("gpu_count", "max_draft_len"):
        need_int(found[key], f"{name}.{key}", 1)
    for key in ("rank_local_graph_batch_sizes", "global_graph_batch_sizes"):
        need_list(found[key], f"{name}.{key}", of="distinct integers >= 1")
        for i, value in enumerate(found[key]):
            need_int(value, f"{name}.{key}[{i}]", 1)
        need(len(set(found[key])) == len(found[key]), f"{name}.{key}", found[key], "distinct integers >= 1")


def _check_guard(found: Mapping[str, Any], graphs: list[int]) -> None:
    require(found, _DRAIN, f"{_GUARD}.")
    only(found, _DRAIN, f"{_GUARD}.")
    for key in ("loss_multiplier", "mean_output_tokens_per_request_iteration"):
        need_number(found[key], f"{_GUARD}.{key}", zero=False)
    need_number(found["minimum_group_value_ms"], f"{_GUARD}.minimum_group_value_ms", zero=True)
    need_sha256(found["source_result_sha256"], f"{_GUARD}.source_result_sha256")
    tail = found["tail_graph_batch_size"]
    expected = f"one of {', '.join(map(str, graphs))}"
    need(type(tail) is int and tail in graphs, f"{_GUARD}.tail_graph_batch_size", tail, expected)
