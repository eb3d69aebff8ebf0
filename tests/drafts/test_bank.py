from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

import dsim.drafts.bank as banks
from dsim.drafts import (
    BankHeader,
    load_bank,
    make_bank,
    preset_spec,
    read_bank,
    recalibrated,
    shipped_banks,
    synthetic_bank,
    write_bank,
)
from dsim.errors import InputError

HEADER = BankHeader(
    gamma=3,
    kind="recorded",
    drafter="tiny",
    target="tiny-target",
    source="test",
    license="Apache-2.0",
    domains=("code", "chat"),
    logit_low=-10.0,
    logit_high=10.0,
    temperatures=(1.0, 1.0, 1.0),
)


def small_bank(**changes):
    rng = np.random.default_rng(0)
    arrays = {
        "confidence_logit": rng.normal(0, 2, (40, 3)),
        "alpha": rng.random((40, 3)),
        "accepted": rng.integers(0, 4, 40),
        "bounds": np.array([0, 10, 25, 40]),
        "domain": np.array([0, 1, 1]),
    }
    header = changes.pop("header", HEADER)
    return make_bank(header, **(arrays | changes))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DSIM_CACHE_DIR", str(tmp_path / "cache"))


def test_round_trip_is_exact_and_memory_mapped(tmp_path):
    bank = small_bank()
    write_bank(bank, tmp_path / "b.npz")
    back = read_bank(tmp_path / "b.npz")
    assert back.header == bank.header
    for name in ("confidence", "confidence_bytes", "alpha_bytes", "accepted", "bounds", "domain"):
        np.testing.assert_array_equal(getattr(back, name), getattr(bank, name))
    assert isinstance(back.confidence.base, np.memmap)
    assert not back.confidence.flags.writeable
    assert [p.name for p in tmp_path.glob("*.tmp")] == []


def test_a_second_read_comes_from_the_cache(tmp_path):
    write_bank(small_bank(), tmp_path / "b.npz")
    read_bank(tmp_path / "b.npz")
    unpacked = list((tmp_path / "cache" / "banks-4").iterdir())
    assert len(unpacked) == 1
    stamp = (unpacked[0] / "confidence.npy").stat().st_mtime_ns
    read_bank(tmp_path / "b.npz")
    assert (unpacked[0] / "confidence.npy").stat().st_mtime_ns == stamp


def test_a_damaged_cache_entry_is_made_again(tmp_path):
    bank = small_bank()
    write_bank(bank, tmp_path / "b.npz")
    read_bank(tmp_path / "b.npz")
    (folder,) = (tmp_path / "cache" / "banks-4").iterdir()
    for damage in (b"", b"\x93NUMPY", (folder / "accepted.npy").read_bytes()[:-8]):
        (folder / "accepted.npy").write_bytes(damage)
        np.testing.assert_array_equal(read_bank(tmp_path / "b.npz").accepted, bank.accepted)
    (folder / "header.json").write_text("{")
    np.testing.assert_array_equal(read_bank(tmp_path / "b.npz").accepted, bank.accepted)


@pytest.mark.parametrize("name", ["confidence", "confidence_bytes", "alpha_bytes", "accepted", "bounds", "domain"])
@pytest.mark.parametrize("at", [10, -1], ids=["in NumPy's header", "in the data"])
def test_one_flipped_bit_in_the_cache_is_noticed(tmp_path, name, at):
    bank = small_bank()
    write_bank(bank, tmp_path / "b.npz")
    read_bank(tmp_path / "b.npz")
    (folder,) = (tmp_path / "cache" / "banks-4").iterdir()
    file = folder / f"{name}.npy"
    good = file.read_bytes()
    damaged = bytearray(good)
    damaged[at] ^= 1
    file.write_bytes(damaged)
    np.testing.assert_array_equal(getattr(read_bank(tmp_path / "b.npz"), name), getattr(bank, name))
    assert file.read_bytes() == good
    for other, text in (("header.json", "drafter"), ("checksums.json", "accepted")):
        file = folder / other
        file.write_text(file.read_text().replace(text, text.upper(), 1))
        assert read_bank(tmp_path / "b.npz").header == HEADER
        assert text in file.read_text()


