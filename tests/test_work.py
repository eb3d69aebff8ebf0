"""The step's law from counted work: every term by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsim.cost import StepCost
from dsim.cost.work import Machine, StepWork, WorkCost, decoder_work
from dsim.errors import InputError
from dsim.gpu_profile.shapes import PRESETS, DecoderShape

SMALL = DecoderShape("small", layers=2, width=8, heads=2, kv_heads=1, head_dim=8, ffn=16, vocabulary=10)
EXPERTS = replace(SMALL, experts=4, experts_per_token=1)
# A GB takes 1 ms, 1e9 operations take 1 ms, and a GB over the link takes 1 ms.
UNIT = Machine(bandwidth_gb_s=1000.0, compute_tflop_s=1.0, link_gb_s=1000.0)


def cost(work, machine=UNIT, **options):
    region = {"max_tokens": 4096, "max_verify_requests": 64, "contexts": np.array([0, 8192])}
    return WorkCost("test:work", work, machine, **(region | options))


def test_a_dense_decoder_by_hand():
    work = decoder_work(SMALL)
    # A layer: q and o of 8 x 16, k and v of 8 x 8, three matrices of 8 x 16. The LM head is 8 x 10.
    layer = 2 * 8 * 16 + 2 * 8 * 8 + 3 * 8 * 16
    assert work.weight_bytes == 2 * (2 * layer + 80)
    assert work.token_flop == 2 * 2 * layer
    assert work.kv_bytes == 2 * 2 * 2 * 8
    assert (work.expert_bytes, work.link_bytes, work.ranks, work.gpus) == (0.0, 0.0, 1, 1)


def test_tensor_parallel_ranks_share_everything_and_reduce_twice_a_layer():
    one, two, four = (decoder_work(SMALL, tensor_parallel=n) for n in (1, 2, 4))
    for name in ("weight_bytes", "token_flop", "kv_bytes"):
        assert getattr(two, name) == getattr(one, name) / 2
    # Hidden states of 8 numbers of 2 bytes, two layers, two all-reduces; a ring of n sends 2 (n - 1) / n of them.
    assert two.link_bytes == 2 * 2 * 16
    assert four.link_bytes == 2 * 2 * 16 * 1.5
    assert (two.ranks, two.gpus) == (1, 2)


def test_experts_are_split_over_data_parallel_ranks_and_the_dense_part_is_not():
    one, two = decoder_work(EXPERTS), decoder_work(EXPERTS, data_parallel=2)
    attention = 2 * 8 * 16 + 2 * 8 * 8
    assert one.weight_bytes == two.weight_bytes == 2 * (2 * (attention + 8 * 4) + 80)
    assert one.expert_bytes == 2 * 2 * 4 * (3 * 8 * 16)
    assert two.expert_bytes == one.expert_bytes / 2
    # A token goes to one expert, which is on a given rank half the time.
    assert two.expert_flop == one.expert_flop / 2 == 2 * 2 * (3 * 8 * 16) / 2
    assert (two.link_bytes, two.ranks, two.gpus) == (2 * 16, 2, 2)


@pytest.mark.parametrize(
    ("shape", "parallel", "message"),
    [
        (SMALL, {"tensor_parallel": 0}, "'tensor_parallel': got 0"),
        (SMALL, {"data_parallel": 2}, "a model with experts"),
        (EXPERTS, {"data_parallel": 2, "tensor_parallel": 2}, "tensor_parallel = 1"),
        (SMALL, {"bytes_per_number": 0}, "'bytes_per_number': got 0"),
    ],
)
def test_parallelism_that_the_count_does_not_know_is_refused(shape, parallel, message):
    with pytest.raises(InputError, match=message):
        decoder_work(shape, **parallel)


def test_counts_agree_with_the_shapes_own():
    for name, shape in PRESETS.items():
        work = decoder_work(shape)
        embedding = 0 if shape.tied else shape.vocabulary * shape.width
        norms = shape.width * (2 * shape.layers + 1)
        read = (work.weight_bytes + work.expert_bytes) / 2
        assert read == shape.elements() - embedding - norms, name


def test_every_term_of_a_step_by_hand():
    work = StepWork(
        weight_bytes=4e9,
        token_flop=2e9,
        kv_bytes=1e6,
        expert_bytes=8e9,
        expert_flop=1e9,
        experts=4,
        experts_per_token=1,
        link_bytes=1e8,
        ranks=2,
        gpus=2,
    )
    machine = replace(UNIT, overhead_ms=0.5, request_ms=0.25)
    # 3 tokens: dense max(4, 2 x 3 / 2); experts max(8 (1 - 0.75^3), 3); 2 requests of 1000 tokens: 2 / 2 ms; their own
    # cost 2 x 0.25 / 2; link 0.3; overhead 0.5.
    expected = 4 + 8 * (1 - 0.75**3) + 1 + 0.25 + 0.3 + 0.5
    assert cost(work, machine).steps_ms(2, 3, 2000) == pytest.approx(expected)
    # 10 tokens: computing is the slower of both groups.
    assert cost(work, machine).steps_ms(0, 10, 0) == pytest.approx(10 + 10 + 1 + 0.5)
    table = cost(work, machine).verify_table(2, 12, context=1000.0)
    assert table[0] == 0.0
    assert table[3] == pytest.approx(expected, abs=1e-6)
    assert cost(work, machine).prefill_ms(10) == pytest.approx(21.5)
    assert cost(work, machine).prefill_ms(0) == 0.0


def test_touched_experts_approach_all_of_them():
    work = decoder_work(PRESETS["qwen3-30b-a3b"])
    share = work.touched(np.array([0.0, 1.0, 2.0, 1000.0]))
    assert share == pytest.approx([0.0, 8 / 128, 1 - (120 / 128) ** 2, 1.0])
    assert not decoder_work(SMALL).touched(np.arange(3.0)).any()


@given(
    st.integers(0, 64),
    st.integers(0, 3000),
    st.integers(0, 8192),
    st.sampled_from(["qwen3-8b", "qwen3-30b-a3b"]),
    st.floats(100, 5000),
    st.floats(10, 2000),
)
def test_no_step_is_below_its_memory_or_its_compute_floor(requests, prompt, context, name, bandwidth, compute):
    law = cost(decoder_work(PRESETS[name]), Machine(bandwidth, compute))
    tokens = max(1, requests + prompt)
    reading, computing = law.floors_ms(requests, tokens, requests * context)
    step = law.verify_table(requests, tokens, context=float(context))[tokens]
    assert step >= max(reading, computing) - 1e-6
    assert step <= reading + computing + 1e-6


def test_outside_its_region_the_law_raises_unless_it_may_extrapolate():
    law = cost(decoder_work(SMALL))
    for arguments, message in (
        ((1, 5000, 10.0), "'tokens'.*got 5000, expected 0 to 4096"),
        ((65, 100, 10.0), "'requests'.*got 65"),
        ((1, 100, 9000.0), "'context'.*got 9000.0"),
    ):
        with pytest.raises(InputError, match=message):
            law.verify_table(*arguments)
        assert replace(law, allow_extrapolation=True).verify_table(*arguments).size == arguments[1] + 1


def test_what_is_no_step_is_refused():
    law = cost(decoder_work(SMALL))
    for arguments, message in (
        ((1, 10, None), "the batch's mean context"),
        ((1, 10, math.nan), "the batch's mean context"),
        ((-1, 10, 1.0), "'requests': got -1"),
        ((1, -1, 1.0), "'max_tokens': got -1"),
    ):
        with pytest.raises(InputError, match=message):
            law.verify_table(*arguments)
    with pytest.raises(InputError, match="has no drafter"):
        law.draft_ms(4)
    assert law.draft_ms(0) == 0.0
    assert isinstance(law, StepCost)


@pytest.mark.parametrize(
    ("name", "value"),
    [("bandwidth_gb_s", 0.0), ("compute_tflop_s", -1.0), ("overhead_ms", -0.1), ("request_ms", math.inf)],
)
def test_constants_out_of_range_are_refused(name, value):
    with pytest.raises(InputError, match=f"'{name}'"):
        replace(UNIT, **{name: value})


def test_a_region_must_be_one():
    with pytest.raises(InputError, match="two lengths"):
        cost(decoder_work(SMALL), contexts=np.array([9, 3]))
    with pytest.raises(InputError, match="'min_tokens': got 9000"):
        cost(decoder_work(SMALL), min_tokens=9000)
