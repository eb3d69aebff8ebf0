"""What a planner loses in one step against the best budget, batch size by batch size: no simulation, no history."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from dsim.drafts.quality import alpha_by_row, tilted_confidence
from dsim.drafts.tilt import visit_weights
from dsim.policy import load_policy, make_view
from dsim.probe import StepRegret
from dsim.scenario import bank_of, cost_of, tilt_of
from dsim.schema import Scenario

#: Batch sizes on captured sizes of most engines (8, 16, 32, ...), and between them.
REQUESTS = (8, 16, 32, 64, 128, 256, 12, 20, 36, 100, 150, 250)
#: The planners: what their builders leave at the paper's text, simplify, and do in production.
PLANNERS = (
    ("early stop, exact prices", "lab:search=early-stop,capacity_lag=0"),
    ("early stop, exact prices, draft priced", "lab:search=early-stop,capacity_lag=0,price=draft"),
    ("early stop, line through captured sizes", "lab:search=early-stop,capacity_lag=0,lookup=linear"),
    ("early stop, line through 1, 2, 4, 8, ...", "lab:search=early-stop,capacity_lag=0,lookup=linear,probes=doubling"),
    ("global, exact prices", "lab:capacity_lag=0"),
    ("global, exact prices, draft priced", "lab:capacity_lag=0,price=draft"),
)


def loss_table(
    scenario: Scenario, drafter: str, *, requests: Sequence[int] = REQUESTS, batches: int = 100, seed: int = 0
) -> pd.DataFrame:
    """Relative loss of expected tokens a millisecond (`dsim.probe.StepRegret`) of planners that see the current block.

    Batches are drawn from the blocks that decoding with full verification visits, request by request. All planners
    meet the same batches. The step takes the scenario's draft and verify times, and no host time.

    Parameters
    ----------
    drafter
        One of the scenario's, whose drafts come from a bank.
    requests
        Batch sizes R.
    batches
        Batches of each size.

    Returns
    -------
    DataFrame
        One row a batch size and planner: ``requests``, ``captured`` (R is a captured size), ``planner``, ``policy``,
        ``gamma``, ``admitted`` (drafts a request), ``loss`` and ``loss_p90`` under the exact probabilities alpha, and
        ``loss_if_exact``, under the confidences as if they were exact: what the search loses by itself.
    """
    gamma, section, bank = scenario.drafts.gamma, scenario.drafters[drafter], bank_of(scenario, drafter)
    tilt, cost = tilt_of(scenario, drafter, bank), cost_of(scenario)
    confidence, alpha = tilted_confidence(bank, tilt, gamma), alpha_by_row(bank, tilt, gamma)
    reached = np.add.accumulate(visit_weights(bank, tilt, gamma))
    context = float(cost.contexts[0]) if cost.depends_on_context else None
    rows = []
    for count in requests:
        prices = cost.verify_table(count, count * (1 + gamma), context)
        draft_ms = section.cost_scale * cost.draft_ms(count, gamma if section.passes == "token" else 1)
        rng = np.random.default_rng(np.random.SeedSequence([seed, count]))
        policies = [load_policy(spec) for _, spec in PLANNERS]
        found = [(StepRegret(), StepRegret(), []) for _ in PLANNERS]
        for _ in range(batches):
            drawn = np.searchsorted(reached, rng.random(count) * reached[-1], side="right")
            seen, truth = confidence[drawn], alpha[drawn]
            view = make_view(seen, prices, draft_ms=draft_ms, captured_sizes=cost.captured_sizes)
            for policy, (loss, if_exact, admitted) in zip(policies, found, strict=True):
                lengths = policy.plan(view)
                loss.step(view, lengths, truth)
                if_exact.step(view, lengths, seen.astype(np.float64))
                admitted.append(int(lengths.sum()) / count)
        for (planner, spec), (loss, if_exact, admitted) in zip(PLANNERS, found, strict=True):
            rows.append(
                {
                    "requests": count,
                    "captured": bool(np.isin(count, cost.captured_sizes)),
                    "planner": planner,
                    "policy": spec,
                    "gamma": gamma,
                    "admitted": float(np.mean(admitted)),
                    "loss": float(np.mean(loss.loss)),
                    "loss_p90": float(np.percentile(loss.loss, 90)),
                    "loss_if_exact": float(np.mean(if_exact.loss)),
                }
            )
    return pd.DataFrame(rows)