def test_a_synthetic_bank_whose_copy_is_damaged_is_generated_again(tmp_path):
    """In the ranges that are allowed: nothing but a checksum can tell."""
    spec = replace(preset_spec("dsv4", "dspark"), trajectories=2, length=64, strict=False)
    good = np.array(synthetic_bank(spec).accepted)
    (file,) = (tmp_path / "cache" / "banks-4").glob("synthetic-*/accepted.npy")
    data = bytearray(file.read_bytes())
    data[128:] = bytes(len(data) - 128)
    file.write_bytes(data)
    np.testing.assert_array_equal(synthetic_bank(spec).accepted, good)
    assert good.any()


def test_a_copy_that_stays_damaged_is_not_used(tmp_path, monkeypatch):
    bank = small_bank()
    write_bank(bank, tmp_path / "b.npz")
    read_bank(tmp_path / "b.npz")
    (folder,) = (tmp_path / "cache" / "banks-4").iterdir()
    (folder / "accepted.npy").write_bytes(b"")
    monkeypatch.setattr("dsim.drafts.bank.shutil.rmtree", lambda *_, **__: None)  # somebody else's folder
    np.testing.assert_array_equal(read_bank(tmp_path / "b.npz").accepted, bank.accepted)


def test_what_is_unpacked_is_what_was_hashed(tmp_path, monkeypatch):
    path = tmp_path / "b.npz"
    other = small_bank(accepted=np.zeros(40, dtype=int))
    write_bank(small_bank(), path)
    real = banks.cached_bank
    monkeypatch.setattr(banks, "cached_bank", lambda key, build: write_bank(other, path) or real(key, build))
    np.testing.assert_array_equal(read_bank(path).accepted, small_bank().accepted)
    monkeypatch.undo()
    monkeypatch.setenv("DSIM_CACHE_DIR", str(tmp_path / "cache"))
    np.testing.assert_array_equal(read_bank(path).accepted, other.accepted)


def test_an_unwritable_cache_is_no_obstacle(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSIM_CACHE_DIR", str(tmp_path / "file"))
    write_bank(small_bank(), tmp_path / "b.npz")
    assert read_bank(tmp_path / "b.npz").accepted.shape == (40,)


def test_quantization_is_within_half_a_unit():
    rng = np.random.default_rng(1)
    logit, alpha = rng.uniform(-9, 9, (40, 3)), rng.random((40, 3))
    bank = small_bank(confidence_logit=logit, alpha=alpha)
    assert np.max(np.abs(bank.alpha - alpha)) <= 0.5 / 255 + 1e-6
    restored = np.log(bank.confidence / (1 - bank.confidence.astype(np.float64)))
    assert np.max(np.abs(restored - logit)) <= 0.5 * 20 / 255 + 1e-3


def test_recalibration_divides_the_logits_by_position():
    bank = small_bank(confidence_logit=np.full((40, 3), 2.0))
    cooled = recalibrated(bank, (1.0, 2.0, 4.0))
    stored = -10 + float(bank.confidence_bytes[0, 0]) * 20 / 255
    np.testing.assert_allclose(cooled.confidence[0], 1 / (1 + np.exp(-stored / np.array([1, 2, 4]))), rtol=1e-6)
    with pytest.raises(InputError, match="3 finite numbers > 0"):
        recalibrated(bank, (1.0, 0.0, 1.0))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"accepted": np.full(40, 4)}, "accepted"),
        ({"accepted": np.full(40, 256)}, "accepted"),
        ({"accepted": np.full(40, -1)}, "accepted"),
        ({"alpha": np.full((40, 3), np.nan)}, "alpha"),
        ({"alpha": np.full((40, 3), 1.5)}, "alpha"),
        ({"confidence_logit": np.full((40, 3), np.inf)}, "confidence_logit"),
        ({"header": replace(HEADER, logit_low="low")}, "logit_low"),
        ({"header": replace(HEADER, temperatures=("1", 1.0, 1.0))}, "temperatures"),
        ({"bounds": np.array([0, 10, 25, 39])}, "bounds"),
        ({"bounds": np.array([0, 36, 40]), "domain": np.array([0, 1])}, "bounds"),
        ({"domain": np.array([0, 1, 2])}, "domain"),
        ({"domain": np.array([0, 0, 0])}, "domain"),
        ({"alpha": np.zeros((40, 2))}, "alpha_bytes"),
        ({"header": replace(HEADER, kind="guessed")}, "kind"),
        ({"header": replace(HEADER, temperatures=(1.0, 1.0))}, "temperatures"),
        ({"header": replace(HEADER, domains=("code", "code"))}, "domains"),
    ],
)
def test_arrays_out_of_shape_or_range_are_named(changes, field):
    with pytest.raises(InputError) as caught:
        small_bank(**changes)
    assert caught.value.field == field


