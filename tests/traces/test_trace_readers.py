"""The readers on shipped traces and on retyped rows of the other public files."""

import gzip
import hashlib
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsim.errors import InputError
from traces import read_trace, shipped_traces

# First five and last five rows of the Azure LLM inference traces of 2024 (code) and 2025 (multimodal), retyped
# from the notebooks in github.com/Azure/AzurePublicDataset (CC-BY-4.0; Stojkovic et al., HPCA 2025; Qiu et al.,
# SoCC 2025). Not contiguous.
AZURE_2024 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.017335+00:00,2399,6
2024-05-10 00:00:00.022314+00:00,76,15
2024-05-10 00:00:00.037845+00:00,2376,1
2024-05-10 00:00:00.083890+00:00,7670,8
2024-05-16 23:59:59.886489+00:00,897,1
2024-05-16 23:59:59.925267+00:00,2842,79
2024-05-16 23:59:59.928444+00:00,378,56
2024-05-16 23:59:59.928698+00:00,491,1
2024-05-16 23:59:59.929501+00:00,4725,8
"""
AZURE_2025 = """\
TIMESTAMP,NumImages,ContextTokens,GeneratedTokens
2024-10-15T12:00:00.269Z,0,770,491
2024-10-15T12:00:05.819Z,1,949,126
2024-10-15T12:00:06.513Z,1,964,79
2024-10-15T12:00:07.332Z,0,78,5
2024-10-15T12:00:07.566Z,1,1724,28
2024-10-22T11:59:59.539Z,16,4564,137
2024-10-22T11:59:59.713Z,1,1133,64
2024-10-22T11:59:59.831Z,1,664,326
2024-10-22T11:59:59.962Z,1,1172,76
2024-10-22T11:59:59.964Z,0,841,63
"""
# Rows 1-3 and 20-22 of BurstGPT_1.csv, retyped (github.com/HPMLL/BurstGPT, CC-BY-4.0; Wang et al., KDD 2025).
# The fifth is a failed request.
BURSTGPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,276,693,Conversation log
1072,ChatGPT,733,180,913,Conversation log
1106,ChatGPT,0,0,0,Conversation log
1129,ChatGPT,1305,477,1782,Conversation log
"""
# First three and last three rows of splitwise_conv.csv in github.com/microsoft/vidur (MIT), retyped: made there
# from the Azure 2023 conversation trace (CC-BY-4.0; Patel et al., ISCA 2024).
VIDUR = """\
arrived_at,num_prefill_tokens,num_decode_tokens
0.0,374,44
4.314579,396,109
4.541877,879,55
3498.030189,1120,466
3501.060254,1030,434
3501.721937,197,183
"""
# The two samples in the README of Mooncake's FAST25 release, retyped onto one line each
# (github.com/kvcache-ai/Mooncake, Apache-2.0; Qin et al., FAST 2025).
MOONCAKE = """\
{"timestamp": 27482, "input_length": 6955, "output_length": 52,\
 "hash_ids": [46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 2353, 2354]}
{"timestamp": 30535, "input_length": 6472, "output_length": 26,\
 "hash_ids": [46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 2366]}
"""


