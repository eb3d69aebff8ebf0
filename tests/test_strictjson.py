"""JSON that is refused where `json` alone would take it, or fail in its own words."""

from __future__ import annotations

import pytest

from dsim.errors import InputError
from dsim.strictjson import DEEPEST, RepeatedKeyError, distinct, load_json, need_object, parse_json


def nested(depth: int) -> str:
    """So many lists and objects within each other, in turn."""
    text = "0"
    for i in range(depth):
        text = f"[{text}]" if i % 2 else f'{{"a": {text}}}'
    return text


def test_a_file_may_begin_with_a_byte_order_mark_and_have_any_line_ends(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf{\r\n"a":\r\n1}')
    assert load_json(path, "an object") == {"a": 1}


def test_a_key_is_refused_twice_on_any_level():
    assert distinct([("a", 1), ("b", 2)]) == {"a": 1, "b": 2}
    with pytest.raises(RepeatedKeyError, match="the key 'a' stands there twice") as caught:
        distinct([("a", 1), ("b", 2), ("a", 3)])
    assert caught.value.key == "a"
    with pytest.raises(InputError, match=r"f\.json, line 7: is not JSON \(the key 'x' stands there twice\)"):
        parse_json('{"a": [{"x": 1, "x": 1}]}', "f.json", 7)


def test_depth_is_counted_over_lists_and_objects():
    assert parse_json(nested(DEEPEST), None) is not None
    for depth in (DEEPEST + 1, 900, 100_000):
        with pytest.raises(InputError, match="is nested too deeply"):
            parse_json(nested(depth), None)
    # Empty ones count for nothing: there is nothing to walk into.
    assert parse_json("[" * 65 + "]" * 65, None) is not None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"line 1: is not JSON, or cut off .*expected a table"),
        (b'{"a":\n1', r"line 2: is not JSON, or cut off"),
        (b"\xff\xfe{\x00}\x00", "is not UTF-8 text, expected a table"),
        (b"9" * 5000, r"is not JSON \(Exceeds the limit"),
        (b"{} {}", r"line 1: is not JSON, or cut off \(Extra data\)"),
    ],
)
def test_what_is_no_json(tmp_path, data, message):
    path = tmp_path / "a.json"
    path.write_bytes(data)
    with pytest.raises(InputError, match=message) as caught:
        load_json(path, "a table")
    assert caught.value.file == str(path)


def test_a_folder_or_a_missing_file(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(InputError, match=r"cannot be read \(.*expected a table"):
            load_json(path, "a table")


@pytest.mark.parametrize(("value", "shown"), [(None, "'null'"), ([1], r"\[1\]"), (1.5, "1.5"), ("a", "'a'")])
def test_what_is_no_object(value, shown):
    with pytest.raises(InputError, match=rf"f\.json, line 3: got {shown}, expected a JSON object"):
        need_object(value, "f.json", 3)
