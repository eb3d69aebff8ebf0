"""Fitting the confidence head last, on text that the drafter was not trained on.

A drafter knows its training text better than any other: confidences learned there promise too much elsewhere, by a
tenth and more with half a million tokens of text, and they were learned on the text's own tokens where the drafter
will meet its own drafts. Temperatures (`dsim.drafts.calibrate`) cannot mend a level that is off by an amount: they
leave a logit of 0 where it is. So the head's weights (one linear layer, eq. 7 of the paper, arXiv 2607.05147) are
fitted once more at the end, everything else frozen: on other text, on drafts that the drafter drew itself, on the
blocks that followed the text so far. The label is the exact acceptance probability (eq. 8), as in training.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import minimize
from torch import Tensor
from tqdm import tqdm

from dsim.drafter.build import Drafter
from dsim.drafter.corpus import Corpus
from dsim.drafter.sampling import CoupledDraws
from dsim.drafter.target import Target
from dsim.drafter.train import example, tap_columns, usable_anchors
from dsim.errors import InputError
from dsim.sigmoid import expit

Float32Array = npt.NDArray[np.float32]
FloatArray = npt.NDArray[np.float64]

#: What a squared unit of a weight's change costs, in nats a draft. For 705 weights and 80,000 drafts the entropy on
#: other held-out text falls from 0.581 nats (1e-4) to 0.575 (1e-2); from there to 3e-2 by 0.001 more.
RIDGE = 1e-2


@torch.inference_mode()
def survivors(
    drafter: Drafter,
    target: Target,
    corpus: Corpus,
    *,
    sequences: int,
    seed: int = 0,
    progress: bool = True,
) -> tuple[Float32Array, Float32Array]:
    """What the confidence head sees of drafts whose predecessors were all accepted, and what it should say.

    Parameters
    ----------
    drafter
        Drafts a block at every anchor of some texts, coupled to them.
    corpus
        Of this target, with the drafter's layers.
    sequences
        Texts to use, at most: the corpus's first ones.

    Returns
    -------
    inputs, alpha
        float32[N, inputs of the head] and float32[N].

    Raises
    ------
    InputError
        No text is longer than a block.
    """
    config, device = drafter.config, target.device
    columns = tap_columns(corpus.header.taps, config.taps, corpus.folder)
    inputs, alphas = [], []
    seen: list[Tensor] = []
    hook = drafter.confidence.linear.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    try:
        for index in tqdm(range(min(sequences, len(corpus))), unit="text", desc="confidences", disable=not progress):
            sequence = corpus[index]
            if not usable_anchors(sequence, config.gamma):
                continue
            item = example(sequence, target, drafter, columns, config.temperature)
            anchors = torch.arange(item.first, item.last, device=device)
            context = drafter.prepare(item.features, item.tokens[None])
            random = np.random.Generator(np.random.Philox(key=[seed, sequence.index]))
            u = torch.from_numpy(random.random((len(anchors), config.gamma, 2))).to(device)
            # Of the tokens after the first anchor, as `CoupledDraws` wants them.
            after = item.vocabulary.local[item.tokens[item.first + 1 :]]
            laws = item.target[item.first :]
            inside = after.clamp(max=laws.shape[1] - 1)
            draws = CoupledDraws(laws, after, laws.gather(1, inside[:, None]).squeeze(1), u)
            seen.clear()
            drafter.draft(context, item.tokens[anchors], anchors, item.vocabulary, config.temperature, draws)
            followed = draws.accepted[:, None] >= torch.arange(config.gamma, device=device)
            inputs.append(torch.stack(seen, dim=1)[followed].float().cpu().numpy())
            alphas.append(draws.alpha[followed].clamp(0, 1).cpu().numpy())
    finally:
        hook.remove()
    if not inputs:
        raise InputError("no answer is longer than a block", file=corpus.folder, field="gamma", value=config.gamma)
    return np.concatenate(inputs), np.concatenate(alphas)


def fit_head(
    inputs: Float32Array, alpha: Float32Array, weight: FloatArray, *, ridge: float = RIDGE
) -> tuple[FloatArray, float, float]:
    """Logistic regression with probabilities as labels, drawn towards the weights that it begins with.

    Parameters
    ----------
    inputs, alpha
        float32[N, D] and float32[N] in [0, 1].
    weight
        float64[D + 1]: weights, then the bias (which is not drawn to anything).

    Returns
    -------
    weight, before, after
        float64[D + 1], and the mean cross entropy (nats) with the given and with the fitted weights.
    """

    def cross_entropy(w: FloatArray) -> tuple[float, FloatArray]:
        logits = (inputs @ w[:-1].astype(np.float32)).astype(np.float64) + w[-1]
        wrong = expit(logits) - alpha
        slope = np.append((wrong.astype(np.float32) @ inputs).astype(np.float64), wrong.sum()) / alpha.size
        return float(np.mean(np.logaddexp(0.0, logits) - alpha * logits)), slope

    def objective(w: FloatArray) -> tuple[float, FloatArray]:
        loss, slope = cross_entropy(w)
        moved = np.append(w[:-1] - weight[:-1], 0.0)
        return loss + ridge / 2 * float(moved @ moved), slope + ridge * moved

    found = minimize(objective, weight, jac=True, method="L-BFGS-B", options={"maxiter": 300})
    return found.x, cross_entropy(weight)[0], cross_entropy(found.x)[0]


def fit_confidence(
    drafter: Drafter, target: Target, corpus: Corpus, *, sequences: int, seed: int = 0, progress: bool = True
) -> dict[str, Any]:
    """Fit a drafter's confidence head, in place; parameters and errors as in `survivors`.

    Returns
    -------
    dict
        For provenance: texts asked for, drafts used, their mean acceptance, and the mean cross entropy before and
        after.
    """
    drafter.eval()
    inputs, alpha = survivors(drafter, target, corpus, sequences=sequences, seed=seed, progress=progress)
    linear = drafter.confidence.linear
    began = torch.cat([linear.weight.detach().flatten(), linear.bias.detach()]).double().cpu().numpy()
    weight, before, after = fit_head(inputs, alpha, began)
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(weight[None, :-1]).to(linear.weight))
        linear.bias.copy_(torch.from_numpy(weight[-1:]).to(linear.bias))
    return {
        "sequences": min(sequences, len(corpus)),
        "drafts": int(alpha.size),
        "acceptance": round(float(alpha.mean()), 5),
        "nats_before": round(before, 5),
        "nats_after": round(after, 5),
    }