def _rewrite(path, **members):
    with np.load(path) as archive:
        content = {name: archive[name] for name in archive.files}
    content |= members
    np.savez_compressed(path, **{name: value for name, value in content.items() if value is not None})


def _header(path, **changes):
    with np.load(path) as archive:
        header = json.loads(archive["header"].tobytes())
    header |= changes
    text = json.dumps({k: v for k, v in header.items() if v is not None})
    _rewrite(path, header=np.frombuffer(text.encode(), dtype=np.uint8))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:200]), "is not a readable bank"),
        (lambda p: p.write_bytes(b"not a bank"), "is not a readable bank"),
        (lambda p: _rewrite(p, alpha=None), "field 'alpha': missing array"),
        (lambda p: _rewrite(p, accepted=np.zeros(40)), "field 'accepted': got 'float64', expected uint8"),
        (lambda p: _rewrite(p, sha256=np.zeros(32)), "field 'sha256': got 'float64', expected uint8"),
        (lambda p: _header(p, version=2), "field 'version': got 2, expected 1"),
        (lambda p: _header(p, format="other"), "field 'format': got 'other'"),
        (lambda p: _header(p, surprise=1), "field 'surprise': unknown key"),
        (lambda p: _header(p, gamma=None), "field 'gamma': missing key"),
        (lambda p: _rewrite(p, header=np.frombuffer(b"{", dtype=np.uint8)), "field 'header': is not JSON"),
        (lambda p: _rewrite(p, alpha=np.array([object()], dtype=object)), "is not a readable bank"),
    ],
)
def test_damaged_files_raise_one_clear_error(tmp_path, damage, message):
    path = tmp_path / "b.npz"
    write_bank(small_bank(), path)
    damage(path)
    with pytest.raises(InputError, match=message) as caught:
        read_bank(path)
    assert caught.value.file == str(path)


CHANGED = r"field 'sha256': does not match its digest: it was changed after it was written$"


def _changed(path, name, at):
    """One byte of an array is another one, still in range."""
    with np.load(path) as archive:
        values = archive[name].copy()
    values[at] = values[at] - 1 if values[at] else 1
    _rewrite(path, **{name: values})


def _notes(path, **changes):
    with np.load(path) as archive:
        notes = json.loads(json.loads(archive["header"].tobytes())["notes"])
    _header(path, notes=json.dumps(notes | changes, sort_keys=True))


@pytest.mark.parametrize(
    "forge",
    [
        lambda p: _changed(p, "alpha", (39, 2)),
        lambda p: _changed(p, "accepted", 7),
        lambda p: _changed(p, "confidence", (0, 0)),
        lambda p: _rewrite(p, bounds=np.array([0, 11, 25, 40])),
        lambda p: _rewrite(p, domain=np.array([1, 0, 1], dtype=np.uint8)),
        lambda p: _notes(p, drafter_hash="ffff"),
        lambda p: _header(p, drafter="a better one"),
        lambda p: _header(p, kind="synthetic"),  # what else may go without a digest
        lambda p: _rewrite(p, sha256=np.zeros(32, dtype=np.uint8)),
        lambda p: _rewrite(p, sha256=np.zeros(0, dtype=np.uint8)),
    ],
    ids=["alpha", "accepted", "confidence", "bounds", "domain", "notes", "drafter", "kind", "digest", "no bytes"],
)
def test_a_bank_that_was_changed_after_it_was_written_is_refused(tmp_path, forge):
    path = tmp_path / "b.npz"
    write_bank(small_bank(header=replace(HEADER, notes=json.dumps({"drafter_hash": "c6cb"}))), path)
    read_bank(path)  # what is in the cache is the other file's
    forge(path)
    for _ in range(2):
        with pytest.raises(InputError, match=CHANGED) as caught:
            read_bank(path)
        assert caught.value.file == str(path)
    assert len(list((tmp_path / "cache" / f"banks-{banks.LAYOUT}").iterdir())) == 1


def test_a_file_packed_anew_with_the_same_content_is_the_same_bank(tmp_path):
    path = tmp_path / "b.npz"
    write_bank(small_bank(), path)
    with np.load(path) as archive:
        members = {name: archive[name] for name in reversed(archive.files)}
    np.savez(path, **members | {"alpha": np.asfortranarray(members["alpha"])})
    np.testing.assert_array_equal(read_bank(path).alpha_bytes, small_bank().alpha_bytes)


