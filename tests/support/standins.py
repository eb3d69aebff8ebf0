"""Scripted stand-ins for every seam of the simulator."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsim.drafts.luck import uniform
from dsim.policy import BasePolicy, Traits
from traces import Trace


class ConstantCost:
    """A step costs `step_ms` + `token_ms` a token; a draft pass `draft`; a prompt `prefill` on its own node."""

    def __init__(self, step_ms=1.0, token_ms=0.0, draft=0.0, prefill=0.0, captured=(), max_tokens=1 << 20, gpus=1):
        self.step_ms, self.token_ms, self.draft, self.prefill = step_ms, token_ms, draft, prefill
        self.label, self.gpus = "scripted:constant", gpus
        self.depends_on_requests = self.depends_on_context = False
        self.captured_sizes = np.asarray(captured, dtype=np.int64)
        self.capture_limit = int(self.captured_sizes[-1]) if self.captured_sizes.size else 0
        self.max_tokens, self.max_requests = max_tokens, 1 << 20
        self.max_prefill_tokens, self.min_tokens = 1 << 30, 1
        self.max_verify_requests, self.contexts = 1 << 20, np.zeros(0, dtype=np.int64)

    def verify_table(self, requests, max_tokens, context=None):
        table = self.step_ms + self.token_ms * np.arange(max_tokens + 1, dtype=np.float64)
        table[0] = 0.0
        return table

    def draft_ms(self, requests, passes=1):
        return self.draft * passes

    def prefill_ms(self, tokens):
        return self.prefill


class ScriptedDrafts:
    """Accepted counts by request and position, from lists; every confidence is the same."""

    paired = True
    domains = ("any",)
    label = "scripted"

    def __init__(self, accepted: Sequence[Sequence[int]], gamma: int, confidence: float = 0.5):
        self.gamma, self.accepted, self.confidence = gamma, accepted, confidence
        self.opened: list[tuple[int, int, int]] = []

    def open(self, request, domain, output_tokens):
        self.opened.append((request, domain, output_tokens))

    def draft(self, requests, positions):
        counts = [self.accepted[r][p] for r, p in zip(requests.tolist(), positions.tolist(), strict=True)]
        confidence = np.full((len(counts), self.gamma), self.confidence, dtype=np.float32)
        return confidence, np.asarray(counts, dtype=np.int64)


class BernoulliDrafts:
    """Every draft is accepted with probability p, whatever came before it."""

    paired = True
    domains = ("any",)
    label = "scripted:bernoulli"

    def __init__(self, p: float, gamma: int, seed: int = 0):
        self.p, self.gamma, self.seed = p, gamma, seed

    def open(self, request, domain, output_tokens):
        pass

    def draft(self, requests, positions):
        u = uniform(self.seed, requests[:, None], positions[:, None], np.arange(self.gamma)[None, :])
        accepted = np.logical_and.accumulate(u < self.p, axis=1).sum(axis=1)
        return np.full(u.shape, self.p, dtype=np.float32), accepted


class ScriptedPolicy(BasePolicy):
    """Returns the same answer every step (whatever it is)."""

    traits = Traits(cost_driven=False)

    def __init__(self, answer=0):
        self.answer = answer

    def plan(self, view):
        if callable(self.answer):
            return self.answer(view)
        return np.full(view.requests, self.answer, dtype=np.int64)


def fixed_arrivals(arrival_s, prompt, output, name="fixed") -> Trace:
    """A trace from lists."""
    n = len(arrival_s)
    return Trace(
        name=name,
        kind="synthetic",
        source="test",
        arrival_s=np.asarray(arrival_s, dtype=np.float64),
        prompt_tokens=np.broadcast_to(np.asarray(prompt, dtype=np.int64), n).copy(),
        output_tokens=np.broadcast_to(np.asarray(output, dtype=np.int64), n).copy(),
        prefix_blocks=None,
    )
