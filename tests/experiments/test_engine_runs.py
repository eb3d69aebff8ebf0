"""Prices of measured steps, the drafts that a prompt replays, and the machine's drift: worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dsim.cost import Points
from dsim.drafts import BankDrafts, BankHeader, make_bank
from dsim.errors import InputError
from dsim.options import HostCost
from experiments._engine_runs import (
    Measured,
    Prices,
    bank_of_prompts,
    by_text_domain,
    engine_config,
    fitted_host,
    free_additive,
    long_enough,
    mean_context,
    prompt_name,
    read_measured,
)


def law(requests: int, tokens: int, context: int) -> float:
    """10 ms, 2 ms a token (three are slow), 1 ms a request, 0.05 ms a token of text."""
    return 10 + 2 * tokens + 5 * (tokens == 3) + requests + 0.05 * context


def passes() -> pd.DataFrame:
    rows: list[dict[str, Any]] = [
        {"kind": "verify", "context": context, "requests": r, "tokens": tokens, "ms": law(r, tokens, context)}
        for context in (20, 60)
        for r in (1, 2, 4)
        for tokens in (1, 2, 3, 4, 6, 8, 12, 16)
        if r <= tokens <= 4 * r
    ]  # fmt: skip
    rows += [{"kind": "draft", "context": 40, "requests": r, "tokens": r, "ms": 3.0 + r} for r in (1, 2, 4)]
    # A prompt's token costs 1 ms: as much as half a verified one.
    rows += [{"kind": "prefill", "context": 0, "requests": 1, "tokens": n, "ms": 13.0 + n} for n in (4, 8, 16)]
    return pd.DataFrame(rows).assign(usual_ms=lambda t: t["ms"], median_ms=lambda t: 2 * t["ms"])


def prices(**options: Any) -> Prices:
    return Prices.of(passes(), "p", HostCost(base_ms=0.5, per_request_ms=0.25, power=1.0), **options)


# -- prices ----------------------------------------------------------------------------------------------


def test_an_additive_law_that_falls_is_found_again() -> None:
    points = [(r, n) for r in (1, 2, 4) for n in (1, 2, 3, 4, 6, 8) if r <= n <= 4 * r]
    requests, tokens = (np.array(column) for column in zip(*points, strict=True))
    found = free_additive(Points(tokens, requests, np.array([law(r, n, 20) for r, n in points]), 0))
    for r, n in points:
        assert found.price(r, np.array([n]))[0] == pytest.approx(law(r, n, 20))
    assert found.price(1, np.array([3]))[0] > found.price(1, np.array([4]))[0]
    # A batch that was not timed lies between its neighbors.
    assert found.price(3, np.array([6]))[0] == pytest.approx(law(3, 6, 20))


def test_batches_without_a_common_size_are_refused() -> None:
    points = Points(np.array([1, 2, 8, 16]), np.array([1, 1, 8, 8]), np.ones(4), 0)
    with pytest.raises(InputError, match="does not tell requests from tokens"):
        free_additive(points)


def test_prices_are_the_chosen_column_between_contexts() -> None:
    found = prices()
    assert found.verify_ms(2, np.array([4.0, 5.0]), 40) == pytest.approx(
        [law(2, 4, 40), (law(2, 4, 40) + law(2, 6, 40)) / 2]
    )
    assert found.verify_ms(2, np.array([4.0]), 10)[0] == pytest.approx(law(2, 4, 20))
    assert prices(statistic="median_ms").verify_ms(2, np.array([4.0]), 20)[0] == pytest.approx(2 * law(2, 4, 20))
    at = found.at(50)
    assert not at.depends_on_context
    assert at.verify_table(2, 16)[[2, 4, 8]] == pytest.approx([law(2, n, 50) for n in (2, 4, 8)])
    assert found.at(1000).verify_table(2, 16)[4] == pytest.approx(law(2, 4, 60))


def test_a_machine_that_is_slow_is_slow_in_everything() -> None:
    slow = prices().scaled(1.5)
    assert slow.at(40).verify_table(2, 16)[4] == pytest.approx(1.5 * law(2, 4, 40))
    assert slow.cost.draft_ms(2) == pytest.approx(7.5)
    assert slow.host.ms(2) == pytest.approx(1.5)
    lengths = np.array([4, 7, 16])
    assert slow.equivalents(lengths, 16).tolist() == prices().equivalents(lengths, 16).tolist()


def test_prompts_in_verified_tokens() -> None:
    # Alone 13 + n; as x verified tokens 10 + 2 x + 1 + 0.05 x 40: x = n / 2. Below 4, which is 2, in proportion.
    found = prices()
    assert found.equivalents(np.array([10, 12, 16]), 16).tolist() == [5, 6, 8]
    assert found.equivalents(np.array([2, 4]), 16).tolist() == [1, 2]
    # In chunks of 12: one and a third of one, two, and a part of one.
    assert found.equivalents(np.array([16, 24, 10]), 12).tolist() == [6 + 2, 12, 5]
    assert found.equivalents(np.array([12]), 12).tolist() == [6]


def test_steps_that_were_measured_are_priced_one_by_one() -> None:
    steps = {
        "requests": np.array([2, 0, 1]),
        "drafts": np.array([2, 0, 0]),
        "prefill_tokens": np.array([0, 8, 8]),
        "context_tokens": np.array([80, 0, 40]),
    }
    found = prices().step_ms(steps, 0.5, drafting=True)
    host = (1.0, 0.5, 0.75)
    assert found[0] == pytest.approx(law(2, 4, 40) + 5.0 + host[0])
    assert found[1] == pytest.approx(law(1, 4, 20) + host[1])  # nobody decodes: no draft
    assert found[2] == pytest.approx((law(1, 4, 40) + law(1, 6, 40)) / 2 + 4.0 + host[2])
    alone = prices().step_ms(steps, 0.5, drafting=False)
    assert (found - alone).tolist() == pytest.approx([5.0, 0.0, 4.0])


@pytest.mark.parametrize(
    ("drop", "message"), [("draft", "'kind'.*got 'draft'"), ("prefill", "'prefill'"), (20, "'verify'")]
)
def test_profiles_that_lack_something_are_refused(drop: Any, message: str) -> None:
    table = passes()
    kept = table[(table["kind"] != drop) & (table["context"] != drop)]
    with pytest.raises(InputError, match=message):
        Prices.of(kept, "p", HostCost())


def test_the_mean_text_of_a_run() -> None:
    # 10 tokens at 100 + 5 on average, 30 at 50 + 15.
    assert mean_context(np.array([100, 50]), np.array([10, 30])) == pytest.approx((10 * 105 + 30 * 65) / 40)


def test_host_time_is_a_line_through_the_medians() -> None:
    table = pd.DataFrame({"requests": [1, 1, 1, 4, 4, 4], "ms": [0.3, 0.2, 9.0, 0.6, 0.6, 0.0]})
    found = fitted_host(table)
    assert (found.ms(1), found.ms(4), found.ms(2)) == pytest.approx((0.3, 0.6, 0.4))
    assert fitted_host(table[table["requests"] == 1]).ms(7) == pytest.approx(0.3)
    assert fitted_host(table.assign(ms=0.0)).ms(3) == 0.0
    falling = fitted_host(pd.DataFrame({"requests": [1, 4], "ms": [0.5, 0.4]}))
    assert falling.per_request_ms == 0.0


def test_the_replica_that_stands_for_the_engine() -> None:
    config = engine_config(4, 7, 50, HostCost(base_ms=1.0))
    assert (config.max_seqs, config.token_budget, config.prefill_chunk) == (4, 82, 50)
    assert config.colocated
    assert not config.overlapped


# -- the bank --------------------------------------------------------------------------------------------

GAMMA = 2
DOMAINS = ["math", "code", "chat", "math", "code", "chat"]


def recorded(
    left_out: list[int], draws: int = 2, asked: int = 6, answers: int = 1, changes: dict[str, Any] | None = None
) -> Any:
    """A bank of six prompts; the texts of prompt i accept i % 3 drafts everywhere, text i has 6 + i rows."""
    texts = [i for i in range(asked * answers) for _ in range(draws) if i not in left_out]
    held = [i % asked for i in texts]
    lengths = [6 + i for i in texts]
    rows = sum(lengths)
    notes = {"prompts": "hash", "prompts_asked": asked, "draws": draws, "left_out": left_out, "drafter_hash": "d"}
    if answers > 1:
        notes["answers"] = answers
    return make_bank(
        BankHeader(
            gamma=GAMMA,
            kind="recorded",
            drafter="d",
            target="t",
            source="dsim",
            license="l",
            domains=("math", "code", "chat"),
            logit_low=-8.0,
            logit_high=8.0,
            temperatures=(2.0, 2.0),
            notes=json.dumps(notes | (changes or {})),
        ),
        confidence_logit=np.full((rows, GAMMA), 1.0),
        alpha=np.full((rows, GAMMA), 0.4),
        accepted=np.repeat([i % 3 for i in held], lengths),
        bounds=np.concatenate([[0], np.cumsum(lengths)]),
        domain=np.array([i % 3 for i in held]),
    )


def test_each_prompt_replays_its_own_texts() -> None:
    bank = bank_of_prompts(recorded([]), DOMAINS[:5], "hash", (1.0, 1.0))
    assert bank.header.domains == tuple(prompt_name(i) for i in range(5))
    assert np.diff(bank.bounds).tolist() == [6 + i for i in range(5) for _ in range(2)]
    drafts = BankDrafts(bank, seed=3)
    for request in range(5):
        drafts.open(request, request, 3)
    _, accepted = drafts.draft(np.arange(5), np.zeros(5, dtype=np.int64))
    assert accepted.tolist() == [0, 1, 2, 0, 1]
    # The confidences are those of the runs' temperatures, within the file's steps of 16 / 255.
    assert bank.confidence[0, 0] == pytest.approx(1 / (1 + np.exp(-1.0)), abs=0.01)
    assert bank.alpha[0, 0] == pytest.approx(0.4, abs=0.003)


def test_a_prompt_without_texts_takes_those_of_the_next_one_of_its_domain() -> None:
    bank = bank_of_prompts(recorded([1, 5]), DOMAINS, "hash", ())
    # 1 (code) takes 4's, 5 (chat) wraps around to 2's.
    assert np.diff(bank.bounds)[::2].tolist() == [6, 10, 8, 9, 10, 8]
    assert bank.header.temperatures == (1.0, 1.0)


def test_a_prompt_has_all_its_answers() -> None:
    bank = bank_of_prompts(recorded([1, 8], draws=1, answers=2), DOMAINS, "hash", ())
    # 1's first answer and 2's second one are too short for replay.
    assert np.diff(bank.bounds).tolist() == [6, 12, 13, 8, 9, 15, 10, 16, 11, 17]
    assert bank.domain.tolist() == [0, 0, 1, 2, 3, 3, 4, 4, 5, 5]
    drafts = BankDrafts(bank, seed=3)
    for request in range(6):
        drafts.open(request, request, 3)
    assert drafts.draft(np.arange(6), np.zeros(6, dtype=np.int64))[1].tolist() == [0, 1, 2, 0, 1, 2]


def test_a_request_meets_texts_as_long_as_its_answer() -> None:
    # Prompt i has texts of 6 + i and 12 + i rows, of which gamma + 1 = 3 are not replayed.
    bank = bank_of_prompts(recorded([], draws=1, answers=2), DOMAINS, "hash", ())
    left = long_enough(bank, np.array([4, 5, 7, 30, 2, 13]))
    # 0: 3 rows are enough for 4 tokens. 1: 4 for 5. 2: 5 are not for 7. 3: none is, the longest stays. 5: 8 and 14.
    assert left.domain.tolist() == [0, 0, 1, 1, 6, 2, 6, 3, 4, 4, 6, 5]
    assert left.header.domains == (*bank.header.domains, "left-out")
    assert bank.domain.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    drafts = BankDrafts(left, seed=0)
    for seed in range(8):
        drafts = BankDrafts(left, seed=seed)
        drafts.open(0, 2, 7)
        assert drafts._base[0] == left.bounds[5]


def test_texts_by_domain_only() -> None:
    bank = by_text_domain(bank_of_prompts(recorded([]), DOMAINS, "hash", ()))
    assert bank.header.domains == ("math", "code", "chat")
    assert bank.domain.tolist() == [i % 3 for i in range(6) for _ in range(2)]


@pytest.mark.parametrize(
    ("bank", "domains", "message"),
    [
        (lambda: recorded([], changes={"prompts_asked": None}), DOMAINS, "does not say which prompts"),
        (
            lambda: replace(recorded([]), header=replace(recorded([]).header, notes="")),
            DOMAINS,
            "does not say which prompts",
        ),
        (lambda: recorded([], changes={"prompts": "other"}), DOMAINS, "recorded on other prompts.*got 'other'"),
        (lambda: recorded([]), DOMAINS * 2, "holds too few prompts.*got 6.*at least 12"),
        (lambda: recorded([], asked=300), DOMAINS * 50, "so many domains at most, got 300, expected at most 254"),
        (lambda: recorded([], changes={"left_out": [0]}), DOMAINS, "does not fit its notes.*got 12, expected 10"),
        (lambda: recorded([1]), DOMAINS[:3], "has no text of this domain.*got 'code'"),
    ],
)
def test_banks_that_do_not_fit_are_refused(bank: Any, domains: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        bank_of_prompts(bank(), domains, "hash", ())


# -- what a measurement says -----------------------------------------------------------------------------


def measured() -> Measured:
    return Measured(
        profile="p", target="t", drafter="d", gamma=2, temperature=0.6, temperatures=(1.0, 1.5),
        arms=("none", "dspark"), users=(1, 16), requests=24, per_user=3, max_tokens=128, prefill_chunk=128,
        prompts="h", contexts=(40, 200), passes=4, seed=0, same_texts=False, threads=1, clock="wall", rounds=3,
        about={"torch": "2"},
    )  # fmt: skip


def test_a_measurement_reads_as_it_was_written(tmp_path: Path) -> None:
    measured().write(tmp_path / "measurement.json")
    assert read_measured(tmp_path / "measurement.json") == measured()
    assert (measured().count(1), measured().count(16)) == (24, 48)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "'format, version'"),
        ('{"format": "dsim-engine-measurement", "version": 2}', "'format, version'"),
        ('{"format": "dsim-engine-measurement", "version": 1}', "missing key"),
    ],
)
def test_files_that_are_no_measurement_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "measurement.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        read_measured(file)


# -- drift -----------------------------------------------------------------------------------------------


def test_drift_is_told_from_sizes() -> None:
    measure = pytest.importorskip("experiments._engine_measure")
    timing = pytest.importorskip("dsim.drafter.timing")
    sizes = [timing.Size("verify", 40, 1, n) for n in (1, 2, 4, 8)]
    base, speed = np.array([10.0, 12.0, 16.0, 24.0]), [1.0, 1.5, 0.8]
    # The second run, a slow one, timed the largest size nearly only, and often.
    which = [[0, 1, 2, 3, 0, 1, 2], [3] * 5 + [2], [0, 1, 2, 3]]
    runs = [
        tuple(timing.Pass(sizes[i], (0, 0, round(1e6 * base[i] * slow), 0, 0)) for i in own)
        for own, slow in zip(which, speed, strict=True)
    ]
    usual, drift = measure.usual_times(runs)
    assert drift == pytest.approx(speed)
    assert [usual[size] for size in sizes] == pytest.approx(base.tolist())
    table = measure.passes_table(runs)
    assert table["usual_ms"].tolist() == pytest.approx(base.tolist())
    assert table["median_ms"].iloc[3] == pytest.approx(36.0)  # what the plain median makes of it
    assert table["passes"].tolist() == [3, 3, 4, 7]
