"""Everything that can be wrong with a trace file gives one InputError that says where and what."""

import gzip
import time
import zlib

import pytest

from dsim.errors import InputError
from traces import read_trace, shipped_traces

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
GOOD_TIME = "2023-11-16 18:15:46.6805900"


def mooncake(timestamp="0", input_length="600", output_length="5", hash_ids="[0, 1]"):
    return (
        f'{{"timestamp": {timestamp}, "input_length": {input_length}, '
        f'"output_length": {output_length}, "hash_ids": {hash_ids}}}\n'
    )


@pytest.fixture
def refused(tmp_path):
    """Write a file, read it, give back the error; the error must name the file."""

    def read(content, **options):
        path = tmp_path / "bad.csv"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(InputError) as caught:
            read_trace(path, **options)
        assert caught.value.file == str(path)
        assert str(caught.value).startswith(str(path))
        assert "\n" not in str(caught.value)
        return caught.value

    return read


# --- the file -----------------------------------------------------------------------------------------------


def test_missing_file_lists_the_shipped_names(tmp_path):
    with pytest.raises(InputError, match="no such file") as caught:
        read_trace(tmp_path / "nowhere.csv")
    assert caught.value.file == str(tmp_path / "nowhere.csv")
    for name in shipped_traces():
        assert name in str(caught.value)


def test_a_wrong_name_is_a_missing_file():
    with pytest.raises(InputError, match=r"azure2023: no such file.*azure2023-conv"):
        read_trace("azure2023")


def test_a_folder_is_no_trace(tmp_path):
    with pytest.raises(InputError, match="cannot be read") as caught:
        read_trace(tmp_path)
    assert caught.value.file == str(tmp_path)


@pytest.mark.parametrize("what", [None, 3, b"azure2023-conv", ["a"]])
def test_neither_name_nor_path(what):
    with pytest.raises(InputError, match="a name or a path"):
        read_trace(what)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf\r\n", gzip.compress(b"", mtime=0)])
def test_empty_file(refused, content):
    assert refused(content).message == "the file is empty"


@pytest.mark.parametrize("header", [AZURE, VIDUR, BURST, BURST.rstrip(), AZURE + "\r\n\r\n"])
def test_header_only(refused, header):
    error = refused(header)
    assert error.message == "the file holds no request, only a header"
    assert error.expected == "at least one request"


def test_git_lfs_pointer(refused):
    # What github.com/HPMLL/BurstGPT serves as data/BurstGPT_1.csv to a checkout without LFS.
    error = refused(
        "version https://git-lfs.github.com/spec/v1\n"
        "oid sha256:4bb3783693d0a435686fbfc885615d2349bd067239079fa4b749f2e679e12122\n"
        "size 52283111\n"
    )
    assert "Git LFS pointer" in error.message
    assert error.line == 1
    assert "git lfs pull" in error.expected


PACKED = gzip.compress((AZURE + f"{GOOD_TIME},10,10\n" * 500).encode())


