"""Models of transformers as targets: the same numbers as this project's Llama, and what cannot work is refused."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from dsim.drafter import hf
from dsim.drafter.llama import Llama, LlamaConfig, LlamaLayer
from dsim.errors import InputError

transformers: Any = pytest.importorskip("transformers")

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=48,
    rope_base=5000.0,
    norm_eps=1e-4,
)
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())[:58]
WORDS = ["<end>", "<begin>", *LETTERS]
TEMPLATE = (
    "{% for m in messages %}<begin>{{ m['role'][0] }}:{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<begin>a:{% endif %}"
)
LENGTH = 10
Make = Callable[..., Path]


def small(kind: str, **changes: Any) -> Any:
    """A random model of the library; weights large enough that logits are not flat."""
    common = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 40,
        "rms_norm_eps": 1e-4,
        "initializer_range": 0.25,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 0,
    }
    if kind == "GPT2":
        common = {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 40}
        common |= {"initializer_range": 0.25, "bos_token_id": 1, "eos_token_id": 0}
    config = getattr(transformers, f"{kind}Config")(**{**common, **changes})
    # transformers draws the weights from torch's global generator.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config)
    return model.eval()


def tokenizer(template: str | None = TEMPLATE, words: list[str] = WORDS) -> Any:
    found = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=found, eos_token="<end>", bos_token="<begin>")
    fast.chat_template = template
    return fast


def save(folder: Path, model: Any, words: Any = None) -> Path:
    model.save_pretrained(folder)
    (tokenizer() if words is None else words).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def source() -> Any:
    return small("Llama", rope_theta=5000.0)


@pytest.fixture(scope="module")
def folder(source: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("hf") / "tiny-llama", source)


@pytest.fixture(scope="module")
def target(folder: Path) -> hf.HfTarget:
    return hf.load(folder)


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> hf.HfTarget:
    return hf.load(save(tmp_path_factory.mktemp("hf") / "tiny-gpt", small("GPT2")))


@pytest.fixture(params=["target", "gpt"])
def either(request: pytest.FixtureRequest) -> hf.HfTarget:
    found: hf.HfTarget = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def llama(target: hf.HfTarget) -> Llama:
    """This project's Llama with the weights of the target."""
    model = Llama(CONFIG)
    for index, layer in enumerate(model.layers):
        layer.load_state_dict(target.layer_weights(index))
    model.embedding.data = target.embedding.detach()
    model.norm.weight.data = target.model.model.norm.weight.detach()
    model.head = torch.nn.Parameter(target.head.detach(), requires_grad=False)
    return model.requires_grad_(False).eval()


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(64, (3, LENGTH), generator=torch.Generator().manual_seed(1))


def zeros(rows: int) -> Tensor:
    return torch.zeros(rows, dtype=torch.int64)


