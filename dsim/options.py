"""Engine options of a replica, and what contradicts what."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from dsim.errors import InputError


@dataclass(frozen=True)
class HostCost:
    """Host time of a step, base + per_request * R ** power milliseconds, of which a part hides behind the GPU."""

    base_ms: float = 0.0
    per_request_ms: float = 0.0
    power: float = 0.5
    hidden_fraction: float = 0.0

    def ms(self, requests: int) -> float:
        """Milliseconds at R requests."""
        return self.base_ms + self.per_request_ms * requests**self.power if requests else self.base_ms


@dataclass(frozen=True)
class ReplicaConfig:
    """Engine options of one replica.

    Parameters
    ----------
    max_seqs
        Most requests in a batch (decoding or prefilling).
    token_budget
        Most tokens in a step.
    prefill_chunk
        Most prompt tokens in a step, of all prompts together; prompts are served first come, first served.
    colocated
        True: prompts are prefilled in the same steps; False: requests arrive with their prompt processed.
    block_tokens, kv_blocks
        Size and number of KV-cache blocks.
    overlapped
        True: the hidden part of the host time runs beside the GPU; False: host and GPU alternate.
    host
        Host time.
    clip_to_remaining
        Engine option: no more drafts are verified than the request has tokens left to produce.
    admit_ahead
        Colocated only: who joins a step is settled when the step before it starts, as in an engine that schedules
        while the GPU runs (vLLM's asynchronous scheduling). A request that arrives during a step, and a slot or KV
        blocks that become free in it, miss the next step. An idle replica admits at once.
    """

    max_seqs: int = 256
    token_budget: int = 8192
    prefill_chunk: int = 8192
    colocated: bool = False
    block_tokens: int = 64
    kv_blocks: int = 65536
    overlapped: bool = True
    host: HostCost = field(default_factory=HostCost)
    clip_to_remaining: bool = False
    admit_ahead: bool = False


def blocks_needed(config: ReplicaConfig, tokens: int, gamma: int) -> int:
    """KV blocks of a request with so many tokens: a step writes up to gamma drafts and the anchor beyond them."""
    return -(-(tokens + 1 + gamma) // config.block_tokens)


def too_large(config: ReplicaConfig, request: int, prompt: int, output: int, gamma: int) -> InputError:
    """The error of a request that does not fit into the KV cache even alone."""
    need = blocks_needed(config, prompt + output, gamma)
    return InputError(
        f"request {request} ({prompt} prompt and {output} output tokens) needs {need} KV blocks of "
        f"{config.block_tokens} tokens",
        field="kv_blocks",
        value=config.kv_blocks,
        expected=f">= {need}",
    )


def does_not_fit() -> RuntimeError:
    """A request that was let in does not fit: no input can bring that about."""
    return RuntimeError("KV invariant violated: one request alone does not fit")


def check_config(config: ReplicaConfig, gamma: int) -> None:
    """Raise InputError for engine options that contradict each other."""
    if config.token_budget < config.max_seqs * (1 + gamma):
        raise InputError(
            "a full batch with whole blocks must fit into a step",
            field="token_budget",
            value=config.token_budget,
            expected=f">= max_seqs x (1 + gamma) = {config.max_seqs * (1 + gamma)}",
        )
    if config.admit_ahead and not (config.colocated and config.overlapped):
        raise InputError(
            "an engine that admits a step ahead prefills in its own steps and schedules while the GPU runs",
            field="admit_ahead",
            value=True,
            expected="False, or a colocated and overlapped engine",
        )
    if not 0 <= config.host.hidden_fraction <= 1 or not math.isfinite(config.host.ms(config.max_seqs)):
        raise InputError(field="host", value=config.host, expected="finite times and a hidden fraction in [0, 1]")