@pytest.mark.parametrize("keep", [2, 9, 20, len(PACKED) // 2, len(PACKED) - 8, len(PACKED) - 1])
def test_truncated_gzip(refused, keep):
    assert "truncated gzip" in refused(PACKED[:keep]).message


def test_damaged_gzip(refused):
    damaged = bytearray(PACKED)
    damaged[len(PACKED) // 2] ^= 0xFF
    assert "gzip" in refused(bytes(damaged)).message
    checksum = PACKED[:-8] + (zlib.crc32(b"other")).to_bytes(4, "little") + PACKED[-4:]
    assert "gzip" in refused(checksum).message


def test_text_that_is_not_utf8(refused):
    assert "UTF-16" in refused((VIDUR + "0,1,1\n").encode("utf-16")).message
    error = refused(BURST.encode() + b"5,Chat\xffGPT,1,1,2,Conversation log\n")
    assert "not UTF-8" in error.message
    assert error.line == 2


# --- the header ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    ["time,in,out", "0.5,10,20", '{"a": 1}', "[1, 2]", "<!DOCTYPE html>", '"', "arrived_at;num_prefill_tokens"],
)
def test_unknown_header_lists_the_formats(refused, header):
    error = refused(header + "\n0,1,1\n")
    assert error.message == "this header belongs to no known trace format"
    assert (error.line, error.value) == (1, header)
    for text in ("azure (TIMESTAMP, ContextTokens", "vidur (", "burstgpt (Timestamp", "mooncake (timestamp"):
        assert text in error.expected


@pytest.mark.parametrize(
    ("header", "missing", "form"),
    [
        ("TIMESTAMP,ContextTokens", "GeneratedTokens", "azure"),
        ("TIMESTAMP,ContextTokens,generatedtokens", "GeneratedTokens", "azure"),
        ("ContextTokens,GeneratedTokens", "TIMESTAMP", "azure"),
        ("arrived_at,num_prefill_tokens", "num_decode_tokens", "vidur"),
        ("Timestamp,Model,Request tokens,Total tokens", "Response tokens", "burstgpt"),
        ('{"timestamp": 0, "input_length": 5, "hash_ids": [1]}', "output_length", "mooncake"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 5}', "hash_ids", "mooncake"),
    ],
)
def test_missing_column_says_which_and_what_was_found(refused, header, missing, form):
    error = refused(header + "\n0,1,1\n")
    assert error.message == f"column '{missing}' is missing"
    assert (error.line, error.field) == (1, missing)
    if form != "mooncake":
        assert error.value == ", ".join(header.split(","))
    assert f"format '{form}'" in error.expected


def test_a_column_twice(refused):
    error = refused("TIMESTAMP,ContextTokens,GeneratedTokens,ContextTokens\n")
    assert (error.message, error.line, error.field) == ("two columns have one name", 1, "ContextTokens")


def test_a_format_that_the_file_has_not(refused):
    error = refused(AZURE + f"{GOOD_TIME},1,1\n", format="vidur")
    assert error.message == "this header is not that of the format 'vidur'"
    assert error.expected == "vidur (arrived_at, num_prefill_tokens, num_decode_tokens)"
    error = refused(AZURE + f"{GOOD_TIME},1,1\n", format="mooncake")
    assert error.expected.startswith("mooncake (timestamp")


def test_unknown_format_name():
    with pytest.raises(InputError, match="one of azure, vidur, burstgpt, mooncake") as caught:
        read_trace("azure2023-conv", format="sharegpt")
    assert (caught.value.field, caught.value.value) == ("format", "sharegpt")


# --- the rows of CSV files ----------------------------------------------------------------------------------

BAD_LENGTHS = ["0", "-1", "1.5", "NaN", "nan", "", "inf", "x", "2147483648", "1e19", "9" * 40, "1_000", "True"]


@pytest.mark.parametrize("value", BAD_LENGTHS)
@pytest.mark.parametrize(("field", "column"), [("ContextTokens", 1), ("GeneratedTokens", 2)])
def test_bad_lengths(refused, value, field, column):
    rows = [[GOOD_TIME, "10", "20"] for _ in range(4)]
    rows[2][column] = value
    error = refused(AZURE + "".join(",".join(row) + "\n" for row in rows))
    assert (error.line, error.field, error.value) == (4, field, value)
    assert error.expected.startswith("an integer ")


@pytest.mark.parametrize("value", ["True", "nan", "inf", "1.5", "x", "-4"])
def test_a_whole_column_of_bad_lengths(refused, value):
    error = refused(AZURE + f"{GOOD_TIME},{value},1\n" * 3)
    assert (error.line, error.field, error.value) == (2, "ContextTokens", value)


def test_the_first_bad_line_is_named(refused):
    error = refused(VIDUR + "0,1,1\n1,1,0\n2,0,1\n")
    assert (error.line, error.field) == (3, "num_decode_tokens")
    error = refused(VIDUR + "0,1,1\n1,1,x\n2,y,1\n")
    assert (error.line, error.field) == (3, "num_decode_tokens")


BAD_TIMES = [
    "",
    "now",
    "today",
    "yesterday",
    "NaT",
    "2023",
    "2023-11-16",
    "2023-11-16 18:15",
    "16.11.2023 18:15:46",
    "2023-13-16 18:15:46",
    "2023-02-29 18:15:46",
    "2023-11-16 24:15:46",
    "2023-11-16 18:15:60",
    "2023-11-16 18:15:46 PM",
    "1700158546.68",
    "2400-11-16 18:15:46.1",  # beyond int64 nanoseconds
    "1969-12-31 23:59:59.9",
    " 2023-11-16 18:15:46",
    "2023-11-16 18:15:46.68+01:00x",
    "2023-11-16 18:15:46.68+24:00",
    "2023-11-16 18:15:46.68+01:60",
    "２０２３-11-16 18:15:46",
]


@pytest.mark.parametrize("value", BAD_TIMES)
def test_bad_iso_times(refused, value):
    error = refused(AZURE + f"{GOOD_TIME},1,1\n{value},1,1\n{GOOD_TIME},1,1\n")
    assert (error.line, error.field, error.value) == (3, "TIMESTAMP", value)
    assert "date and time" in error.expected


def test_the_bad_line_of_a_long_file_is_found_in_reasonable_time(refused):
    start = time.perf_counter()
    assert refused(AZURE + f"{GOOD_TIME},1,1\n" * 30_000 + "x,1,1\n").line == 30_002
    assert time.perf_counter() - start < 5.0  # about 0.3 s; one pandas call a line takes 10 s


def test_times_with_and_without_an_offset(refused):
    error = refused(AZURE + "2023-11-16 18:15:46,1,1\n2023-11-16 18:15:47,1,1\n2023-11-16 18:15:48Z,1,1\n")
    assert "with and without an offset" in error.message
    assert (error.line, error.field, error.value) == (4, "TIMESTAMP", "2023-11-16 18:15:48Z")


@pytest.mark.parametrize("value", ["", "nan", "inf", "-inf", "1e300", "1e10", "x", "1:30", "2023-11-16 18:15:46"])
def test_bad_seconds(refused, value):
    error = refused(VIDUR + f"0,1,1\n{value},1,1\n")
    assert (error.line, error.field, error.value) == (3, "arrived_at", value)
    assert "number of seconds" in error.expected


def test_time_that_goes_backwards(refused):
    error = refused(AZURE + f"{GOOD_TIME},1,1\n2023-11-16 18:15:50.5,1,1\n2023-11-16 18:15:50.4999999,1,1\n")
    assert error.message == "time goes backwards"
    assert (error.line, error.field, error.value) == (4, "TIMESTAMP", "2023-11-16 18:15:50.4999999")
    assert "'2023-11-16 18:15:50.5' of line 3" in error.expected
    assert "sort=True" in error.expected


def test_backwards_by_offset_only(refused):
    error = refused(AZURE + "2023-11-16 18:00:00+00:00,1,1\n2023-11-16 18:30:00+01:00,1,1\n")
    assert (error.message, error.line) == ("time goes backwards", 3)


def test_lines_are_right_when_rows_were_left_out(refused):
    error = refused(BURST + "5,A,1,1,2,x\n6,A,0,0,0,x\n4,A,1,1,2,x\n", drop_zero=True)
    assert (error.message, error.line, error.value) == ("time goes backwards", 4, "4")
    assert "'5' of line 2" in error.expected


def test_drop_zero_drops_zeros_only(refused):
    error = refused(BURST + "5,A,1,1,2,x\n6,A,0,-3,0,x\n", drop_zero=True)
    assert (error.line, error.field, error.value) == (3, "Response tokens", "-3")
    assert "every request has a length of 0" in str(refused(BURST + "5,A,1,0,2,x\n", drop_zero=True))


@pytest.mark.parametrize(
    ("body", "line", "message"),
    [
        ("5,A,1,1,2,x\n6,A,1,1,2\n", 3, "5 fields"),
        ("5,A,1,1,2,x\n6,A,1,1,2,x,y\n", 3, "7 fields"),
        ("5,A,1,1,2,x,\n6,A,1,1,2,x,\n", 2, "7 fields"),
        ("5,A,1,1,2\n6,A,1,1,2,x,y\n", 2, "5 fields"),  # as many commas as there should be
        ("5,A,1,1,2,x\n\n6,A,1,1,2,x\n", 3, "blank line"),
        ('5,A,1,1,2,"x\n6,A,1,1,2,x"\n', 2, "quotes that do not close"),
        ('5,"A\nB",1,1,2,x\n', 2, "quotes that do not close"),
        ('5,"A"B,1,1,2,x\n', 2, "quotes that do not close"),
    ],
)
def test_rows_of_the_wrong_shape(refused, body, line, message):
    error = refused(BURST + body)
    assert error.line == line
    assert error.message.startswith(message)


def test_nul_bytes(refused):
    error = refused(VIDUR.encode() + b"0,1,1\n1,1\x00,1\n")
    assert (error.line, error.field, error.value) == (3, "num_prefill_tokens", "1\x00")


# --- the rows of Mooncake files -----------------------------------------------------------------------------


@pytest.mark.parametrize("line", ['{"timestamp": 0, "input_le', "{'timestamp': 0}", "{", mooncake()[:-2], "{" * 5000])
def test_invalid_json(refused, line):
    first = refused(line + "\n" + mooncake())
    assert first.message.startswith("not valid JSON")
    assert first.line == 1
    third = refused(mooncake() * 2 + line + "\n" + mooncake())
    assert third.message.startswith("not valid JSON")
    assert third.line == 3
    assert len(third.value) <= 80


def test_deeply_nested_json(refused):
    assert refused(mooncake() + "[" * 100_000 + "\n").line == 2


@pytest.mark.parametrize("line", ["[1, 2]", "3", '"text"', "null"])
def test_json_that_is_no_object(refused, line):
    error = refused(mooncake() + line + "\n")
    assert (error.line, error.value, error.expected) == (2, line, "one JSON object a line")


def test_blank_line_in_the_middle(refused):
    error = refused(mooncake() + "\n" + mooncake())
    assert (error.message, error.line) == ("blank line", 2)


@pytest.mark.parametrize("key", ["timestamp", "input_length", "output_length", "hash_ids"])
def test_a_key_missing_later(refused, key):
    error = refused(mooncake() + mooncake().replace(key, "other"))
    assert (error.line, error.field, error.message) == (2, key, f"'{key}' is missing")
    assert "other" in error.value


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "12.0", "NaN", "null", "true", '"12"', "2147483648", "1" * 30])
@pytest.mark.parametrize("field", ["input_length", "output_length"])
def test_bad_mooncake_lengths(refused, field, value):
    error = refused(mooncake() + mooncake(**{field: value}))
    assert (error.line, error.field, error.value) == (2, field, value)
    assert error.expected.startswith("an integer from 1")


