"""Files written whole or not at all."""

import hashlib
import os

import pytest

from dsim.files import file_digest, replacing


def test_the_file_is_replaced_when_the_block_ends(tmp_path):
    target, plain = tmp_path / "a.json", tmp_path / "plain"
    target.write_text("old")
    plain.write_text("")
    with replacing(target) as part:
        part.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert target.stat().st_mode == plain.stat().st_mode
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "plain"]


def test_nothing_stays_of_a_block_that_raises(tmp_path):
    target = tmp_path / "a.json"
    target.write_text("old")

    def breaks_off():
        with replacing(target) as part:
            part.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        breaks_off()
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_digest_is_that_of_the_content_now(tmp_path):
    path = tmp_path / "a"
    path.write_text("abc")
    assert file_digest(path) == hashlib.sha256(b"abc").hexdigest()
    path.write_text("abd")
    os.utime(path, ns=(5, 5))
    assert file_digest(str(path)) == hashlib.sha256(b"abd").hexdigest()
    with pytest.raises(FileNotFoundError):
        file_digest(tmp_path / "b")