def one_pass(model: Any, tokens: Tensor, taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = model.extend(tokens, model.new_cache(*tokens.shape), zeros(len(tokens)), taps)
    return found


def close(ours: Tensor, theirs: Tensor, limit: float = 1e-4) -> bool:
    return ours.shape == theirs.shape and bool((ours - theirs).abs().max() < limit)


def test_attributes(target: hf.HfTarget, source: Any) -> None:
    assert target.name == "tiny-llama"
    assert target.shape == CONFIG
    assert (target.vocab_size, target.hidden_size, target.num_layers) == (64, 32, 3)
    assert target.eos == {0}
    assert target.license == "unknown"
    assert target.device == torch.device("cpu")
    assert torch.equal(target.embedding, source.model.embed_tokens.weight)
    assert torch.equal(target.head, source.lm_head.weight)
    assert not any(parameter.requires_grad for parameter in target.model.parameters())


def test_logits_are_those_of_the_model_itself(either: hf.HfTarget, tokens: Tensor) -> None:
    logits = either.logits(one_pass(either, tokens)[1])
    with torch.inference_mode():
        expected = either.model(tokens).logits
    assert logits.dtype == torch.float32
    assert logits.std() > 0.2
    assert close(logits, expected)


def test_same_numbers_as_our_llama(target: hf.HfTarget, llama: Llama, tokens: Tensor) -> None:
    ours, theirs = one_pass(llama, tokens, (3, 0, 1, 2)), one_pass(target, tokens, (3, 0, 1, 2))
    assert close(ours[0], theirs[0])
    assert close(ours[1], theirs[1])
    assert close(llama.logits(ours[1]), target.logits(theirs[1]))


def test_taps(either: hf.HfTarget, tokens: Tensor) -> None:
    features, hidden = one_pass(either, tokens, (0, 2, 3))
    with torch.inference_mode():
        expected = either.model(tokens, output_hidden_states=True).hidden_states
    assert close(features[:, :, 0], expected[0])
    assert close(features[:, :, 1], expected[2])
    # What the library calls the last hidden state is after the norm.
    assert close(hidden, expected[3])
    norm = either.model.model.norm if hasattr(either.model, "model") else either.model.transformer.ln_f
    assert close(norm(features[:, :, 2]), hidden)
    assert not close(features[:, :, 2], hidden, 0.1)
    assert one_pass(either, tokens)[0].shape == (3, LENGTH, 0, 32)


def test_hooks_do_not_stay(target: hf.HfTarget, tokens: Tensor) -> None:
    def hooks() -> list[int]:
        # The library has hooks of its own.
        return [len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in target.model.model.layers]

    before = hooks()
    one_pass(target, tokens, (0, 1, 3))
    with pytest.raises(IndexError):
        target.extend(tokens[:, :1] + 64, target.new_cache(3, 1), zeros(3), (0, 1, 3))
    assert hooks() == before


@pytest.mark.parametrize("steps", [(1,) * LENGTH, (4, 1, 5)])
def test_token_by_token_is_the_same_as_at_once(either: hf.HfTarget, tokens: Tensor, steps: tuple[int, ...]) -> None:
    cache = either.new_cache(3, LENGTH + 5)
    parts, at = [], 0
    for step in steps:
        parts.append(either.extend(tokens[:, at : at + step], cache, zeros(3) + at, (1, 3)))
        at += step
    features, hidden = one_pass(either, tokens, (1, 3))
    assert close(torch.cat([part[0] for part in parts], dim=1), features)
    assert close(torch.cat([part[1] for part in parts], dim=1), hidden)


def test_rows_go_on_at_places_of_their_own_and_overwrite_what_stood_there(either: hf.HfTarget, tokens: Tensor) -> None:
    cache = either.new_cache(3, LENGTH)
    either.extend((tokens + 17) % 64, cache, zeros(3))
    start = torch.tensor([2, 6, 4])
    for row, first in enumerate(start.tolist()):
        either.extend(tokens[row : row + 1, :first], cache.rows(row, row + 1), zeros(1))
    new = torch.stack([tokens[row, first : first + 4] for row, first in enumerate(start.tolist())])
    features, hidden = either.extend(new, cache, start, (2,))
    expected = one_pass(either, tokens, (2,))
    for row, first in enumerate(start.tolist()):
        assert close(hidden[row], expected[1][row, first : first + 4])
        assert close(features[row], expected[0][row, first : first + 4])


def test_a_copied_row_goes_on_like_the_first(either: hf.HfTarget, tokens: Tensor) -> None:
    cache = either.new_cache(3, LENGTH)
    either.extend(tokens[2:], cache.rows(2, 3), zeros(1))
    cache.copy_row(2, 0, 7)
    _, hidden = either.extend(tokens[2:, 7:], cache.rows(0, 1), zeros(1) + 7)
    assert close(hidden, one_pass(either, tokens[2:])[1][:, 7:])


def test_branches_from_different_depths_are_chains_and_leave_the_cache(either: hf.HfTarget, tokens: Tensor) -> None:
    cache = either.new_cache(1, LENGTH)
    either.extend(tokens[:1], cache, zeros(1))
    kept = cache.k.clone(), cache.v.clone()
    chains = {3: tokens[1, :4], 7: tokens[2, :3]}
    nodes = [(prefix, depth) for prefix, chain in chains.items() for depth in range(len(chain))]
    tree = torch.tensor([[a[0] == b[0] and b[1] <= a[1] for b in nodes] for a in nodes])
    prefix = torch.tensor([node[0] for node in nodes])
    positions = prefix + torch.tensor([node[1] for node in nodes])
    hidden = either.branch(torch.cat([*chains.values()]), positions, prefix, tree, cache)
    assert torch.equal(cache.k, kept[0])
    assert torch.equal(cache.v, kept[1])
    for first, part in ((3, hidden[:4]), (7, hidden[4:])):
        alone = torch.cat([tokens[0, :first], chains[first]])[None]
        assert close(part, one_pass(either, alone)[1][0, first:])


def test_same_branch_as_our_llama(target: hf.HfTarget, llama: Llama, tokens: Tensor) -> None:
    tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]], dtype=torch.bool)
    positions, prefix = torch.tensor([5, 6, 6, 8]), torch.tensor([5, 5, 5, 8])
    found = []
    for model in (target, llama):
        cache = model.new_cache(1, LENGTH)
        model.extend(tokens[:1], cache, zeros(1), ())
        found.append(model.branch(tokens[1, :4], positions, prefix, tree, cache))
    assert close(*found)