@pytest.mark.parametrize("value", ["null", "NaN", "Infinity", '"0"', "true", "1e300", "1" + "0" * 400, "[0]"])
def test_bad_mooncake_times(refused, value):
    error = refused(mooncake() + mooncake(timestamp=value))
    assert (error.line, error.field) == (2, "timestamp")
    assert "milliseconds" in error.expected


def test_mooncake_time_that_goes_backwards(refused):
    error = refused(mooncake("30") + mooncake("27"))
    assert (error.message, error.line, error.field, error.value) == ("time goes backwards", 2, "timestamp", "27")


@pytest.mark.parametrize("value", ["[0]", "[0, 1, 2]", "[0, -1]", "[0, 1.0]", "[0, true]", "null", '"0 1"', "[]"])
def test_bad_blocks(refused, value):
    error = refused(mooncake() + mooncake(hash_ids=value))
    assert (error.line, error.field) == (2, "hash_ids")
    assert error.expected == "2 integers >= 0, one a block of 512 of 600 prompt tokens"


def test_zero_lengths_can_be_left_out_of_a_mooncake_file(tmp_path):
    path = tmp_path / "zeros.jsonl"
    path.write_text(mooncake() + mooncake("5", input_length="0", hash_ids="[]") + mooncake("8", output_length="0"))
    trace = read_trace(path, drop_zero=True)
    assert len(trace) == 1
    assert trace.prefix_blocks == ((0, 1),)
