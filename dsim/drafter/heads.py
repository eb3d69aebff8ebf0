"""Sequential heads and the confidence head (paper, section 3.1 and 3.2.1; arXiv 2607.05147).

Previous tokens come as indices into the drafter's own vocabulary; one further row stands for all other tokens.
Biases cover the drafter's own vocabulary; tokens of the prompt that it lacks get none.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from dsim.drafter.vocabulary import Vocabulary


def _padded(bias: Tensor, vocabulary: Vocabulary) -> Tensor:
    return functional.pad(bias, (0, vocabulary.size - vocabulary.static))


class MarkovHead(nn.Module):
    """First-order transition bias B(x_{k-1}, .) = W1[x_{k-1}] W2 (eq. 5).

    Parameters
    ----------
    vocab_size, rank, hidden_size
        Draft vocabulary Vd, rank r, backbone width H.
    gated
        Scale the embedding by sigmoid(Wg [W1[x_{k-1}]; h_k]) first: a variant of our own, off by default.
    """

    def __init__(self, vocab_size: int, rank: int, hidden_size: int, *, gated: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size + 1, rank)
        self.out = nn.Linear(rank, vocab_size, bias=False)
        self.gate = nn.Linear(rank + hidden_size, rank) if gated else None
        nn.init.normal_(self.embedding.weight, std=rank**-0.5)
        nn.init.zeros_(self.out.weight)

    def embed(self, previous: Tensor, vocabulary: Vocabulary) -> Tensor:
        """int64[...] local indices -> [..., r]."""
        return self.embedding(previous.clamp(max=vocabulary.static))

    def start(self, anchors: int, like: Tensor) -> Tensor:
        """State before the first token: none."""
        return like.new_empty(anchors, 0)

    def step(self, state: Tensor, embedded: Tensor, hidden: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
        """One position: state, [A, r], [A, H] -> next state, bias [A, E]."""
        return state, self.biases(embedded, hidden, vocabulary)

    def biases(self, embedded: Tensor, hidden: Tensor, vocabulary: Vocabulary) -> Tensor:
        """All positions at once: [A, gamma, r], [A, gamma, H] -> [A, gamma, E]."""
        if self.gate is not None:
            embedded = embedded * torch.sigmoid(self.gate(torch.cat([embedded, hidden], dim=-1)))
        return _padded(self.out(embedded), vocabulary)


class RnnHead(nn.Module):
    """Recurrent bias over the drafted prefix (eq. 6); s_0 = 0.

    Parameters
    ----------
    vocab_size, rank, hidden_size
        As in `MarkovHead`.
    """

    def __init__(self, vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__()
        self.rank = rank
        self.embedding = nn.Embedding(vocab_size + 1, rank)
        self.joint = nn.Linear(2 * rank + hidden_size, 3 * rank)
        self.out = nn.Linear(rank, vocab_size, bias=False)
        nn.init.normal_(self.embedding.weight, std=rank**-0.5)
        nn.init.zeros_(self.out.weight)

    @torch.no_grad()
    def begin_as(self, head: MarkovHead) -> None:
        """Start as a trained Markov head of the same sizes (ungated), in the manner of Net2Net (arXiv 1511.05641).

        With the output o = tanh(a W1[x]) and out = W2 / a the bias is W2 W1[x], up to what tanh bends: 2 % of an entry
        at most, because no |a W1| is larger than 1/4. Gate and candidate stay as they are: the state reaches no output
        yet, and training lets it.
        """
        a, r = 0.25 / max(0.5, float(head.embedding.weight.abs().max())), self.rank
        self.embedding.weight.copy_(head.embedding.weight)
        self.out.weight.copy_(head.out.weight / a)
        # Rows of `joint`: gate, candidate, output. Its columns: state, embedding, hidden.
        self.joint.weight[2 * r :].zero_()
        self.joint.weight[2 * r :, r : 2 * r] = a * torch.eye(r)
        self.joint.bias[2 * r :].zero_()

    def embed(self, previous: Tensor, vocabulary: Vocabulary) -> Tensor:
        """int64[...] local indices -> [..., r]."""
        return self.embedding(previous.clamp(max=vocabulary.static))

    def start(self, anchors: int, like: Tensor) -> Tensor:
        """s_0: zeros [A, r]."""
        return like.new_zeros(anchors, self.rank)

    def _update(self, state: Tensor, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        gate, candidate, output = self.joint(torch.cat([state, embedded, hidden], dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return gate * state + (1 - gate) * torch.tanh(candidate), torch.tanh(output)

    def step(self, state: Tensor, embedded: Tensor, hidden: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
        """One position: s_{k-1} [A, r], [A, r], [A, H] -> s_k, bias [A, E]."""
        state, output = self._update(state, embedded, hidden)
        return state, _padded(self.out(output), vocabulary)

    def biases(self, embedded: Tensor, hidden: Tensor, vocabulary: Vocabulary) -> Tensor:
        """All positions, the tokens being known: [A, gamma, r], [A, gamma, H] -> [A, gamma, E]."""
        state = self.start(embedded.shape[0], embedded)
        outputs = []
        for k in range(embedded.shape[1]):
            state, output = self._update(state, embedded[:, k], hidden[:, k])
            outputs.append(output)
        return _padded(self.out(torch.stack(outputs, dim=1)), vocabulary)


class ConfidenceHead(nn.Module):
    """Logit of the conditional acceptance probability, w . [h_k; W1[x_{k-1}]] + b (eq. 7; the bias is ours).

    Parameters
    ----------
    hidden_size, rank
        H and r; r = 0 where there is no sequential head.
    """

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size + rank, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """[..., H], [..., r] or None -> float32[...]."""
        inputs = hidden if embedded is None else torch.cat([hidden, embedded], dim=-1)
        return self.linear(inputs).squeeze(-1).float()
