"""Files written whole or not at all."""

import pytest

from dsim.files import replacing


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
