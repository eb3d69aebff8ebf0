"""One valid file of every engine's format, as JSON objects; the numbers are made up."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def diagonal() -> dict[str, Any]:
    return {
        "sample_batch_tokens": [8, 16, 32, 64],
        "sample_steps_per_sec": [100.0, 95.25, 50, 48.1],
        "max_batch_tokens": 64,
    }


def additive() -> dict[str, Any]:
    return {
        "bias_seconds": 0.01,
        "bs_probes": [2, 4, 8],
        "alpha_seconds": [0.0, 0.001, 0.0035],
        "m_probes": [8, 16, 64],
        "theta_seconds": [0.0, 0.002, 0.014],
    }


def trtllm_v1() -> dict[str, Any]:
    return {
        "token_counts": [8, 16, 64],
        "step_time_ms": [2.0, 4.0, 16.0],
        "fixed_overhead_ms": 8.0,
        "batch_sizes": [2, 4, 8],
        "batch_overhead_ms": [0.0, 1.0, 3.5],
        "minimum_predicted_gain": 0.02,
        "_meta": {"lookup": "interp", "cells": [{"batch_size": 2}]},
    }


def trtllm_v2() -> dict[str, Any]:
    tables = {"4": ([0, 12, 16], [6.0, 5.2, 5.6]), "8": ([0, 24], [8.0, 7.0])}
    fingerprint = {
        "gpu": "B300",
        "gpu_count": 2,
        "gpu_snapshot_sha256": "a" * 64,
        "global_graph_batch_sizes": [8, 16],
        "max_draft_len": 4,
        "rank_local_graph_batch_sizes": [4, 8],
        "runtime_snapshot": "runtime",
        "source_diff_sha256": "b" * 64,
        "source_head": "23b73d8",
        "topology": "DEP2",
    }
    return {
        "schema_version": 2,
        "minimum_predicted_gain": 0.02,
        "cost_tables": {g: {"token_counts": v, "step_time_ms": t} for g, (v, t) in tables.items()},
        "engine_fingerprint": fingerprint,
        "engine_fingerprint_sha256": sha256(fingerprint),
        "measurements": [
            {
                "rank_local_graph_batch_size": int(g),
                "rank_local_verifier_budget": budget,
                "step_time_ms": ms,
                "source_result_sha256": "c" * 64,
            }
            for g, (v, t) in tables.items()
            for budget, ms in zip(v, t, strict=True)
        ],
        "iteration_drain_guard": {
            "loss_multiplier": 1.5,
            "mean_output_tokens_per_request_iteration": 4.25,
            "minimum_group_value_ms": 2.0,
            "source_result_sha256": "d" * 64,
            "tail_graph_batch_size": 4,
        },
    }


def vllm() -> dict[str, Any]:
    factors = {
        "schema": 1,
        "model": {"kind": "remote", "model": "example/model"},
        "hardware": {"device_name": "Example GPU"},
        "software": {"vllm": "0.99"},
        "parallel": {"tp": 2, "pp": 2, "dp": 1, "dcp": 1},
        "profile": {"k": 3, "capture_sizes": [1, 2, 4, 8], "context_len": 4096},
    }
    found = {
        "schema": 1,
        "fingerprint": sha256(factors),
        "factors": factors,
        "draft_curve": [[1, 0.5], [2, 0.75]],
        # A dip at 4; above 8 the engine runs eagerly.
        "verify_curve": [[1, 5.0], [2, 7.0], [4, 6.5], [8, 9.0], [12, 30.0], [16, 34.0]],
    }
    return found | {"checksum": sha256(found)}


def sts() -> dict[str, Any]:
    return {"temperatures": [1.25, 0.9, 1], "dataset": "held-out", "num_samples": 5000, "ece_after": [0.01, 0.01, 0.02]}


FILES = {
    "sglang-diagonal": diagonal,
    "sglang-additive": additive,
    "trtllm-v1": trtllm_v1,
    "trtllm-v2": trtllm_v2,
    "vllm": vllm,
    "sts": sts,
}


def write(folder: Path, found: dict[str, Any], name: str = "table.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(found), encoding="utf-8")
    return path
