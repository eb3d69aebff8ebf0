"""Engine files: exact round trips, prices by each engine's own rule, and errors that name what is wrong."""

from __future__ import annotations

import copy
import json
import pickle

import engine_files
import numpy as np
import pytest
from engine_files import FILES, sha256, write
from hypothesis import given
from hypothesis import strategies as st

from dsim.engines import (
    FORMATS,
    SglangAdditive,
    SglangDiagonal,
    TrtllmV1,
    TrtllmV2,
    VllmProfileCache,
    parse_engine_file,
    read_engine_file,
    read_price_table,
    write_engine_file,
)
from dsim.errors import InputError

TABLES = [name for name in FILES if name != "sts"]


# -- files -------------------------------------------------------------------------------------------------


def test_every_format_has_an_example():
    assert set(FILES) == set(FORMATS)


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_recognized_and_comes_back_as_it_was(tmp_path, name):
    path = write(tmp_path, FILES[name]())
    found = read_engine_file(path)
    assert found.format == name
    write_engine_file(found, tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == FILES[name]()
    assert read_engine_file(tmp_path / "again.json") == found
    assert [file.name for file in tmp_path.glob("*.tmp")] == []


@pytest.mark.parametrize("name", FILES)
def test_numbers_keep_every_digit_and_integers_stay_integers(name):
    text = json.dumps(FILES[name]())
    assert json.dumps(parse_engine_file(json.loads(text)).to_json(), sort_keys=True) == json.dumps(
        json.loads(text), sort_keys=True
    )


@pytest.mark.parametrize("name", ["sglang-diagonal", "sglang-additive", "trtllm-v1", "vllm", "sts"])
def test_unknown_fields_are_kept_where_the_engine_ignores_them(name):
    raw = FILES[name]() | {"note": {"by": ["hand", 1]}}
    if "checksum" in raw:
        raw["checksum"] = sha256({key: value for key, value in raw.items() if key != "checksum"})
    found = parse_engine_file(raw)
    assert found.extra["note"] == {"by": ["hand", 1]}
    assert found.to_json() == raw


def test_unknown_fields_are_refused_where_the_engine_refuses_them():
    with pytest.raises(InputError, match=r"field 'note': unknown field"):
        parse_engine_file(FILES["trtllm-v2"]() | {"note": 1})


def test_optional_fields_that_are_absent_stay_absent():
    bare = {"token_counts": [0, 100], "step_time_ms": [1.0, 5.0]}
    assert parse_engine_file(bare).to_json() == bare
    curves = {"draft_curve": [[1, 0.5]], "verify_curve": [[1, 2.0]]}
    assert parse_engine_file(curves).to_json() == curves


@given(
    st.lists(st.integers(1, 1 << 22), min_size=1, max_size=8, unique=True).map(sorted),
    st.floats(min_value=1e-12, max_value=1e12),
)
def test_any_number_that_may_be_one_survives(tmp_path_factory, sizes, rate):
    raw = {"sample_batch_tokens": sizes, "sample_steps_per_sec": [rate] * len(sizes), "max_batch_tokens": sizes[-1]}
    path = tmp_path_factory.mktemp("numbers") / "table.json"
    write_engine_file(parse_engine_file(raw), path)
    assert json.loads(path.read_text()) == raw


# -- prices ------------------------------------------------------------------------------------------------


def test_a_diagonal_has_the_price_of_the_next_smaller_probe():
    prices = parse_engine_file(engine_files.diagonal()).prices(3, 70)
    assert prices[[8, 15, 32, 63]].tolist() == [10.0, 10.0, 20.0, 20.0]
    assert prices[[16, 31]] == pytest.approx([1000 / 95.25] * 2)
    # Below the first probe and beyond the last one its price holds.
    assert prices[0] == prices[7] == 10.0
    assert prices[70] == prices[64] == pytest.approx(1000 / 48.1)


def test_an_additive_table_is_linear_between_probes_and_holds_outside():
    table = parse_engine_file(engine_files.additive())
    # 3 requests: alpha 0.5 ms. 40 tokens: theta halfway from 2 to 14 ms.
    assert table.prices(3, 40)[40] == pytest.approx(10 + 0.5 + 8)
    assert table.prices(1, 100)[[1, 8, 64, 100]] == pytest.approx([10, 10, 24, 24])
    assert table.prices(99, 8)[8] == pytest.approx(13.5)


def test_a_v1_table_is_linear_between_sizes_and_holds_outside():
    table = parse_engine_file(engine_files.trtllm_v1())
    assert table.prices(6, 40)[[8, 12, 40]] == pytest.approx([8 + 2.25 + 2, 8 + 2.25 + 3, 8 + 2.25 + 10])
    assert table.prices(6, 80)[80] == pytest.approx(8 + 2.25 + 16)
    assert table.gain == 0.02
    assert table.interpolated


def test_a_v1_table_without_optional_fields_has_their_defaults():
    table = parse_engine_file({"token_counts": [0, 100], "step_time_ms": [1.0, 5.0]})
    assert isinstance(table, TrtllmV1)
    assert table.prices(7, 50)[[0, 50]].tolist() == [1.0, 3.0]
    assert table.gain == 0.01
    assert not table.interpolated
    assert not table.depends_on_requests


def test_vllm_prices_the_next_size_under_a_running_maximum_and_adds_the_draft():
    table = parse_engine_file(engine_files.vllm())
    verify = table.verify_prices(20)
    assert table.capture_limit == 8
    # 4 tokens were timed at 6.5 ms, less than 2: the running maximum prices them at 7.
    assert verify[[1, 2, 3, 4, 5, 8]].tolist() == [5.0, 7.0, 7.0, 7.0, 9.0, 9.0]
    # Above the limit the first eager size's price holds down to it, then the line; beyond the last size it goes on.
    assert verify[[9, 12, 14, 16, 20]].tolist() == [30.0, 30.0, 32.0, 34.0, 38.0]
    assert [table.draft_ms(n) for n in (0, 1, 2, 4)] == [0.5, 0.5, 0.75, 1.25]
    assert table.prices(2, 20)[14] == 32.75


def test_vllm_without_captured_sizes_prices_every_size_at_the_next():
    raw = {key: engine_files.vllm()[key] for key in ("draft_curve", "verify_curve")}
    table = parse_engine_file(raw)
    assert isinstance(table, VllmProfileCache)
    assert table.capture_limit == 0
    assert table.verify_prices(14)[[9, 13, 14]].tolist() == [30.0, 34.0, 34.0]


def test_vllm_with_one_eager_size_goes_on_from_the_last_two_sizes_of_the_curve():
    raw = engine_files.vllm()
    raw = {"draft_curve": raw["draft_curve"], "verify_curve": raw["verify_curve"][:5], "factors": raw["factors"]}
    verify = parse_engine_file(raw).verify_prices(13)
    assert verify[[9, 12, 13]].tolist() == [30.0, 30.0, 30.0 + (30.0 - 9.0) / 4]


def test_a_v2_table_pads_to_its_graphs():
    table = parse_engine_file(engine_files.trtllm_v2())
    assert isinstance(table, TrtllmV2)
    # Four requests fill the graph of 4: up to 12 tokens 5.2 ms, up to 16 5.6 ms, a whole block (20) natively.
    assert table.prices(4, 25)[[4, 12, 13, 16, 17, 20, 25]].tolist() == [5.2, 5.2, 5.6, 5.6, 6.0, 6.0, 6.0]
    # Three requests leave one padding request, which takes a token of V.
    assert table.prices(3, 20)[[11, 12, 15, 16]].tolist() == [5.2, 5.6, 5.6, 6.0]
    # Five run in the graph of 8.
    assert table.prices(5, 25)[[21, 22]].tolist() == [7.0, 8.0]
    assert table.native_ms(8) == 8.0
    assert table.gain == 0.02
    with pytest.raises(InputError, match=r"'requests': the table has no graph for so many requests, got 9, exp.* 8"):
        table.prices(9, 10)


def test_a_cell_that_submits_the_whole_block_is_a_control_that_never_runs():
    raw = engine_files.trtllm_v2()
    raw["cost_tables"]["8"] = {"token_counts": [0, 24, 40], "step_time_ms": [8.0, 7.0, 9.0]}
    control = raw["measurements"][-1] | {"rank_local_verifier_budget": 40, "step_time_ms": 9.0}
    raw["measurements"].append(control)
    assert parse_engine_file(raw).prices(8, 40)[[24, 40]].tolist() == [7.0, 8.0]


@pytest.mark.parametrize("name", TABLES)
def test_prices_are_read_only_and_do_not_depend_on_what_was_asked_before(name):
    fresh, used = (parse_engine_file(FILES[name]()) for _ in range(2))
    for last in (5, 3, 60, 200):
        for requests in (1, 4):
            found = used.prices(requests, last)
            assert found.shape == (last + 1,)
            assert not found.flags.writeable
            np.testing.assert_array_equal(found, parse_engine_file(FILES[name]()).prices(requests, last))
    assert fresh == used
    assert copy.deepcopy(used) == pickle.loads(pickle.dumps(used)) == fresh


@pytest.mark.parametrize("name", TABLES)
def test_nonsense_arguments_are_refused(name):
    table = parse_engine_file(FILES[name]())
    for requests, last, field in ((-1, 3, "requests"), (1, -1, "last"), (1.5, 3, "requests"), (True, 3, "requests")):
        with pytest.raises(InputError, match=rf"field '{field}'.*an integer >= 0"):
            table.prices(requests, last)


@pytest.mark.parametrize(
    ("raw", "flat"),
    [
        (engine_files.diagonal(), False),
        (engine_files.diagonal() | {"sample_steps_per_sec": [5, 5, 5, 5.0]}, True),
        (engine_files.additive(), False),
        (engine_files.additive() | {"theta_seconds": [0.1, 0.1, 0.1]}, True),
        (engine_files.trtllm_v1(), False),
        (engine_files.trtllm_v1() | {"step_time_ms": [1, 1, 1]}, True),
        (engine_files.trtllm_v2(), False),
        ({"draft_curve": [[1, 1.0]], "verify_curve": [[1, 9.0], [8, 3.0]]}, True),
        (engine_files.vllm(), False),
    ],
)
def test_a_flat_table_is_told(raw, flat):
    assert parse_engine_file(raw).is_flat is flat


def test_temperatures_have_no_prices(tmp_path):
    path = write(tmp_path, engine_files.sts())
    with pytest.raises(InputError, match=r"table\.json: holds temperatures, no prices, expected a table: sglang-diag"):
        read_price_table(path)
    assert isinstance(read_price_table(write(tmp_path, engine_files.diagonal())), SglangDiagonal)


def test_both_spellings_of_temperatures_are_read():
    one = parse_engine_file({"sts_temperatures": [1.5, 2]})
    both = parse_engine_file({"temperatures": [1.5, 2], "sts_temperatures": [1.5, 2], "max_draft_len": 2})
    assert one.temperatures == both.temperatures == (1.5, 2)
    assert one.to_json() == {"sts_temperatures": [1.5, 2]}


# -- what is refused ---------------------------------------------------------------------------------------


def changed(name: str, *path, to):
    """An example with one value replaced."""
    raw = FILES[name]()
    node = raw
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = to
    return raw


def without(name: str, *keys: str):
    return {key: value for key, value in FILES[name]().items() if key not in keys}


def resigned(raw):
    """A v2 table or a vLLM cache whose own SHA-256 fit again."""
    if "engine_fingerprint" in raw:
        return raw | {"engine_fingerprint_sha256": sha256(raw["engine_fingerprint"])}
    raw = {key: value for key, value in raw.items() if key != "checksum"}
    return raw | {"checksum": sha256(raw)}


NAN, HUGE = float("nan"), 10**400
TWICE = [*engine_files.trtllm_v2()["measurements"], engine_files.trtllm_v2()["measurements"][0]]
BAD = [
    # numbers that are none of a step: arrays would not fit, sums and quotients would overflow
    (
        changed("sglang-diagonal", "sample_batch_tokens", 3, to=10**30),
        r"'sample_batch_tokens\[3\]': got 10{30}, expected at most 4194304",
    ),
    (
        changed("sglang-diagonal", "max_batch_tokens", to=4194305),
        r"'max_batch_tokens': got 4194305, expected at most 4194304",
    ),
    (
        changed("sglang-diagonal", "sample_steps_per_sec", 0, to=1e-320),
        r"sample_steps_per_sec\[0\]': got 1e-320, expected a number from 1e-12 to 1e\+12",
    ),
    (changed("sglang-additive", "bias_seconds", to=1e308), r"'bias_seconds': got 1e\+308, expected a number from"),
    (changed("trtllm-v1", "batch_sizes", 2, to=1 << 63), r"'batch_sizes\[2\]': got 92\d+, expected at most 4194304"),
    (changed("trtllm-v1", "minimum_predicted_gain", to=1e300), r"'minimum_predicted_gain': got 1e\+300, expected a"),
    (
        changed("trtllm-v2", "engine_fingerprint", "max_draft_len", to=1 << 21),
        r"'cost_tables\.4 x \(max_draft_len \+ 1\)': got 8388612, expected at most 4194304",
    ),
    (changed("vllm", "verify_curve", 5, 0, to=1 << 31), r"'verify_curve\[5\]\[0\]': got 2147483648, expected at most"),
    # SGLang, diagonal
    (without("sglang-diagonal", "max_batch_tokens"), r"field 'max_batch_tokens': is missing"),
    (changed("sglang-diagonal", "sample_batch_tokens", to=[]), r"'sample_batch_tokens': got \[\], expected a list"),
    (changed("sglang-diagonal", "sample_batch_tokens", to="8"), r"'sample_batch_tokens': got '8', expected a list"),
    (changed("sglang-diagonal", "sample_batch_tokens", 1, to=8), r"batch_tokens\[1\]': got 8, .*> 8 \(sizes must inc"),
    (changed("sglang-diagonal", "sample_batch_tokens", 1, to=4), r"batch_tokens\[1\]': got 4, .*> 8 \(sizes must inc"),
    (
        changed("sglang-diagonal", "sample_batch_tokens", 0, to=0),
        r"batch_tokens\[0\]': got 0, expected an integer >= 1",
    ),
    (changed("sglang-diagonal", "sample_batch_tokens", 0, to=1.5), r"batch_tokens\[0\]': got 1\.5, expected an int"),
    (changed("sglang-diagonal", "sample_batch_tokens", 0, to=True), r"batch_tokens\[0\]': got True, expected an int"),
    (changed("sglang-diagonal", "sample_steps_per_sec", to=[1.0]), r"per_sec': got \[1\.0\], expected 4 numbers, one"),
    (
        changed("sglang-diagonal", "sample_steps_per_sec", 2, to=-5),
        r"per_sec\[2\]': got -5, expected a finite number > 0",
    ),
    (
        changed("sglang-diagonal", "sample_steps_per_sec", 2, to=0),
        r"per_sec\[2\]': got 0, expected a finite number > 0",
    ),
    (changed("sglang-diagonal", "sample_steps_per_sec", 2, to=NAN), r"per_sec\[2\]': got nan, expected a finite"),
    (changed("sglang-diagonal", "sample_steps_per_sec", 2, to=HUGE), r"per_sec\[2\]': got 10{200,} \.\.\. 0+, exp"),
    (changed("sglang-diagonal", "sample_steps_per_sec", 2, to="5"), r"per_sec\[2\]': got '5', expected a finite"),
    (changed("sglang-diagonal", "sample_steps_per_sec", 2, to=None), r"per_sec\[2\]': got 'None', expected a finite"),
    (changed("sglang-diagonal", "max_batch_tokens", to=63), r"'max_batch_tokens': got 63, expected an integer >= 64"),
    (engine_files.diagonal() | {"note": [1, {"x": NAN}]}, r"'note\[1\]\.x': got nan, expected a finite number"),
    # SGLang, additive
    (changed("sglang-additive", "bias_seconds", to=0), r"'bias_seconds': got 0, expected a finite number > 0"),
    (changed("sglang-additive", "alpha_seconds", 1, to=-0.1), r"alpha_seconds\[1\]': got -0\.1, .*number >= 0"),
    (changed("sglang-additive", "m_probes", 2, to=16), r"m_probes\[2\]': got 16, expected an integer > 16"),
    (without("sglang-additive", "bs_probes"), r"field 'bs_probes': is missing"),
    # TensorRT-LLM v1
    (changed("trtllm-v1", "step_time_ms", 0, to=0.0), r"step_time_ms\[0\]': got 0\.0, expected a finite number > 0"),
    (changed("trtllm-v1", "token_counts", to=None), r"'token_counts': got 'None', expected a value, or no such field"),
    (changed("trtllm-v1", "batch_sizes", to=[2, 4]), r"'batch_overhead_ms': got .*, expected 2 numbers, one a size"),
    (without("trtllm-v1", "batch_sizes"), r"'batch_sizes': got 'None', expected a list of integers"),
    (changed("trtllm-v1", "fixed_overhead_ms", to=-1), r"'fixed_overhead_ms': got -1, expected a finite number >= 0"),
    (changed("trtllm-v1", "minimum_predicted_gain", to="1 %"), r"'minimum_predicted_gain': got '1 %'"),
    # TensorRT-LLM v2
    (changed("trtllm-v2", "schema_version", to=1), r"'schema_version': got 1, expected 2"),
    (changed("trtllm-v2", "schema_version", to=2.0), r"'schema_version': got 2\.0, expected 2"),
    (without("trtllm-v2", "cost_tables"), r"field 'cost_tables': is missing"),
    (
        changed("trtllm-v2", "cost_tables", "04", to={}),
        r"'cost_tables\.04': got '04', expected an integer >= 1 as text",
    ),
    (
        changed("trtllm-v2", "cost_tables", "4", "token_counts", 0, to=4),
        r"4\.token_counts\[0\]': got 4, expected 0, the",
    ),
    (changed("trtllm-v2", "cost_tables", "4", "token_counts", 1, to=3), r"counts\[1\]': got 3, .* integer in 4\.\.20"),
    (
        changed("trtllm-v2", "cost_tables", "4", "token_counts", 2, to=21),
        r"counts\[2\]': got 21, .* integer in 4\.\.20",
    ),
    (
        changed("trtllm-v2", "cost_tables", "4", "step_time_ms", 1, to=5.3),
        r"measurements\[1\]\.step_time_ms': got 5\.2",
    ),
    (
        changed("trtllm-v2", "cost_tables", "4", "step_time_ms", to=[1, 2]),
        r"4\.step_time_ms': got \[1, 2\], expected 3",
    ),
    (changed("trtllm-v2", "measurements", 1, "source_result_sha256", to="C" * 64), r"'measurements\[1\]\.source_resul"),
    (
        changed("trtllm-v2", "measurements", to=TWICE),
        r"'measurements\[5\]': got \[4, 0\], expected each \(G, V\)",
    ),
    (changed("trtllm-v2", "measurements", to=engine_files.trtllm_v2()["measurements"][:-1]), r"none of \[\(8, 24\)\]"),
    (changed("trtllm-v2", "engine_fingerprint", "topology", to="TEP2"), r"'engine_fingerprint_sha256': got"),
    (resigned(changed("trtllm-v2", "engine_fingerprint", "gpu_count", to=4)), r"global_graph_batch_sizes': got"),
    (changed("trtllm-v2", "engine_fingerprint", "topology", to=""), r"fingerprint\.topology': got '', expected text"),
    (changed("trtllm-v2", "engine_fingerprint", "more", to=1), r"'engine_fingerprint\.more': unknown field"),
    (
        changed("trtllm-v2", "iteration_drain_guard", "tail_graph_batch_size", to=16),
        r"tail_graph.*got 16, .*one of 4, 8",
    ),
    (
        changed("trtllm-v2", "iteration_drain_guard", "loss_multiplier", to=0),
        r"guard\.loss_multiplier': got 0, expected",
    ),
    (changed("trtllm-v2", "iteration_drain_guard", to=None), r"'iteration_drain_guard': got 'None'"),
    # vLLM
    (changed("vllm", "verify_curve", 1, to=[2]), r"verify_curve\[1\]': got \[2\], expected \[size, milliseconds\]"),
    (changed("vllm", "verify_curve", 1, to=[1, 2.0]), r"verify_curve\[1\]\[0\]': got 1, expected an integer > 1"),
    (changed("vllm", "draft_curve", 0, 1, to=-0.5), r"draft_curve\[0\]\[1\]': got -0\.5, expected a finite number > 0"),
    (changed("vllm", "draft_curve", to=[]), r"'draft_curve': got \[\], expected a list of \[size"),
    (changed("vllm", "draft_curve", 0, 1, to=0.6), r"'checksum': got .*\(somebody changed the file"),
    (changed("vllm", "factors", "profile", "k", to=5), r"'fingerprint': got .*, expected the SHA-256 of 'factors'"),
    (resigned(changed("vllm", "schema", to=2)), r"'schema': got 2, expected 1 \(dsim reads no other\)"),
    (changed("vllm", "factors", to=None), r"'factors': got 'None', expected a value, or no such field"),
    # temperatures
    ({"temperatures": []}, r"'temperatures': got \[\], expected a list of finite numbers > 0"),
    ({"temperatures": [1, 0]}, r"'temperatures\[1\]': got 0, expected a finite number > 0"),
    ({"temperatures": 1.5}, r"'temperatures': got 1\.5, expected a list"),
    (
        {"temperatures": [1.0], "sts_temperatures": [2.0]},
        r"'sts_temp.*got \[2\.0\], expected the same numbers as in 'te",
    ),
    ({"temperatures": [1.0], "max_draft_len": 2}, r"'max_draft_len': got 2, expected 1 temperatures"),
    # none, or two at once
    ({"tokens": [1]}, r"is of no known format, got \['tokens'\], expected fields of one of them \(trtllm-v2"),
    (
        engine_files.trtllm_v1() | {"measurements": []},
        r"mixes formats \(trtllm-v2, trtllm-v1\), got 'measurements, tok",
    ),
]


@pytest.mark.parametrize(("raw", "message"), BAD, ids=[message for _, message in BAD])
def test_what_is_wrong_is_named(raw, message):
    with pytest.raises(InputError, match=message) as caught:
        parse_engine_file(raw, "table.json")
    assert caught.value.file == "table.json"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"temperatures": [1.0,', r"table\.json, line 1: is not JSON, or cut off"),
        (b'{\n"temperatures":\n[1.0}', r"table\.json, line 3: is not JSON, or cut off"),
        (b"", r"line 1: is not JSON, or cut off"),
        (b"[1, 2]", r"table\.json: got \[1, 2\], expected a JSON object"),
        (
            b'{"temperatures": [1.0], "temperatures": [2.0]}',
            r"is not JSON \(the key 'temperatures' stands there twice\)",
        ),
        (b'{"temperatures": [NaN]}', r"'temperatures\[0\]': got nan, expected a finite number > 0"),
        (b'{"temperatures": [1e999]}', r"'temperatures\[0\]': got inf, expected a finite number > 0"),
        (b'{"temperatures": [' + b"9" * 5000 + b"]}", r"is not JSON \(Exceeds the limit"),
        (b"[" * 100_000, r"is nested too deeply"),
        (b"\xff\xfe{}", r"is not UTF-8 text"),
    ],
)
def test_a_file_that_is_no_json_object_is_refused(tmp_path, data, message):
    path = tmp_path / "table.json"
    path.write_bytes(data)
    with pytest.raises(InputError, match=message):
        read_engine_file(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"none\.json: cannot be read \(No such file"):
        read_engine_file(tmp_path / "none.json")


def test_a_table_made_in_memory_is_checked_too():
    with pytest.raises(InputError, match=r"bs_probes\[1\]': got 1, expected an integer > 1"):
        SglangAdditive(bias_seconds=1, bs_probes=(1, 1), alpha_seconds=(0, 0), m_probes=(1,), theta_seconds=(1.0,))