def test_layer_weights_fit_the_drafters_layers(target: hf.HfTarget) -> None:
    layer = LlamaLayer(target.shape)
    for index in range(3):
        layer.load_state_dict(target.layer_weights(index))
        assert torch.equal(layer.down.weight, target.model.model.layers[index].mlp.down_proj.weight)


def test_gpt_2(gpt: hf.HfTarget) -> None:
    assert gpt.layer_weights(0) is None
    assert gpt.head is gpt.embedding
    shape = gpt.shape
    assert (shape.num_heads, shape.num_kv_heads, shape.ffn_size, shape.norm_eps) == (4, 4, 128, 1e-5)


@pytest.mark.parametrize("kind", ["Qwen2", "Gemma"])
def test_layers_that_differ_from_llama_have_no_weights(kind: str, tmp_path: Path) -> None:
    # Qwen2 has biases; Gemma has the same names, and norms that multiply with 1 + weight.
    changes = {"head_dim": 8, "tie_word_embeddings": True, "hidden_act": "silu"} if kind == "Gemma" else {}
    found = hf.load(save(tmp_path / kind, small(kind, **changes)))
    assert found.model.config.hidden_act == "silu"
    assert found.layer_weights(0) is None


def test_layers_with_another_activation_have_no_weights(tmp_path: Path) -> None:
    found = hf.load(save(tmp_path / "m", small("Llama", hidden_act="gelu")))
    assert found.layer_weights(0) is None


def test_dtype(folder: Path, target: hf.HfTarget, tokens: Tensor) -> None:
    half = hf.load(folder, dtype=torch.bfloat16)
    features, hidden = one_pass(half, tokens, (1,))
    assert half.head.dtype == features.dtype == hidden.dtype == torch.bfloat16
    assert half.logits(hidden).dtype == torch.float32
    error = half.logits(hidden) - target.logits(one_pass(target, tokens)[1])
    assert error.abs().mean() < 0.05
    assert half.fingerprint == target.fingerprint


def test_dtype_must_be_a_float(folder: Path) -> None:
    with pytest.raises(InputError, match=r"field 'dtype': got 'torch\.int8', expected torch\.float64, "):
        hf.load(folder, dtype=torch.int8)


# Provenance.


