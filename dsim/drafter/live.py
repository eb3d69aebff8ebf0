"""Live drafting: drafter and target run for every block, instead of a recording being replayed.

The draft source of this module keeps, for every request, a text that the target writes with the drafter's help:
speculative decoding with rejection sampling (Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv
2302.01318). A drafted token x is accepted with probability min(1, p_t(x) / p_d(x)); after the first rejection the
next token comes from norm(max(0, p_t - p_d)), and after a verified prefix that was accepted whole it is drawn afresh
from p_t. Which of the two it is depends on the policy's verify length, so the text does; its law is the target's
for every policy whose verify length l for a block looks at no confidence of that block beyond c_{l+1} (c_{l+1} is
said before draft l + 1 is drawn; later ones tell of drafts that the cut throws away).

Every random number is keyed by (seed, request, position, k), never by when it is drawn or by who else is in the batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dsim.drafter.build import Drafter, check_target
from dsim.drafter.drafter import FINAL
from dsim.drafter.prompts import Prompt
from dsim.drafter.rows import CacheRows
from dsim.drafter.sampling import Drawn, pick, rejected, residual
from dsim.drafter.target import Target
from dsim.drafter.vocabulary import Vocabulary, batch_vocabulary, vocabulary_of
from dsim.drafts.calibrate import checked_temperatures
from dsim.drafts.luck import hash64_int, uniform
from dsim.errors import InputError

Float32Array = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

#: Confidences stay this far from 0 and 1, so that a logit exists.
EDGE = 1e-6

# Sizes of one pass, for memory's sake only: prompt tokens, and float32 logits.
_PASS_TOKENS = 1 << 14
_PASS_LOGITS = 1 << 23


@dataclass
class _Block:
    """A drafted and scored block whose verify length is not known yet.

    Attributes
    ----------
    position
        Output position that it was drafted at.
    drafts
        gamma tokens.
    accepted
        Drafts accepted if all are verified.
    fresh
        Entry m: the token after m accepted drafts where no verified one was rejected; gamma + 1 tokens.
    residual
        The token after the first rejection.
    confidence
        float32[gamma].
    features
        [gamma + 1, taps, H]: the target's states at the anchor and the drafts.
    """

    position: int
    drafts: list[int]
    accepted: int
    fresh: list[int]
    residual: int
    confidence: Float32Array
    features: Tensor


@dataclass
class _Prompt:
    tokens: list[int]
    extra: Tensor  # its tokens outside the drafter's own vocabulary


class _Request:
    """A request and its text: prompt and answer of the current segment, and all output so far."""

    def __init__(self, number: int, domain: int, output_tokens: int) -> None:
        self.number, self.domain, self.output_tokens = number, domain, output_tokens
        self.segment = -1
        self.prompt = _Prompt([], torch.empty(0, dtype=torch.int64))
        self.tokens: list[int] = []
        self.output = array("l")
        #: Leading tokens that the target and the drafter have in their caches.
        self.valid = 0
        self.block: _Block | None = None

    @property
    def known(self) -> int:
        """Last output position whose token is known; -1 before the first."""
        return len(self.output) - 1

    @property
    def answer(self) -> int:
        """Tokens of the current answer."""
        return len(self.tokens) - len(self.prompt.tokens)

    def append(self, token: int) -> None:
        """One more output token."""
        self.tokens.append(token)
        self.output.append(token)


class LiveDrafts:
    """A draft source with the drafter and the target in the loop. Batched over the requests it is asked for.

    It learns from `observe` (which a replica calls after every step) how many drafts were verified, and needs it:
    the text goes on differently. Between two steps a request may be asked for again at the same position (the answer
    is the same block), or, with nothing drafted in between, at a later one (as after a preemption that recomputes:
    the target then writes the tokens between alone).

    **Texts.** A request answers prompts of its domain, one after the other, chosen by a hash of (seed, request,
    segment). An answer ends with an end token or after `max_tokens`; the next output token is the first one of the
    next answer. Drafts behind an end are never accepted, and their confidence says so (`EDGE`).

    **Vocabulary.** Each request may draft the drafter's own vocabulary and the tokens of its own prompt, whoever
    else is in the batch.

    **Memory.** `max_rows` texts are kept in the caches of target and drafter, a row each of the longest prompt +
    `max_tokens` + a block. More requests than that give up the row that was used longest ago; it is made again by
    running the text.

    Parameters
    ----------
    target, drafter
        A drafter for this target; both on the target's device.
    prompts
        What requests ask. Their domains, in order of appearance, are the source's.
    gamma
        Drafted tokens a block; fewer than the drafter's: the first ones, and the label says so. None: all.
    seed
        Of prompts, drafts and luck.
    temperature
        Of target and drafter, > 0. None: the drafter's own (another one is in the label).
    temperatures
        Divisors of the confidence logits by position (Sequential Temperature Scaling); none: 1.
    max_rows
        Texts kept in the caches at most.
    max_tokens
        Answers are cut there.

    Raises
    ------
    InputError
        A drafter of another target, no prompts, or a number out of range.
    """

    paired = False

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        prompts: Sequence[Prompt],
        *,
        gamma: int | None = None,
        seed: int = 0,
        temperature: float | None = None,
        temperatures: Sequence[float] = (),
        max_rows: int = 64,
        max_tokens: int = 256,
    ) -> None:
        config = drafter.config
        check_target(config, target, "drafter")
        wanted = config.gamma if gamma is None else gamma
        if not 1 <= wanted <= config.gamma:
            raise InputError(
                f"the drafter drafts blocks of {config.gamma}",
                field="gamma",
                value=wanted,
                expected=f"1 to {config.gamma}",
            )
        heat = config.temperature if temperature is None else temperature
        if not 0 < heat < float("inf"):
            raise InputError(field="temperature", value=heat, expected="a finite number > 0")
        for name, value in (("max_rows", max_rows), ("max_tokens", max_tokens)):
            if value < 1:
                raise InputError(field=name, value=value, expected="an integer >= 1")
        if not prompts:
            raise InputError("there are no prompts", field="prompts", expected="at least one")
        divisors = checked_temperatures(list(temperatures), config.gamma) if len(temperatures) else (1.0,) * wanted
        self.gamma, self.max_tokens = wanted, max_tokens
        self.domains = tuple(dict.fromkeys(prompt.domain for prompt in prompts))
        self.label = f"live:{target.name}:{config.kind}"
        if wanted < config.gamma:
            self.label += f":first-{wanted}-of-{config.gamma}"
        if heat != config.temperature:
            self.label += f":T={heat:g}"
        self.label += f":{target.device.type}"
        self._target, self._drafter, self._temperature = target, drafter.eval(), heat
        self._device = target.device
        self._divisors = torch.tensor(divisors[:wanted], device=self._device)
        self._layers = tuple(dict.fromkeys(tap for tap in config.taps if tap != FINAL))
        self._columns = [len(self._layers) if tap == FINAL else self._layers.index(tap) for tap in config.taps]
        # Separate streams: prompts, drafted tokens, acceptance, the token after them, tokens without a draft.
        self._prompt_seed, self._draft_seed, self._accept_seed, self._next_seed, self._plain_seed = (
            hash64_int(seed, stream) for stream in range(5)
        )
        # bfloat16 targets: the drafter's matrix products are done in the target's type.
        self._autocast = target.head.dtype != torch.float32
        own = vocabulary_of(drafter.vocabulary_head.tokens, target.vocab_size)
        self._eos = torch.tensor(sorted(target.eos), dtype=torch.int64, device=self._device)
        self._prompts: list[list[_Prompt]] = [[] for _ in self.domains]
        for prompt in prompts:
            tokens = target.tokenizer.chat(prompt.text)
            ids = torch.tensor(tokens, dtype=torch.int64, device=self._device)
            extra = torch.unique(ids[own.local[ids] >= own.static])
            self._prompts[self.domains.index(prompt.domain)].append(_Prompt(tokens, extra))
        longest = max(len(prompt.tokens) for prompt in chain.from_iterable(self._prompts))
        # A block is written behind the longest text.
        self._rows = CacheRows(target, longest + max_tokens + wanted + 1, max_rows)
        self._requests: dict[int, _Request] = {}
        self._vocabulary_key: tuple[tuple[int, int], ...] = ()
        self._vocabulary: tuple[Vocabulary, Tensor | None] | None = None

    # -- the contract ----------------------------------------------------------------------------------

    def open(self, request: int, domain: int, output_tokens: int) -> None:
        """See `dsim.drafts.DraftSource.open`.

        Raises
        ------
        InputError
            No such domain, or the request is open already.
        """
        if not 0 <= domain < len(self.domains):
            known = ", ".join(f"{i} ({name})" for i, name in enumerate(self.domains))
            raise InputError("unknown domain", field="domain", value=domain, expected=f"one of {known}")
        if request in self._requests:
            raise InputError("is open already: a live source serves one run", field="request", value=request)
        self._requests[request] = state = _Request(request, domain, output_tokens)
        self._begin(state)

    @torch.inference_mode()
    def draft(self, requests: IntArray, positions: IntArray) -> tuple[Float32Array, IntArray]:
        """See `dsim.drafts.DraftSource.draft`.

        Raises
        ------
        RuntimeError
            A request that is not open or stands there twice, a position that lies behind it, or one beyond a draft
            whose outcome `observe` was not told.
        """
        asked = [self._state(request) for request in requests.tolist()]
        if len({state.number for state in asked}) < len(asked):
            raise RuntimeError("live drafting: a request stands in one batch twice")
        wanted = []
        for state, position in zip(asked, positions.tolist(), strict=True):
            if state.block is not None:
                if state.block.position != position:
                    raise RuntimeError(
                        f"live drafting: request {state.number} is asked for at position {position}, but nobody called "
                        f"observe() with what became of its draft at position {state.block.position}"
                    )
            elif position < state.known:
                raise RuntimeError(
                    f"live drafting: request {state.number} is at position {state.known} already, not at {position}"
                )
            else:
                wanted.append((state, position))
        for first in range(0, len(wanted), self._rows.most):
            self._draft(wanted[first : first + self._rows.most])
        blocks = [state.block for state in asked]
        confidence = np.empty((len(asked), self.gamma), dtype=np.float32)
        for i, block in enumerate(blocks):
            assert block is not None
            confidence[i] = block.confidence
        return confidence, np.array([block.accepted for block in blocks if block is not None], dtype=np.int64)

    @torch.inference_mode()
    def observe(self, requests: IntArray, positions: IntArray, verified: IntArray, accepted: IntArray) -> None:
        """Learn what became of the latest drafts, and write on.

        Parameters
        ----------
        requests, positions
            int64[R]: as in the `draft` they were made by.
        verified
            int64[R]: verify lengths l, 0 to gamma.
        accepted
            int64[R]: drafts that were accepted, min(accepted if all were verified, l).

        Raises
        ------
        RuntimeError
            Not the latest draft of a request, or not its outcome.
        """
        grown = []
        for number, position, length, gained in zip(
            requests.tolist(), positions.tolist(), verified.tolist(), accepted.tolist(), strict=True
        ):
            state = self._state(number)
            block = state.block
            if block is None or block.position != position:
                raise RuntimeError(f"live drafting: request {number} has no draft at position {position}")
            if not 0 <= length <= self.gamma or gained != min(block.accepted, length):
                raise RuntimeError(
                    f"live drafting: {length} verified and {gained} accepted is no outcome of request {number}'s draft "
                    f"at position {position} ({block.accepted} of {self.gamma} would be accepted)"
                )
            first = len(state.tokens) - 1
            self._commit(state, block, length)
            if len(state.output) >= state.output_tokens:
                # Nobody asks for it again: the row is free for another (and could be made again).
                self._rows.release(number)
                state.valid = 0
            elif state.valid == first:
                # Neither did the answer end nor was the row given up: what the target saw goes on from there.
                grown.append((state, first, block.features))
        if grown:
            self._remember(grown)

    def text(self, request: int) -> IntArray:
        """int64[n]: output tokens of a request, as far as they are known."""
        return np.array(self._state(request).output, dtype=np.int64)

    # -- the text --------------------------------------------------------------------------------------

    def _state(self, request: int) -> _Request:
        state = self._requests.get(request)
        if state is None:
            raise RuntimeError(f"live drafting: request {request} is not open")
        return state

    def _begin(self, state: _Request) -> None:
        """Start the next answer."""
        state.segment += 1
        prompts = self._prompts[state.domain]
        state.prompt = prompts[hash64_int(self._prompt_seed, state.number, state.segment) % len(prompts)]
        state.tokens = list(state.prompt.tokens)
        state.valid = 0

    def _append(self, state: _Request, token: int) -> bool:
        """One more token; True where it ended the answer (and the next one has begun)."""
        state.append(token)
        ended = token in self._target.eos or state.answer >= self.max_tokens
        if ended:
            self._begin(state)
        return ended

    def _commit(self, state: _Request, block: _Block, length: int) -> None:
        """The accepted drafts and one more token; an answer that ended with a draft leaves that one for later."""
        state.block = None
        for token in block.drafts[: min(block.accepted, length)]:
            if self._append(state, token):
                # The draft after an end is never accepted, so this was the last; the next prompt is run first.
                return
        self._append(state, self._after(block, length))

    def _after(self, block: _Block, length: int) -> int:
        """The token behind the accepted drafts of a block of which `length` were verified."""
        return block.residual if length > block.accepted else block.fresh[length]

    # -- the models ------------------------------------------------------------------------------------

    def _draft(self, wanted: Sequence[tuple[_Request, int]]) -> None:
        """Draft and score a block for each request at its position (at most `max_rows` of them)."""
        for lost in self._rows.place([state.number for state, _ in wanted]):
            self._requests[lost].valid = 0
        while behind := [state for state, position in wanted if state.known < position]:
            self._run(behind, draw=True)
        self._run([state for state, _ in wanted if state.valid < len(state.tokens) - 1], draw=False)
        # In the order of their rows, so that neighbors share a pass.
        self._blocks(sorted((state for state, _ in wanted), key=lambda state: self._rows[state.number]))

    def _run(self, states: Sequence[_Request], *, draw: bool) -> None:
        """Bring the caches up to the text (its last token excepted); with `draw` let the target write one more."""
        groups: dict[int, list[_Request]] = {}
        for state in states:
            groups.setdefault(len(state.tokens) - state.valid - (not draw), []).append(state)
        for length, members in groups.items():
            members.sort(key=lambda state: self._rows[state.number])
            most = max(1, _PASS_TOKENS // length)
            for first in range(0, len(members), most):
                self._run_alike(members[first : first + most], length, draw=draw)

    def _run_alike(self, members: Sequence[_Request], length: int, *, draw: bool) -> None:
        """`_run` for texts that lack the same number of tokens."""
        start = [state.valid for state in members]
        pending = [state.tokens[first : first + length] for state, first in zip(members, start, strict=True)]
        features, hidden = self._extend(members, self._ids(pending), self._ids(start))
        if draw:
            logits = self._target.logits(hidden[:, -1]) / self._temperature
            requests = np.array([state.number for state in members])
            u = uniform(self._plain_seed, requests, np.array([state.known + 1 for state in members]))
            following = pick(torch.softmax(logits, dim=-1), torch.from_numpy(u).to(self._device)).tolist()
        else:
            following = [state.tokens[-1] for state in members]
        tokens = [[*own, token] for own, token in zip(pending, following, strict=True)]
        self._prepare(members, features, tokens, start)
        for state, first, token in zip(members, start, following, strict=True):
            state.valid = first + length
            if draw:
                self._append(state, token)

    def _remember(self, grown: Sequence[tuple[_Request, int, Tensor]]) -> None:
        """Keep what the target's pass over a block said of the tokens that became text: (request, anchor, states)."""
        members = [state for state, _, _ in grown]
        width = self.gamma + 2
        tokens = [(state.tokens[first:] + [0] * width)[:width] for state, first, _ in grown]
        self._prepare(members, torch.stack([features for _, _, features in grown]), tokens, [f for _, f, _ in grown])
        for state in members:
            state.valid = len(state.tokens) - 1

    def _prepare(
        self, members: Sequence[_Request], features: Tensor, tokens: Sequence[Sequence[int]], first: Sequence[int]
    ) -> None:
        """The drafter's context from states [R, S, taps, H] at positions `first` on, and tokens [R, S + 1]."""
        rows, start = self._ids([self._rows[state.number] for state in members]), self._ids(first)
        with torch.autocast(self._device.type, dtype=self._target.head.dtype, enabled=self._autocast):
            context = self._drafter.prepare(features, self._ids(tokens), first=start)
        self._rows.write(rows, start, context)

    def _extend(self, members: Sequence[_Request], tokens: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        """The target's pass, in one piece for neighboring rows: states [R, S, taps, H] and hidden [R, S, H]."""
        parts = []
        for first, last, cache in self._rows.runs([self._rows[state.number] for state in members]):
            parts.append(self._target.extend(tokens[first:last], cache, start[first:last], self._layers))
        features, hidden = (torch.cat(side) for side in zip(*parts, strict=True))
        return torch.cat([features, hidden[:, :, None]], dim=2)[:, :, self._columns].float(), hidden

    def _blocks(self, members: Sequence[_Request]) -> None:
        """Draft from the last token of each text (rows ascending), let the target score, draw what may follow."""
        gamma, device = self.gamma, self._device
        number = np.array([state.number for state in members])[:, None]
        position = np.array([state.known for state in members])[:, None]
        k = np.arange(gamma + 1)

        def luck(seed: int, width: int) -> Tensor:
            return torch.from_numpy(uniform(seed, number, position, k[None, :width])).to(device)

        anchors = self._ids([state.tokens[-1] for state in members])
        seen = self._ids([len(state.tokens) - 1 for state in members])
        vocabulary, allowed = self._batch_vocabulary(members)
        drawn = Drawn(luck(self._draft_seed, gamma), allowed)
        context = self._rows.read([self._rows[state.number] for state in members], int(seen.max()))
        with torch.autocast(device.type, dtype=self._target.head.dtype, enabled=self._autocast):
            block = self._drafter.draft(context, anchors, seen, vocabulary, self._temperature, drawn)
        drafts, local = block.tokens[:, :gamma], block.local[:, :gamma]
        features, hidden = self._extend(members, torch.cat([anchors[:, None], drafts], dim=1), seen)
        p_draft = drawn.laws
        u_accept, u_next = luck(self._accept_seed, gamma), luck(self._next_seed, 1)
        most = max(1, _PASS_LOGITS // ((gamma + 1) * self._target.vocab_size))
        scored = [
            _score(
                torch.softmax(self._target.logits(hidden[part]) / self._temperature, dim=-1),
                p_draft[part],
                drafts[part],
                local[part],
                vocabulary.tokens,
                u_accept[part],
                u_next[part],
            )
            for part in (slice(first, first + most) for first in range(0, len(members), most))
        ]
        accepted, fresh, rest = (torch.cat(side) for side in zip(*scored, strict=True))
        # Drafts up to and with the first end token, and up to the longest answer, can become text.
        ends = torch.isin(drafts, self._eos).long()
        whole = gamma - (ends.cumsum(dim=1) - ends > 0).sum(dim=1)
        room = self._ids([self.max_tokens - state.answer for state in members])
        live = torch.minimum(whole, room)
        confidence = torch.sigmoid(block.confidence_logit[:, :gamma].float() / self._divisors).clamp(EDGE, 1 - EDGE)
        confidence[torch.arange(gamma, device=device) >= live[:, None]] = EDGE
        accepted = torch.minimum(accepted, live)
        columns = zip(
            drafts.tolist(), accepted.tolist(), fresh.tolist(), rest.tolist(), confidence.cpu().numpy(), strict=True
        )
        for i, (state, found) in enumerate(zip(members, columns, strict=True)):
            state.block = _Block(state.known, *found, features[i])

    def _batch_vocabulary(self, members: Sequence[_Request]) -> tuple[Vocabulary, Tensor | None]:
        """All that some request may draft, and [R, E] of 1 and 0: what each may (None: everything)."""
        key = tuple((state.number, state.segment) for state in members)
        if self._vocabulary is None or key != self._vocabulary_key:
            extras = [state.prompt.extra for state in members]
            own = self._drafter.vocabulary_head.tokens
            self._vocabulary = batch_vocabulary(own, self._target.vocab_size, extras)
            self._vocabulary_key = key
        return self._vocabulary

    def _ids(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _score(
    p_target: Tensor, p_draft: Tensor, drafts: Tensor, local: Tensor, tokens: Tensor, u_accept: Tensor, u_next: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Speculative acceptance of blocks, and every token that may follow (arXiv 2211.17192, algorithm 1).

    Parameters
    ----------
    p_target
        [R, gamma + 1, V]: laws of the target after the anchor and after each draft.
    p_draft
        [R, gamma, E]: laws that the drafts were drawn from.
    drafts, local
        int64[R, gamma]: drafted tokens, and the same as indices into E.
    tokens
        int64[E]: the draft vocabulary.
    u_accept, u_next
        float64[R, gamma] and float64[R, 1] in [0, 1).

    Returns
    -------
    accepted, fresh, rest
        int64[R] drafts before the first rejection; int64[R, gamma + 1] tokens drawn from p_target after each prefix;
        int64[R] the token drawn from norm(max(0, p_target - p_draft)) at the first rejection (the last draft's
        where there is none: nobody looks at it).
    """
    gamma = drafts.shape[1]
    row = torch.arange(len(drafts), device=drafts.device)
    of_target = p_target[:, :gamma].gather(2, drafts[..., None]).squeeze(2)
    of_draft = p_draft.gather(2, local[..., None]).squeeze(2)
    accepted = (~rejected(of_draft, of_target, u_accept)).long().cumprod(dim=1).sum(dim=1)
    fresh = pick(p_target, u_next.expand(-1, gamma + 1))
    at = accepted.clamp(max=gamma - 1)
    there = p_target.new_zeros(len(drafts), p_target.shape[-1])
    there[:, tokens] = p_draft[row, at]
    return accepted, fresh, pick(residual(p_target[row, at], there), u_next[:, 0])
