"""Labels in words: every label that dsim makes, and nothing made up where a label is unknown."""

from __future__ import annotations

import pytest

from dsim.profile import load_profile
from experiments._sources import cost_words, drafter_words, drafts_words, requests_words

OWN = "recorded:dsim:dspark markov 2 layers"


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (["none"], ""),
        (["synthetic:dsv4-flash-0731:dspark"], "synthetic (DSpark), at DeepSeek-V4-Flash-0731's published level"),
        (["visited:log:mine"], "from an engine's log (log: mine); where it did not go"),
        (["live:smollm2:dspark:T=0.9:cpu"], "live, drafter (DSpark, T=0.9, cpu) and target (smollm2) themselves"),
        (["recorded:lab:a:b:overconfident-0.1:online-sts"], "; confidences: overconfident-0.1; calibrated online."),
        ([f"{OWN}:uncalibrated"], "(DSpark, Markov head, 2 layers); not calibrated."),
        ([f"{OWN}:bias(code+0.5/chat-1)"], "confidences: bias(code+0.5/chat-1)."),
        ([f"{OWN}:shuffled-by-domain"], "confidences: shuffled-by-domain."),
        ([f"tilted:qwen3-4b:eagle3:{OWN}"], "moved to Qwen3-4B's published level (preset qwen3-4b:eagle3)."),
        ([f"tilted:mine.json:{OWN}:tilted"], "moved to the curve mine.json; shifted by the scenario."),
        ([f"tilted:scenario:{OWN}"], "moved to the scenario's own curve."),
        (["a label of nobody"], "Drafts: a label of nobody."),
    ],
)  # fmt: skip
def test_drafts(labels, words):
    assert words in drafts_words(labels)
    if not words:
        assert drafts_words(labels) == ""


def test_each_drafter_is_named_once_with_the_blocks_that_are_used():
    mtp = "recorded:dsim:mtp 1 layers"
    assert drafts_words([mtp, f"{mtp}:first-1-of-5", f"{OWN}:first-3-of-7", f"{OWN}:first-5-of-7"]) == (
        "Drafts: recorded from this project's own small drafters (MTP, 1 layer, blocks whole or cut to 1 of 5; DSpark, "
        "Markov head, 2 layers, blocks cut to 3 or 5 of 7)."
    )
    perfect = drafts_words([OWN, f"{OWN}:perfect"])
    assert perfect.endswith("; perfect confidences in some arms.")
    two = drafts_words([OWN, f"tilted:dsv4:{OWN}"], {OWN: "SmolLM2"})
    assert two.count("Drafts: recorded") == two.count(" on texts of SmolLM2") == 2


def test_step_times():
    profile = load_profile("b300x4-dsv4-flash-0731")
    base = "measured:b300x4-dsv4-flash-0731:staircase"
    labels = {base: "dspark", f"{base};draft=1x0.333:assumed": "mtp", f"{base};draft=5x0.333:assumed": "mtp"}
    assert cost_words(labels, profile) == (
        "Step times: measured (DeepSeek-V4-Flash-0731 on 4x NVIDIA B300, tensor parallel 4, profile "
        "b300x4-dsv4-flash-0731), priced at the next captured size; MTP drafts at 1 or 5 x 0.333 of the profiled "
        "drafter's pass (assumed)."
    )
    assert "profile other" in cost_words({"measured:other:roofline": "none"}, profile)
    assert "B300" not in cost_words({"measured:other:roofline": "none"}, profile)
    assert cost_words({"derived:x:additive;draft=included": "a"}) == (
        "Step times: computed, not timed (profile x), as bias + requests + tokens, fitted; the draft's time is in them."
    )
    unstepped = load_profile("m5max-nemotronh-30b")
    assert "priced between timed ones." in cost_words({f"measured:{unstepped.name}:staircase": "none"}, unstepped)


def test_requests_and_drafters():
    assert requests_words("synthetic:poisson").startswith("Requests: poisson (synthetic); ")
    assert "(recorded), window, zeros dropped;" in requests_words("recorded:mine:window:zeros-dropped")
    assert [drafter_words(text) for text in ("dflash", "dspark rnn 1 layers", "my own 2 layers")] == [
        "DFlash", "DSpark, RNN head, 1 layer", "my own 2 layers",
    ]  # fmt: skip
