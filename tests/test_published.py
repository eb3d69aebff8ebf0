"""The published tables: all there, readable, and with the numbers that the paper prints."""

from __future__ import annotations

from importlib import resources

import pytest

from dsim.errors import InputError
from dsim.frontier import frontier_curve, throughput_at
from dsim.published import TABLES, published


def test_every_shipped_file_has_a_name_and_every_name_a_file() -> None:
    data = resources.files("dsim").joinpath("data")
    shipped = {
        f"{folder}/{item.name}"
        for folder in ("paper", "acceptance")
        for item in data.joinpath(folder).iterdir()
        if item.name.endswith(".csv")
    }
    assert shipped == set(TABLES.values())
    for folder in ("paper", "acceptance"):
        text = data.joinpath(folder).joinpath("PROVENANCE.md").read_text(encoding="utf-8")
        assert all(path.split("/")[1] in text for path in TABLES.values() if path.startswith(folder))


@pytest.mark.parametrize("name", sorted(TABLES))
def test_tables_hold_no_gaps_in_their_numbers(name: str) -> None:
    table = published(name)
    assert len(table) > 0
    assert not table.isna().to_numpy().any()


def test_columns_are_those_that_the_code_relies_on() -> None:
    assert list(published("paper_fig7_lines")) == ["model", "arm", "tps", "throughput_tok_s_gpu", "kind"]
    assert list(published("paper_fig8_budget")) == [
        "model", "arm", "concurrency", "verification_budget", "kind", "note",
    ]  # fmt: skip
    assert list(published("accept_golden_al_inferencex")) == [
        "head", "mode", "num_speculative_tokens", "acceptance_length",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "speed", "gain"), [("V4-Flash", 80.0, 1.51), ("V4-Flash", 120.0, 7.61), ("V4-Pro", 35.0, 1.52)]
)
def test_our_matching_finds_the_gains_that_the_paper_prints(model: str, speed: float, gain: float) -> None:
    """Fig. 7: +51 % and +661 % at 80 and 120 tok/s/user (Flash), +52 % at 35 (Pro)."""
    lines = published("paper_fig7_lines")
    value = {}
    for arm in ("MTP-1", "DSpark-5"):
        part = lines[(lines["model"] == model) & (lines["arm"] == arm)]
        value[arm] = float(throughput_at(speed, frontier_curve(part["tps"], part["throughput_tok_s_gpu"])))
    assert value["DSpark-5"] / value["MTP-1"] == pytest.approx(gain, abs=0.012)


def test_a_fresh_frame_every_time() -> None:
    mine = published("paper_fig2")
    mine["cond_acceptance"] = 0.0
    assert published("paper_fig2")["cond_acceptance"].iloc[0] == 0.88497


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"no published table 'paper_fig9'.*paper_fig7_lines"):
        published("paper_fig9")