def test_the_digest_is_the_documented_one(tmp_path):
    """Worked out without `_digest`, so that it cannot change unnoticed: files have it."""
    path = tmp_path / "b.npz"
    write_bank(small_bank(), path)
    with np.load(path) as archive:
        assert archive.files == ["header", "confidence", "alpha", "accepted", "bounds", "domain", "sha256"]
        members = {name: archive[name] for name in archive.files}
    text = members["header"].tobytes()
    parts = [
        b"\nheader uint8 (%d,)\n" % len(text) + text,
        b"\nconfidence uint8 (40, 3)\n" + members["confidence"].tobytes(),
        b"\nalpha uint8 (40, 3)\n" + members["alpha"].tobytes(),
        b"\naccepted uint8 (40,)\n" + members["accepted"].tobytes(),
        b"\nbounds int64 (4,)\n" + members["bounds"].tobytes(),
        b"\ndomain uint8 (3,)\n" + members["domain"].tobytes(),
    ]
    assert (members["sha256"].dtype, members["sha256"].shape) == (np.uint8, (32,))
    assert members["sha256"].tobytes() == hashlib.sha256(b"".join(parts)).digest()


def test_a_recorded_bank_needs_a_digest(tmp_path):
    path = tmp_path / "b.npz"
    write_bank(small_bank(), path)
    _rewrite(path, sha256=None)
    expected = r"field 'sha256': is a recorded bank without a digest: record it again, or write it again \(make_bank,"
    with pytest.raises(InputError, match=expected) as caught:
        read_bank(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["synthetic", "visited"])
def test_other_banks_may_go_without_a_digest(tmp_path, kind):
    """Files that were written without dsim, to the table in docs/drafts.md."""
    bank = small_bank(header=replace(HEADER, kind=kind))
    path = tmp_path / "b.npz"
    write_bank(bank, path)
    _rewrite(path, sha256=None)
    back = read_bank(path)
    assert back.header == bank.header
    np.testing.assert_array_equal(back.accepted, bank.accepted)


def test_a_copy_that_an_older_dsim_unpacked_is_not_used(tmp_path):
    """It unpacked without looking at a digest."""
    path = tmp_path / "b.npz"
    write_bank(small_bank(header=replace(HEADER, kind="synthetic")), path)
    _rewrite(path, sha256=None)
    read_bank(path)
    (folder,) = (tmp_path / "cache" / f"banks-{banks.LAYOUT}").iterdir()
    _header(path, kind="recorded")
    shutil.copytree(folder, tmp_path / "cache" / "banks-3" / hashlib.sha256(path.read_bytes()).hexdigest())
    with pytest.raises(InputError, match="is a recorded bank without a digest"):
        read_bank(path)


def test_a_missing_bank_is_named(tmp_path):
    with pytest.raises(InputError, match="bank not found"):
        read_bank(tmp_path / "none.npz")


def test_a_bare_name_is_a_shipped_bank_and_a_path_ends_in_npz(tmp_path, monkeypatch):
    monkeypatch.setattr("dsim.drafts.bank._shipped_folder", lambda: tmp_path / "banks")
    assert shipped_banks() == ()
    with pytest.raises(InputError, match=r"unknown bank, got 'tiny', expected one of \(none is shipped\), or the path"):
        load_bank("tiny")
    (tmp_path / "banks").mkdir()
    for name in ("tiny", "small"):
        write_bank(small_bank(), tmp_path / "banks" / f"{name}.npz")
    (tmp_path / "banks" / "PROVENANCE.md").write_text("")
    assert shipped_banks() == ("small", "tiny")
    np.testing.assert_array_equal(load_bank("tiny").accepted, small_bank().accepted)
    with pytest.raises(InputError, match=r"unknown bank, got 'big', expected one of small, tiny, or the path"):
        load_bank("big")
    monkeypatch.chdir(tmp_path)
    write_bank(small_bank(), tmp_path / "mine.npz")
    for path in ("mine.npz", tmp_path / "mine.npz", "./mine.npz"):
        assert load_bank(path).header == HEADER
    with pytest.raises(InputError, match="bank not found"):
        load_bank("tiny.npz")


def test_banks_are_told_apart_by_identity():
    one, two = small_bank(), small_bank()
    assert one != two
    assert len({one, two, one}) == 2
