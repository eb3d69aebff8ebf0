"""Drafter files: there and back, and everything that is no good file is refused by name of what is wrong."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsim.drafter import build
from dsim.drafter.build import DrafterFile, build_drafter, config_from, drafter_hash, read_drafter, write_drafter
from dsim.drafter.drafter import DrafterConfig
from dsim.drafter.target import LlamaTarget
from dsim.drafter.tiny import tiny_target
from dsim.errors import InputError

SORTS = ("markov", "gated", "rnn", "dflash", "eagle3", "mtp")


@pytest.fixture
def file(make_noisy: Any, tmp_path: Path) -> Path:
    path = tmp_path / "drafter.safetensors"
    drafter = make_noisy("markov")
    write_drafter(drafter, path, DrafterFile(drafter.config, {"anchors": 7}, (1.5, 1.0, 0.8, 2.0)))
    return path


def contents(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    size = struct.unpack("<Q", path.read_bytes()[:8])[0]
    header = json.loads(json.loads(path.read_bytes()[8 : 8 + size])["__metadata__"]["dsim"])
    del header["sha256"]
    return load_file(path), header


def forge(path: Path, tensors: dict[str, Tensor], header: Any) -> None:
    """A file with a right digest, whatever it holds."""
    build.write_tensors(tensors, path, header)


def refused(path: Path, target: LlamaTarget, *parts: str) -> None:
    with pytest.raises(InputError) as error:
        read_drafter(path, target)
    for part in (str(path), *parts):
        assert part in str(error.value)


# -- there and back ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sort", SORTS)
def test_round_trip(sort: str, make_noisy: Any, tiny: LlamaTarget, tmp_path: Path) -> None:
    drafter = make_noisy(sort)
    about = DrafterFile(drafter.config, {"anchors": 12, "curve": [{"alpha": [0.25]}]}, (1.25,) * 4)
    write_drafter(drafter, tmp_path / "a" / "d.safetensors", about)
    again, found = read_drafter(tmp_path / "a" / "d.safetensors", tiny)
    assert found == about
    assert not again.training
    for name, value in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    assert drafter_hash(again) == drafter_hash(drafter)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["d.safetensors"]


def test_the_same_drafter_is_the_same_bytes(file: Path, make_noisy: Any, tmp_path: Path) -> None:
    drafter = make_noisy("markov")
    about = DrafterFile(drafter.config, {"anchors": 7}, (1.5, 1.0, 0.8, 2.0))
    write_drafter(drafter, tmp_path / "again.safetensors", about)
    assert (tmp_path / "again.safetensors").read_bytes() == file.read_bytes()


def test_half_precision(make_noisy: Any, tiny: LlamaTarget, file: Path, tmp_path: Path) -> None:
    drafter, small = make_noisy("markov"), tmp_path / "small.safetensors"
    write_drafter(drafter, small, DrafterFile(drafter.config), dtype=torch.float16)
    assert small.stat().st_size < 0.6 * file.stat().st_size
    again, _ = read_drafter(small, tiny)
    for name, value in drafter.named_parameters():
        read = again.get_parameter(name)
        assert read.dtype == torch.float32
        assert torch.equal(read, value.half().float())
    assert torch.equal(again.vocabulary_head.tokens, drafter.vocabulary_head.tokens)


def test_a_vocabulary_in_another_order_is_kept(tiny: LlamaTarget, make_noisy: Any, tmp_path: Path) -> None:
    config = make_noisy("dflash").config
    drafter = build_drafter(config, tiny, torch.tensor([11, 3, 4, 9, 8, 2, 0, 1, 5, 6]))
    write_drafter(drafter, tmp_path / "d.safetensors", DrafterFile(config))
    again, _ = read_drafter(tmp_path / "d.safetensors", tiny)
    assert again.vocabulary_head.tokens.tolist() == [11, 3, 4, 9, 8, 2, 0, 1, 5, 6]
    assert torch.equal(again.vocabulary_head._static, tiny.head[again.vocabulary_head.tokens])


def test_the_hash_tells_weights_and_vocabularies_apart(make_noisy: Any, tiny: LlamaTarget) -> None:
    one, two = make_noisy("dflash"), make_noisy("dflash")
    assert drafter_hash(one) == drafter_hash(two)
    with torch.no_grad():
        two.norm.weight[3] += 1e-6
    assert drafter_hash(one) != drafter_hash(two)
    other = build_drafter(one.config, tiny, torch.arange(2, 12))
    other.load_state_dict({**one.state_dict(), "vocabulary_head.tokens": torch.arange(2, 12)})
    assert drafter_hash(one) != drafter_hash(other)


def test_a_broken_write_leaves_the_old_file_and_nothing_else(
    file: Path, make_noisy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = file.read_bytes()

    def full(*args: Any, **options: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("safetensors.torch.save", full)
    drafter = make_noisy("rnn")
    with pytest.raises(OSError, match="no space"):
        write_drafter(drafter, file, DrafterFile(drafter.config))
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]


def test_a_file_has_the_usual_permissions(file: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("")
    assert file.stat().st_mode == plain.stat().st_mode


# -- damaged and foreign files ----------------------------------------------------------------------------


def test_no_file(tiny: LlamaTarget, tmp_path: Path) -> None:
    refused(tmp_path / "absent.safetensors", tiny, "is not there")
    refused(tmp_path, tiny, "is no safetensors file, or a damaged one")


@pytest.mark.parametrize("keep", [0, 4, 100, 2000, -1])
def test_truncated(keep: int, file: Path, tiny: LlamaTarget) -> None:
    file.write_bytes(file.read_bytes()[:keep])
    refused(file, tiny, "is no safetensors file, or a damaged one")


@pytest.mark.parametrize("place", [0.02, 0.3, 0.6, 0.9, 1.0])
def test_one_flipped_byte_anywhere(place: float, file: Path, tiny: LlamaTarget) -> None:
    raw = bytearray(file.read_bytes())
    raw[int(place * (len(raw) - 1))] ^= 1
    file.write_bytes(raw)
    refused(file, tiny)


def test_a_flipped_byte_of_a_weight_says_so(file: Path, tiny: LlamaTarget) -> None:
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    refused(file, tiny, "field 'sha256'", "was changed after it was written")


def test_a_changed_description_is_seen(file: Path, tiny: LlamaTarget) -> None:
    file.write_bytes(file.read_bytes().replace(b'temperature\\": 0.9', b'temperature\\": 0.8'))
    refused(file, tiny, "was changed after it was written")


def test_without_a_digest(file: Path, tiny: LlamaTarget) -> None:
    tensors, header = contents(file)
    save_file(tensors, file, metadata={"dsim": json.dumps(header)})
    refused(file, tiny, "field 'sha256'", "was changed after it was written")


def test_a_pickle_is_never_opened(tiny: LlamaTarget, tmp_path: Path) -> None:
    mark = tmp_path / "executed"

    class Bomb:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            return Path.touch, (mark,)

    for name, write in (
        ("torch.safetensors", lambda path: torch.save({"weight": Bomb()}, path)),
        ("pickle.safetensors", lambda path: path.write_bytes(pickle.dumps(Bomb()))),
    ):
        write(tmp_path / name)
        refused(tmp_path / name, tiny, "is no safetensors file")
    assert not mark.exists()
    # The bomb itself works.
    pickle.loads((tmp_path / "pickle.safetensors").read_bytes())
    assert mark.exists()


@pytest.mark.parametrize(
    ("metadata", "parts"),
    [
        (None, ("field 'metadata'", "has no description", "the key 'dsim' (JSON)")),
        ({"format": "pt"}, ("field 'metadata'", "has no description")),
        ({"dsim": "{not json"}, ("field 'metadata'", "has no description")),
        ({"dsim": "[" * 100_000}, ("field 'metadata'", "has no description")),
        ({"dsim": "[1, 2]"}, ("field 'format'", "got [1, 2]", "expected 'dsim-drafter'")),
        ({"dsim": '{"format": "dsim-training", "version": 1}'}, ("field 'format'", "got 'dsim-training'")),
        ({"dsim": '{"format": "dsim-drafter", "version": 2}'}, ("field 'version'", "got 2, expected 1")),
        ({"dsim": '{"format": "dsim-drafter"}'}, ("field 'version'", "expected 1")),
    ],
)
def test_foreign_files(metadata: dict[str, str] | None, parts: tuple[str, ...], file: Path, tiny: LlamaTarget) -> None:
    save_file({"weight": torch.zeros(2)}, file, metadata=metadata)
    refused(file, tiny, *parts)


# -- right digest, wrong content --------------------------------------------------------------------------

Change = Callable[[dict[str, Tensor], dict[str, Any]], None]


def changed(name: str, value: Any) -> Change:
    def change(tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
        tensors[name] = value(tensors[name]) if callable(value) else value

    return change


def without(name: str) -> Change:
    def change(tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
        del tensors[name]

    return change


def said(path: str, value: Any) -> Change:
    """Set (or with `KeyError` remove) a dotted key of the description."""

    def change(tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
        *above, last = path.split(".")
        place = header
        for key in above:
            place = place[key]
        if value is KeyError:
            del place[last]
        else:
            place[last] = value

    return change


def renamed(tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    tensors["layers.0.q.weights"] = tensors.pop("layers.0.q.weight")


NAN = float("nan")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        # tensors
        (renamed, ("field 'layers.0.q.weight'", "missing tensor")),
        (without("mask"), ("field 'mask'", "missing tensor")),
        (changed("extra", torch.zeros(1)), ("field 'extra'", "unknown tensor")),
        (changed("norm.weight", torch.ones(31)), ("field 'norm.weight'", "got (31,), expected shape (32,)")),
        (changed("norm.weight", lambda t: t * NAN), ("field 'norm.weight'", "holds values that are not finite")),
        (changed("norm.weight", lambda t: t / 0), ("field 'norm.weight'", "holds values that are not finite")),
        (changed("norm.weight", lambda t: t.int()), ("field 'norm.weight'", "torch.int32", "floating-point numbers")),
        (without("vocabulary"), ("field 'vocabulary'", "missing tensor")),
        (changed("vocabulary", lambda t: t.float()), ("field 'vocabulary'", "torch.float32", "int32")),
        (changed("vocabulary", lambda t: t[:-1]), ("field 'vocabulary'", "got (9,), expected shape (10,)")),
        (changed("vocabulary", lambda t: t[:, None]), ("field 'vocabulary'", "got (10, 1), expected shape (10,)")),
        (changed("vocabulary", lambda t: t + 3), ("field 'vocabulary'", "expected distinct tokens below 12")),
        (changed("vocabulary", lambda t: t - 1), ("field 'vocabulary'", "expected distinct tokens below 12")),
        (changed("vocabulary", lambda t: t // 2), ("field 'vocabulary'", "expected distinct tokens below 12")),
        # description
        (said("config", 3), ("field 'config'", "got 3, expected an object")),
        (said("config", KeyError), ("field 'config'", "expected an object")),
        (said("config.gamma", KeyError), ("field 'config.gamma'", "missing key")),
        (said("config.colour", "red"), ("field 'config.colour'", "unknown key")),
        (said("config.gamma", 4.0), ("field 'config.gamma'", "got 4.0, expected an integer")),
        (said("config.gamma", True), ("field 'config.gamma'", "got True, expected an integer")),
        (said("config.gamma", 65), ("field 'gamma'", "got 65, expected 1 to 64")),
        (said("config.kind", ["dspark"]), ("field 'config.kind'", "expected text")),
        (said("config.kind", "dflash"), ("field 'head'", "expected a sequential head for dspark, none otherwise")),
        (said("config.taps", "03"), ("field 'config.taps'", "got '03', expected a list of integers")),
        (said("config.taps", [0.5]), ("field 'config.taps'", "got [0.5], expected a list of integers")),
        (said("config.taps", [7]), ("field 'taps'", "got (7,), expected layers 0 to 3, or -1")),
        (said("config.temperature", "0.9"), ("field 'config.temperature'", "got '0.9', expected a number")),
        (said("config.temperature", NAN), ("field 'temperature'", "got nan, expected a finite number > 0")),
        (said("config.shape", []), ("field 'config.shape'", "got [], expected an object")),
        (said("config.shape.num_heads", KeyError), ("field 'shape.num_heads'", "missing key")),
        (said("config.shape.num_heads", "4"), ("field 'shape.num_heads'", "got '4', expected an integer")),
        (said("config.shape.num_heads", 4.0), ("field 'shape.num_heads'", "got 4.0, expected an integer")),
        (said("config.shape.ffn_size", 0), ("field 'shape.ffn_size'", "got 0, expected a finite number > 0")),
        (said("config.shape.norm_eps", NAN), ("field 'shape.norm_eps'", "got nan, expected a finite number > 0")),
        (said("config.rank", 5), ("field 'confidence.linear.weight'", "got (1, 38), expected shape (1, 37)")),
        (said("config.layers", 2), ("field 'layers.1.down.weight'", "missing tensor")),
        (said("training", []), ("field 'training'", "expected an object")),
        (said("temperatures", None), ("field 'temperatures'", "expected none or 4 numbers > 0")),
        (said("temperatures", [1.0, 1.0]), ("field 'temperatures'", "got [1.0, 1.0], expected none or 4 numbers > 0")),
        (said("temperatures", [1.0, 0.0, 1.0, 1.0]), ("field 'temperatures'", "expected finite numbers > 0")),
        (said("temperatures", [1.0, NAN, 1.0, 1.0]), ("field 'temperatures'", "expected finite numbers > 0")),
        (said("temperatures", [1.0, "1", 1.0, 1.0]), ("field 'temperatures'", "expected finite numbers > 0")),
        # another target
        (said("config.shape.hidden_size", 48), ("field 'hidden_size'", "got 48, expected 32 (tiny-1", "not fit")),
        (said("config.shape.vocab_size", 16), ("field 'vocab_size'", "got 16, expected 12", "does not fit the target")),
        (said("config.fingerprint", "0123"), ("field 'fingerprint'", "got '0123'", "was made for tiny-1")),
    ],
)
def test_refused_by_name(change: Change, parts: tuple[str, ...], file: Path, tiny: LlamaTarget) -> None:
    tensors, header = contents(file)
    change(tensors, header)
    forge(file, tensors, header)
    refused(file, tiny, *parts)


def test_the_forged_files_are_good_without_a_change(file: Path, tiny: LlamaTarget) -> None:
    forge(file, *contents(file))
    assert read_drafter(file, tiny)[1].temperatures == (1.5, 1.0, 0.8, 2.0)


def test_other_targets(file: Path) -> None:
    refused(file, tiny_target(seed=2, vocab_size=12, num_layers=3, sharpness=3.0), "was made for tiny-1", "tiny-2")
    refused(file, tiny_target(seed=1, vocab_size=12, num_layers=3, hidden_size=64), "field 'hidden_size'", "got 32")


def test_a_drafter_is_not_built_for_another_target_or_vocabulary(make_noisy: Any, tiny: LlamaTarget) -> None:
    config: DrafterConfig = make_noisy("dflash").config
    with pytest.raises(InputError, match="field 'vocab_size': got 9, expected 10 tokens"):
        build_drafter(config, tiny, torch.arange(9))
    other = tiny_target(seed=1, vocab_size=12, num_layers=2)
    with pytest.raises(InputError, match="drafter, field 'num_layers': does not fit the target, got 3, expected 2"):
        build_drafter(config, other, torch.arange(10))


def test_a_description_comes_back_from_its_json_form(make_noisy: Any) -> None:
    from dataclasses import asdict

    config = make_noisy("rnn").config
    assert config_from(json.loads(json.dumps(asdict(config))), "here") == config