@pytest.fixture
def write(tmp_path):
    def write_file(content, name="a.dat"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write_file


def triples(trace, rows):
    return [(trace.arrival_s[i], int(trace.prompt_tokens[i]), int(trace.output_tokens[i])) for i in rows]


def test_shipped_names():
    assert shipped_traces() == ("azure2023-code", "azure2023-conv", "mooncake-conversation")


def test_azure_2023_conversation():
    trace = read_trace("azure2023-conv")
    assert (trace.name, trace.kind, len(trace)) == ("azure2023-conv", "recorded", 19_366)
    # 18:15:46.6805900, 50.9951690, 51.2224670; 19:14:07.7408440, 08.4025270: by hand, no digit lost
    assert triples(trace, [0, 1, 2]) == [(0.0, 374, 44), (4.314579, 396, 109), (4.541877, 879, 55)]
    assert triples(trace, [-2, -1]) == [(3501.060254, 1030, 434), (3501.721937, 197, 183)]
    assert int(trace.prompt_tokens.sum()) == 22_361_870
    assert int(trace.output_tokens.sum()) == 4_088_665
    assert trace.prefix_blocks is None
    assert "CC-BY-4.0" in trace.source
    assert "b469a11" in trace.source


def test_conv1000_is_the_known_speed_workload():
    head = read_trace("azure2023-conv").head(1000)
    assert int(head.prompt_tokens.sum()) == 1_014_189
    assert int(head.output_tokens.sum()) == 247_262


def test_azure_2023_code():
    trace = read_trace("azure2023-code")
    assert len(trace) == 8_819
    # 18:17:03.9799600, 04.0319600, 04.0781490; 19:14:19.9280160
    assert triples(trace, [0, 1, 2]) == [(0.0, 4808, 10), (0.052, 3180, 8), (0.098189, 110, 27)]
    assert triples(trace, [-1]) == [(3435.948056, 549, 173)]


def test_mooncake_conversation_slice():
    trace = read_trace("mooncake-conversation")
    assert len(trace) == 2_007
    assert triples(trace, [0, 1, 2]) == [(0.0, 6758, 500), (0.0, 7322, 490), (0.0, 7236, 794)]
    assert trace.duration_s == 669.0
    assert int(trace.prompt_tokens[:2000].sum()) == 27_441_774
    assert int(trace.output_tokens[:2000].sum()) == 704_602
    assert sum(map(len, trace.prefix_blocks[:2000])) == 54_559
    assert trace.prefix_blocks[0] == tuple(range(14))
    assert trace.prefix_blocks[1] == (0, *range(14, 28))
    assert "Apache-2.0" in trace.source


def test_shipped_bytes_are_those_of_the_provenance_file():
    data = resources.files("traces") / "data"
    sums = {}
    for line in (data / "PROVENANCE.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("    ") and len(line.split()) == 2:
            digest, name = line.split()
            sums[name] = digest
    assert len(sums) == 3
    for name, digest in sums.items():
        packed = (data / f"{name}.gz").read_bytes()
        assert hashlib.sha256(gzip.decompress(packed)).hexdigest() == digest
        assert packed[4:8] == bytes(4)  # no time stamp


def test_licenses_are_shipped():
    data = resources.files("traces") / "data"
    assert "https://creativecommons.org/licenses/by/4.0/" in (data / "LICENSE-CC-BY-4.0.txt").read_text("utf-8")
    assert "TERMS AND CONDITIONS" in (data / "LICENSE-APACHE-2.0.txt").read_text("utf-8")


def test_azure_2024(write):
    trace = read_trace(write(AZURE_2024))
    assert triples(trace, [0, 1, 4]) == [(0.0, 2162, 5), (0.007405, 2399, 6), (0.07396, 7670, 8)]
    # 2024-05-10 00:00:00.009930 to 2024-05-16 23:59:59.929501: seven days less 0.080429 s
    assert triples(trace, [-1]) == [(7 * 86400 - 0.080429, 4725, 8)]


def test_azure_2025_leaves_images_alone(write):
    trace = read_trace(write(AZURE_2025))
    assert triples(trace, [0, 1, -1]) == [(0.0, 770, 491), (5.55, 949, 126), (7 * 86400 - 0.305, 841, 63)]


def test_vidur_rows_are_azure_conversation_rows(write):
    vidur, azure = read_trace(write(VIDUR)), read_trace("azure2023-conv")
    rows = [0, 1, 2, -3, -2, -1]
    np.testing.assert_allclose(vidur.arrival_s, azure.arrival_s[rows], rtol=0.0, atol=1e-6)
    assert vidur.prompt_tokens.tolist() == azure.prompt_tokens[rows].tolist()
    assert vidur.output_tokens.tolist() == azure.output_tokens[rows].tolist()


def test_burstgpt_refuses_failed_requests_unless_told(write):
    path = write(BURSTGPT)
    with pytest.raises(InputError, match=r"line 6, field 'Request tokens'.*drop_zero=True") as caught:
        read_trace(path)
    assert caught.value.value == "0"
    trace = read_trace(path, drop_zero=True)
    assert triples(trace, range(5)) == [
        (0.0, 472, 18),
        (40.0, 1087, 230),
        (113.0, 417, 276),
        (1067.0, 733, 180),
        (1124.0, 1305, 477),
    ]
    assert trace.source.endswith("; 1 of 6 rows with a length of 0 left out")


def test_burstgpt_with_session_columns(write):
    # The column names of BurstGPT_3.csv; the rows are made up.
    text = (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "19440110.5,1722-ac,43,GPT-4,906,446,1352,Conversation log\n"
        "19440161.0,d598-3b,2,ChatGPT,36,29,65,API log\n"
    )
    assert triples(read_trace(write(text)), [0, 1]) == [(0.0, 906, 446), (50.5, 36, 29)]


def test_mooncake_rows(write):
    trace = read_trace(write(MOONCAKE))
    assert triples(trace, [0, 1]) == [(0.0, 6955, 52), (3.053, 6472, 26)]
    assert trace.prefix_blocks[0][:12] == trace.prefix_blocks[1][:12]
    assert trace.prefix_blocks[1][12:] == (2366,)


@pytest.mark.parametrize("text", [AZURE_2024, AZURE_2025, VIDUR, MOONCAKE])
def test_line_ends_bom_blank_ends_and_gzip_change_nothing(write, text):
    plain = read_trace(write(text))
    crlf = text.replace("\n", "\r\n").encode()
    variants = {
        "crlf": crlf,
        "cr": text.replace("\n", "\r").encode(),
        "bom": b"\xef\xbb\xbf" + crlf,
        "no end": text.rstrip("\n").encode(),
        "blank ends": (text + "\n\n  \n").encode(),
        "gzip": gzip.compress(crlf),
    }
    for name, content in variants.items():
        other = read_trace(write(content))
        for field in ("arrival_s", "prompt_tokens", "output_tokens"):
            assert getattr(other, field).tobytes() == getattr(plain, field).tobytes(), (name, field)
        assert other.prefix_blocks == plain.prefix_blocks


@pytest.mark.parametrize("name", ["x.csv", "x.jsonl.gz", "BurstGPT_1.csv", "x"])
def test_the_format_comes_from_the_first_line_not_from_the_file_name(write, name):
    assert len(read_trace(write(VIDUR, name))) == 6
    assert len(read_trace(write(gzip.compress(MOONCAKE.encode()), name))) == 2


def test_fraction_digits_may_vary_from_row_to_row(write):
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46,1,1\n"
        "2023-11-16 18:15:46.5,2,1\n"
        "2023-11-16 18:15:46.5000001,3,1\n"
        "2023-11-16T18:15:46.500000250,4,1\n"
        "2023-11-16 18:15:47.25,5,1\n"
    )
    assert read_trace(write(text)).arrival_s.tolist() == [0.0, 0.5, 0.5000001, 0.50000025, 1.25]


def test_offsets_are_taken_into_account(write):
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 23:59:59.5+00:00,1,1\n"
        "2024-05-11 02:00:00.75+02:00,2,1\n"
        "2024-05-11T00:00:01Z,3,1\n"
        "2024-05-10 17:00:02-0700,4,1\n"
    )
    assert read_trace(write(text)).arrival_s.tolist() == [0.0, 1.25, 1.5, 2.5]