def test_fingerprint_is_of_the_weights_and_the_vocabulary(folder: Path, target: hf.HfTarget, tmp_path: Path) -> None:
    assert len(target.fingerprint) == 16
    moved = shutil.copytree(folder, tmp_path / "elsewhere")
    assert hf.load(moved).fingerprint == target.fingerprint
    model = small("Llama", rope_theta=5000.0)
    sharded = tmp_path / "sharded"
    model.save_pretrained(sharded, max_shard_size="20KB")
    tokenizer().save_pretrained(sharded)
    assert (sharded / "model.safetensors.index.json").is_file()
    assert hf.load(sharded).fingerprint == target.fingerprint
    other = small("Llama", rope_theta=5000.0)
    other.model.layers[1].mlp.up_proj.weight.data[3, 4] += 1e-3
    words = [WORDS[0], WORDS[1], *reversed(LETTERS)]
    changed = [
        save(tmp_path / "weights", other),
        save(tmp_path / "words", model, tokenizer(words=words)),
        save(tmp_path / "config", small("Llama", rope_theta=6000.0)),
    ]
    assert len({target.fingerprint, *(hf.load(path).fingerprint for path in changed)}) == 4


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        ("---\nlanguage: en\nlicense: apache-2.0\n---\n# Model\n", "apache-2.0"),
        ("---\nlicense: 'mit' # as it says\n---\n", "mit"),
        ("# Model\n\nlicense: mit\n", "unknown"),
    ],
)
def test_license_from_the_model_card(card: str, expected: str, folder: Path, tmp_path: Path) -> None:
    path = shutil.copytree(folder, tmp_path / "m")
    (path / "README.md").write_text(card)
    assert hf.load(path).license == expected


def test_license_from_the_config(folder: Path, tmp_path: Path) -> None:
    path = shutil.copytree(folder, tmp_path / "m")
    edit(path / "config.json", license="bsd-3-clause")
    assert hf.load(path).license == "bsd-3-clause"


def test_ends_of_an_answer(folder: Path, tmp_path: Path) -> None:
    path = shutil.copytree(folder, tmp_path / "m")
    edit(path / "generation_config.json", eos_token_id=[0, 7, 9999])
    assert hf.load(path).eos == {0, 7}


# The tokenizer.


def test_text_and_back(target: hf.HfTarget) -> None:
    tokens = target.tokenizer.encode("1+1=2;3")
    assert tokens == [WORDS.index(letter) for letter in "1+1=2;3"]
    assert target.tokenizer.decode([1, *tokens, 0]) == "1+1=2;3"


def test_chat_template(target: hf.HfTarget) -> None:
    tokens = target.tokenizer.chat("1+1")
    # "u:", "a:" and what else is not in the small vocabulary is left out.
    assert tokens == [1, *target.tokenizer.encode(":1+1"), 0, 1, *target.tokenizer.encode(":")]


def test_plain_text_without_a_template(tmp_path: Path, source: Any) -> None:
    words = tokenizer(template=None)
    assert hf.HfTokenizer(words, "x").chat("1+1") == [WORDS.index(letter) for letter in "1+1"]


def test_plain_text_begins_as_the_tokenizer_says() -> None:
    class Beginning:
        chat_template = None
        bos_token_id = 1

        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            return {"input_ids": [1, 5, 6, 0] if add_special_tokens else [5, 6]}

    assert hf.HfTokenizer(Beginning(), "x").chat("ab") == [1, 5, 6]


def test_a_template_that_refuses() -> None:
    words = tokenizer(template="{{ raise_exception('a system turn is needed') }}")
    with pytest.raises(InputError, match="m: the chat template cannot be used: a system turn is needed"):
        hf.HfTokenizer(words, "m").chat("1")


# What is refused.


def edit(path: Path, **keys: Any) -> None:
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in {**raw, **keys}.items() if value is not ...}))


def test_without_the_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"need the library transformers .*: pip install 'dspark-sim\[hf\]'"):
        hf.load(folder)


@pytest.mark.parametrize("place", ["/no/such/model", "./model", "a/b/c", "~/model"])
def test_missing_path(place: str) -> None:
    with pytest.raises(InputError, match="is not there, expected a folder with a model, or a name like owner/model"):
        hf.load(place)