def test_columns_may_stand_in_any_order_and_be_quoted(write):
    text = (
        'num_decode_tokens, "note", num_prefill_tokens , arrived_at\n3,"a, b",7,0.5\n4,"say ""x""",8.0,1e1\n'
    ).replace(', "note"', ',"note"')
    assert triples(read_trace(write(text)), [0, 1]) == [(0.0, 7, 3), (9.5, 8, 4)]


def test_sort_is_an_explicit_and_stable_repair(write):
    text = "arrived_at,num_prefill_tokens,num_decode_tokens\n5,1,1\n3,2,1\n5,3,1\n3,4,1\n"
    path = write(text)
    with pytest.raises(InputError, match=r"time goes backwards.*sort=True"):
        read_trace(path)
    trace = read_trace(path, sort=True)
    assert triples(trace, range(4)) == [(0.0, 2, 1), (0.0, 4, 1), (2.0, 1, 1), (2.0, 3, 1)]
    assert trace.source.endswith("; rows sorted by arrival")
    assert "sorted" not in read_trace(write(VIDUR), sort=True).source


def test_sort_takes_prefix_blocks_along(write):
    first, second = MOONCAKE.splitlines()
    trace = read_trace(write(f"{second}\n{first}\n"), sort=True)
    assert trace.prefix_blocks[0][-1] == 2354
    assert trace.prompt_tokens.tolist() == [6955, 6472]