def test_a_path_is_never_a_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not there"):
        hf.load(Path("owner/model"))


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no model, expected a folder with config\.json"):
        hf.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: (path / "config.json").write_text("{"), "the config cannot be used"),
        (lambda path: edit(path / "config.json", model_type="no-such"), "the config cannot be used"),
        (lambda path: (path / "model.safetensors").unlink(), "the model cannot be used"),
        (
            lambda path: (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-50]),
            "the model cannot be used",
        ),
        (
            lambda path: [(path / name).unlink() for name in ("tokenizer.json", "tokenizer_config.json")],
            "the tokenizer cannot be used",
        ),
        (
            lambda path: edit(path / "config.json", quantization_config={"quant_method": "bitsandbytes"}),
            "field 'quantization_config': quantized weights are not supported",
        ),
        (lambda path: edit(path / "config.json", vocab_size=50), "the model cannot be used"),
        (lambda path: edit(path / "config.json", intermediate_size=64), "the model cannot be used"),
        (
            lambda path: edit(path / "config.json", num_hidden_layers=4),
            r"field 'model\.layers\.3\..*': no such tensor in the weights \(and 8 more\)",
        ),
    ],
)
def test_damaged_folders(change: Callable[[Path], object], message: str, folder: Path, tmp_path: Path) -> None:
    path = shutil.copytree(folder, tmp_path / "m")
    change(path)
    with pytest.raises(InputError, match=f"{path}.*{message}"):
        hf.load(path)


def test_no_code_of_a_folder_is_executed(folder: Path, tmp_path: Path) -> None:
    path = shutil.copytree(folder, tmp_path / "m")
    (path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    edit(
        path / "config.json",
        model_type="evil",
        architectures=["Evil"],
        auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
    )
    with pytest.raises(InputError, match="the config cannot be used"):
        hf.load(path)
    assert not (tmp_path / "ran").exists()


def test_pickled_weights_are_not_read(folder: Path, tmp_path: Path) -> None:
    path = shutil.copytree(folder, tmp_path / "m")
    (path / "model.safetensors").unlink()
    torch.save(small("Llama").state_dict(), path / "pytorch_model.bin")
    with pytest.raises(InputError, match="the model cannot be used"):
        hf.load(path)


def test_a_tokenizer_of_another_model(source: Any, tmp_path: Path) -> None:
    words = tokenizer(words=[*WORDS, *(f"w{i}" for i in range(10))])
    with pytest.raises(InputError, match=r"m, field 'tokenizer': got 70, expected <= 64 tokens"):
        hf.load(save(tmp_path / "m", source, words))


def test_wide_heads(tmp_path: Path) -> None:
    path = save(tmp_path / "m", small("Qwen3", head_dim=16))
    message = "m, field 'head_dim': unsupported by the draft layers, got 16, expected hidden size / heads = 32 / 4"
    with pytest.raises(InputError, match=message):
        hf.load(path)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("Granite", {"logits_scaling": 3.0}, "its logits are not head times hidden state"),
        ("Gemma2", {"head_dim": 8}, "field 'final_logit_softcapping': is not supported: the logits are capped"),
        ("Bloom", {}, "no position_ids"),
        ("Mamba", {}, "field 'num_heads': unsupported config, got 'None', expected an integer >= 1"),
    ],
)
def test_architectures_that_do_not_fit(kind: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    if kind in ("Bloom", "Mamba"):
        config = getattr(transformers, f"{kind}Config")(vocab_size=64, hidden_size=32, num_hidden_layers=2, n_head=4)
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    else:
        model = small(kind, **changes)
    with pytest.raises(InputError, match=f"m.*{message}"):
        hf.load(save(tmp_path / "m", model))


def test_a_head_with_a_bias(tmp_path: Path) -> None:
    model = small("Phi", num_key_value_heads=4)
    model.lm_head.bias.data[3] = 1.0
    with pytest.raises(InputError, match="m, field 'LM head': is not supported: the logits have a bias"):
        hf.load(save(tmp_path / "m", model))


def test_longer_than_the_context(either: hf.HfTarget) -> None:
    assert either.new_cache(1, 40).capacity == 40
    with pytest.raises(InputError, match=r"field 'capacity': the model's context .*, got 41, expected at most 40"):
        either.new_cache(1, 41)


def test_longer_than_the_sliding_window(tmp_path: Path) -> None:
    found = hf.load(save(tmp_path / "m", small("Mistral", sliding_window=16)))
    with pytest.raises(InputError, match=r"\(or sliding window\) is shorter, got 17, expected at most 16"):
        found.new_cache(1, 17)


def test_longer_than_the_cache(target: hf.HfTarget, tokens: Tensor) -> None:
    with pytest.raises(IndexError, match="position 9 in a cache of 8"):
        target.extend(tokens, target.new_cache(3, 8), zeros(3))