def test_a_source_names_the_file_without_its_folder(write):
    path = write(VIDUR, "my.run.csv.gz")
    trace = read_trace(path)
    digest = hashlib.sha256(VIDUR.encode()).hexdigest()[:12]
    assert trace.name == "my.run"
    assert trace.source == f"my.run.csv.gz (vidur, sha256 {digest})"


def test_format_by_name_and_path_as_text(write):
    path = write(VIDUR)
    assert len(read_trace(str(path), format="vidur")) == 6


def test_a_path_wins_over_a_name_only_when_it_looks_like_a_path(write, monkeypatch):
    path = write(VIDUR, "azure2023-conv")
    monkeypatch.chdir(path.parent)
    assert len(read_trace("azure2023-conv")) == 19_366
    assert len(read_trace("./azure2023-conv")) == 6
    assert len(read_trace(Path("azure2023-conv"))) == 6


NUMBERS = st.one_of(
    st.integers(-2, 40).map(str),
    st.floats(-10, 10, width=32).map(repr),
    st.sampled_from(["", " 7", "7 ", "+5", "1e2", "12.0", "1.5", "nan", "inf", "-inf", "NaN", "NA", "true", "1_0"]),
    st.sampled_from(["0x1F", "99999999999999999999", "1e400", ".5", "5.", "--1", "\u0663", "\xa07", "1 2", '"3"']),
)


def by_hand(rows):
    """What a plain reading of the rows gives, or None where a row should be refused."""
    parsed = []
    for row in rows:
        values = []
        for text in row:
            text = text.strip(" ").strip('"')
            if not text.isascii() or "_" in text:
                return None
            try:
                values.append(float(text))
            except ValueError:
                return None
        time, prompt, output = values
        if not (abs(time) <= 9e9 and 1 <= prompt < 2**31 and 1 <= output < 2**31):
            return None
        if prompt % 1 or output % 1 or (parsed and time < parsed[-1][0]):
            return None
        parsed.append((time, int(prompt), int(output)))
    return [(time - parsed[0][0], prompt, output) for time, prompt, output in parsed]


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=4))
def test_any_csv_is_read_right_or_refused_with_a_line(tmp_path_factory, rows):
    path = tmp_path_factory.getbasetemp() / "property.csv"
    body = "".join(",".join(row) + "\n" for row in rows)
    path.write_text(f"arrived_at,num_prefill_tokens,num_decode_tokens\n{body}", encoding="utf-8")
    expected = by_hand(rows)
    if expected is None:
        with pytest.raises(InputError) as caught:
            read_trace(path)
        assert caught.value.line is not None
        assert 2 <= caught.value.line <= len(rows) + 1
    else:
        assert triples(read_trace(path), range(len(rows))) == expected


def test_the_whole_conversation_trace_agrees_with_a_plain_reading():
    """pandas' column parsing against Python's own integers, row by row."""
    packed = (resources.files("traces") / "data" / "azure2023_conv.csv.gz").read_bytes()
    first, expected = None, []
    for line in gzip.decompress(packed).decode().split("\r\n")[1:]:
        if line:
            time, prompt, output = line.split(",")
            clock = time.split(" ")[1]
            ticks = (int(clock[:2]) * 3600 + int(clock[3:5]) * 60 + int(clock[6:8])) * 10**7 + int(clock[9:])
            first = ticks if first is None else first
            expected.append(((ticks - first) / 10**7, int(prompt), int(output)))
    assert triples(read_trace("azure2023-conv"), range(19_366)) == expected
