"""Any causal language model of Hugging Face's transformers as a target; needs the extra ``[hf]``.

The keys and values are in a `dsim.drafter.llama.KvCache` of this project; transformers gets a cache object that writes
to it, with positions and a mask for every call. Whether a model works that way is checked when it is loaded: its own
forward pass without a cache has to give the same. No code from a model's files is executed.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dsim.drafter.llama import KvCache, LlamaConfig
from dsim.drafter.target import Tokenizer
from dsim.errors import InputError

#: How far hidden states and logits may be from the model's own forward pass, relative to their norm.
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}
#: Keys of config.json that say nothing about the model.
_VOLATILE = ("_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache")


def load(path_or_name: str | Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> HfTarget:
    """A model with its tokenizer from a folder, or from the Hugging Face hub by name.

    Parameters
    ----------
    path_or_name
        A folder with ``config.json``, safetensors and a tokenizer (what ``save_pretrained`` writes), or a name like
        ``owner/model``, which transformers downloads to its own cache. Where a folder exists, nothing is downloaded.
    device, dtype
        Of the weights; bfloat16, float16, float32 or float64.

    Raises
    ------
    InputError
        transformers is not installed; the model is not there, damaged, or its weights are not those of its config; or
        it is no decoder whose hidden states, head and cache a drafter could use.
    """
    if dtype not in TOLERANCE:
        raise InputError(field="dtype", value=str(dtype), expected=", ".join(str(known) for known in TOLERANCE))
    folder = Path(path_or_name)
    if folder.exists():
        if not (folder / "config.json").is_file():
            raise InputError("holds no model", file=folder, expected="a folder with config.json")
    elif isinstance(path_or_name, Path) or not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path_or_name):
        raise InputError("is not there", file=folder, expected="a folder with a model, or a name like owner/model")
    transformers = _transformers()
    source = str(path_or_name)
    options = {"trust_remote_code": False, "local_files_only": folder.exists()}
    with _refused(source, "the config"):
        config = transformers.AutoConfig.from_pretrained(source, **options)
    if getattr(config, "quantization_config", None) is not None:
        raise InputError("quantized weights are not supported", file=source, field="quantization_config")
    with _refused(source, "the tokenizer"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
    model = _load_model(transformers, source, config, dtype, options)
    if not folder.exists():
        with _refused(source, "the files"):
            folder = Path(transformers.utils.cached_file(source, "config.json", local_files_only=True)).parent
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return HfTarget(
        model.to(device),
        tokenizer,
        name=Path(source).resolve().name if Path(source).exists() else source,
        fingerprint=_fingerprint(folder, raw, tokenizer),
        license_name=_license(folder, raw, None if Path(source).exists() else source),
    )


def _transformers() -> ModuleType:
    try:
        return import_module("transformers")
    except ImportError as error:
        raise InputError(
            f"Hugging Face models need the library transformers ({error}): pip install 'dspark-sim[hf]'", field="target"
        ) from None


@contextmanager
def _refused(source: str, what: str) -> Iterator[None]:
    """What the library raises (OSError, ValueError, SafetensorError, ...) as an `InputError`."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise InputError(f"{what} cannot be used: {reason[:300]}", file=source) from error


def _load_model(
    transformers: ModuleType, source: str, config: Any, dtype: torch.dtype, options: dict[str, Any]
) -> nn.Module:
    major, minor = (int(part) for part in transformers.__version__.split(".")[:2])
    options = {
        **options,
        "config": config,
        "use_safetensors": True,
        "output_loading_info": True,
        "dtype" if (major, minor) >= (4, 56) else "torch_dtype": dtype,
    }
    auto = transformers.AutoModelForCausalLM
    with _refused(source, "the model"):
        try:
            # By name, so that no config can ask for an attention kernel from somewhere else.
            model, info = auto.from_pretrained(source, attn_implementation="sdpa", **options)
        except (ImportError, ValueError) as error:
            if "scaled_dot_product_attention" not in str(error):
                raise
            model, info = auto.from_pretrained(source, attn_implementation="eager", **options)
    for kind in ("missing_keys", "mismatched_keys"):
        if info.get(kind):
            first = min(str(key if isinstance(key, str) else key[0]) for key in info[kind])
            what = "no such tensor in the weights" if kind == "missing_keys" else "the tensor has another shape"
            raise InputError(f"{what} (and {len(info[kind]) - 1} more)", file=source, field=first)
    found: nn.Module = model.requires_grad_(False).eval()
    return found


def _fingerprint(folder: Path, raw: dict[str, Any], tokenizer: Any) -> str:
    """Digest of config, tensors (in whatever files, by name) and vocabulary; 16 hex digits."""
    from safetensors import safe_open

    digest = hashlib.sha256()

    def add(part: bytes) -> None:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)

    add(json.dumps({key: raw[key] for key in raw if key not in _VOLATILE}, sort_keys=True).encode())
    add(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
    index = folder / "model.safetensors.index.json"
    places: dict[str, Path] = {}
    with _refused(str(folder), "the weights"):
        if (folder / "model.safetensors").is_file():
            names = ["model.safetensors"]
        elif index.is_file():
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        else:
            raise InputError("has no safetensors weights", file=folder, expected="model.safetensors, or shards")
        for name in names:
            with safe_open(folder / name, framework="pt") as shard:
                places |= dict.fromkeys(shard.keys(), folder / name)
        for key in sorted(places):
            with safe_open(places[key], framework="pt") as shard:
                tensor = shard.get_tensor(key)
            add(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
            add(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _license(folder: Path, raw: dict[str, Any], name: str | None) -> str:
    """From the config, or from the front matter of the model card; "unknown" where neither names one."""
    if isinstance(raw.get("license"), str):
        return str(raw["license"])
    card = folder / "README.md"
    if not card.is_file() and name is not None:
        try:
            card = Path(import_module("huggingface_hub").hf_hub_download(name, "README.md"))
        except Exception:  # whatever keeps the card away, the model is there
            return "unknown"
    if not card.is_file():
        return "unknown"
    front = re.match(r"---\n(.*?)\n---", card.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    line = re.search(r"^license:[ \t]*['\"]?([^\s'\"#]+)", front[1], re.MULTILINE) if front else None
    return line[1] if line else "unknown"


class HfTokenizer:
    """A tokenizer of transformers, see `dsim.drafter.target.Tokenizer`."""

    def __init__(self, tokenizer: Any, source: str) -> None:
        self._tokenizer = tokenizer
        self._source = source

    def encode(self, text: str) -> list[int]:
        """See `dsim.drafter.target.Tokenizer`."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """See `dsim.drafter.target.Tokenizer`."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def chat(self, prompt: str) -> list[int]:
        """See `dsim.drafter.target.Tokenizer`; the plain text where the model has no chat template."""
        if not self._tokenizer.chat_template:
            begin = self._tokenizer.bos_token_id
            with_special = self._tokenizer(prompt)["input_ids"]
            return [*with_special[:1], *self.encode(prompt)] if with_special[:1] == [begin] else self.encode(prompt)
        turn = [{"role": "user", "content": prompt}]
        with _refused(self._source, "the chat template"):
            return self.encode(self._tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))


class HfTarget:
    """A `dsim.drafter.target.Target` run by transformers.

    Parameters
    ----------
    model
        A causal language model.
    tokenizer
        Its tokenizer.
    name, fingerprint, license_name
        For provenance.

    Raises
    ------
    InputError
        The model is not one that works here; the message says why.
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, name: str, fingerprint: str, license_name: str = "unknown"
    ) -> None:
        self.model = model
        self.name = name
        self.fingerprint = fingerprint
        self.license = license_name
        self.tokenizer: Tokenizer = HfTokenizer(tokenizer, name)
        config = model.config.get_text_config()
        self.shape = llama_shape(config, name)
        self.vocab_size, self.hidden_size = self.shape.vocab_size, self.shape.hidden_size
        self.num_layers = self.shape.num_layers
        self._eos(tokenizer)
        self._base = model.base_model
        with _refused(name, "the architecture"):
            names = inspect.signature(self._base.forward).parameters
            lists = [module for module in self._base.modules() if isinstance(module, nn.ModuleList)]
            head = model.get_output_embeddings()
            self._head = head.weight
            self._embedding = model.get_input_embeddings().weight
        if getattr(head, "bias", None) is not None and bool(head.bias.any()):
            raise InputError("is not supported: the logits have a bias", file=name, field="LM head")
        if getattr(config, "final_logit_softcapping", None):
            raise InputError("is not supported: the logits are capped", file=name, field="final_logit_softcapping")
        stacks = [modules for modules in lists if len(modules) == self.num_layers]
        if not stacks:
            raise InputError("the architecture is not supported: no list of layers", file=name)
        self._layers = stacks[0]
        for parameter in ("position_ids", "attention_mask"):
            if parameter not in names:
                raise InputError(f"the architecture is not supported: no {parameter}", file=name)
        for what, matrix in (("input embedding", self._embedding), ("LM head", self._head)):
            if tuple(matrix.shape) != (self.vocab_size, self.hidden_size):
                expected = str((self.vocab_size, self.hidden_size))
                raise InputError(
                    "is not supported", file=name, field=what, value=tuple(matrix.shape), expected=expected
                )
        if len(tokenizer) > self.vocab_size:
            raise InputError(
                file=name, field="tokenizer", value=len(tokenizer), expected=f"<= {self.vocab_size} tokens"
            )
        self._cache_name = "past_key_values" if "past_key_values" in names else "cache"
        self._limit = _context(config)
        with _refused(name, "the architecture"):
            self._check()

    def _eos(self, tokenizer: Any) -> None:
        generation = getattr(self.model, "generation_config", None)
        ends = {tokenizer.eos_token_id}
        for found in (getattr(generation, "eos_token_id", None), getattr(self.model.config, "eos_token_id", None)):
            ends |= set(found) if isinstance(found, list | tuple) else {found}
        self.eos = frozenset(int(token) for token in ends if token is not None and token < self.vocab_size)

    @property
    def embedding(self) -> Tensor:
        """[V, H]."""
        weight: Tensor = self._embedding
        return weight

    @property
    def head(self) -> Tensor:
        """[V, H]."""
        weight: Tensor = self._head
        return weight

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.head.device

    def new_cache(self, rows: int, capacity: int) -> KvCache:
        """See `dsim.drafter.target.Target.new_cache`.

        Raises
        ------
        InputError
            The model's context, or its sliding window, is shorter.
        """
        if capacity > self._limit:
            raise InputError(
                "the model's context (or sliding window) is shorter",
                file=self.name,
                field="capacity",
                value=capacity,
                expected=f"at most {self._limit}",
            )
        k, v = (
            torch.zeros((self.num_layers, rows, heads, capacity, width), dtype=self.head.dtype, device=self.device)
            for heads, width in (self._key_shape, self._value_shape)
        )
        return KvCache(k, v)

    @torch.inference_mode()
    def extend(
        self, tokens: Tensor, cache: KvCache, start: Tensor, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """See `dsim.drafter.target.Target.extend`."""
        batch, length = tokens.shape
        positions = start[:, None] + torch.arange(length, device=tokens.device)
        end = int(positions.max()) + 1
        if end > cache.capacity:
            raise IndexError(f"position {end - 1} in a cache of {cache.capacity}")
        row = torch.arange(batch, device=tokens.device)[:, None]

        def update(k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
            cache.k[layer].transpose(1, 2)[row, positions] = k.transpose(1, 2)
            cache.v[layer].transpose(1, 2)[row, positions] = v.transpose(1, 2)
            return cache.k[layer, :, :, :end], cache.v[layer, :, :, :end]

        visible = torch.arange(end, device=tokens.device) <= positions[..., None]
        with self._tapped(taps) as kept:
            hidden = self._forward(tokens, positions, visible, update)
        if not taps:
            return hidden.new_empty((batch, length, 0, self.hidden_size)), hidden
        return torch.stack([kept[tap] for tap in taps], dim=-2), hidden

    @torch.inference_mode()
    def branch(self, tokens: Tensor, positions: Tensor, prefix: Tensor, tree: Tensor, cache: KvCache) -> Tensor:
        """See `dsim.drafter.target.Target.branch`."""
        end = int(prefix.max())

        def update(k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
            return (
                torch.cat([cache.k[layer, :1, :, :end], k], dim=2),
                torch.cat([cache.v[layer, :1, :, :end], v], dim=2),
            )

        visible = torch.cat([torch.arange(end, device=tokens.device) < prefix[:, None], tree], dim=1)
        return self._forward(tokens[None], positions[None], visible[None], update)[0]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """See `dsim.drafter.target.Target.logits`."""
        return functional.linear(hidden.to(self.head.dtype), self.head).float()

    def layer_weights(self, layer: int) -> dict[str, Tensor] | None:
        """See `dsim.drafter.target.Target.layer_weights`; None unless the layer is just like a Llama's."""
        found = self._layers[layer].state_dict()
        if set(found) != set(_LLAMA_NAMES) or getattr(self.model.config, "hidden_act", None) not in ("silu", "swish"):
            return None
        weights: dict[str, Tensor] = {ours: found[theirs] for theirs, ours in _LLAMA_NAMES.items()}
        hidden, kv, ffn = self.hidden_size, self.shape.num_kv_heads * self.shape.head_dim, self.shape.ffn_size
        shapes = {"q": (hidden, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, hidden)}
        shapes |= {"gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn)}
        for name, weight in weights.items():
            if tuple(weight.shape) != shapes.get(name.split(".")[0], (hidden,)):
                return None
        return weights if self._plain_norm(self._layers[layer].input_layernorm) else None

    @torch.inference_mode()
    def _plain_norm(self, norm: Any) -> bool:
        # Some models multiply with 1 + weight, or take the mean off, under the same names.
        x = torch.linspace(-1, 2, self.hidden_size, dtype=norm.weight.dtype, device=self.device)
        expected = functional.rms_norm(x.float(), x.shape, norm.weight.float(), self.shape.norm_eps)
        return _distance(norm(x[None])[0], expected) < TOLERANCE[norm.weight.dtype]

    def _forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor,
        update: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]],
    ) -> Tensor:
        """One pass: tokens and positions [B, S], visible bool[B, S, L], hidden states [B, S, H]."""
        mask = torch.zeros(visible.shape, dtype=self.head.dtype, device=self.device)
        mask = mask.masked_fill_(~visible, torch.finfo(mask.dtype).min)[:, None]
        past = visible.shape[-1] - tokens.shape[1]
        hidden: Tensor = self._base(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            **{self._cache_name: _bridge(update, past)},
        ).last_hidden_state
        return hidden

    @contextmanager
    def _tapped(self, taps: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
        """What the layers put out, and what the first one gets, while a pass runs."""
        kept: dict[int, Tensor] = {}

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            kept[0] = args[0] if args else kwargs["hidden_states"]

        def after(tap: int) -> Callable[[nn.Module, Any, Any], None]:
            def keep(module: nn.Module, args: Any, output: Any) -> None:
                kept[tap] = output[0] if isinstance(output, tuple) else output

            return keep

        handles = []
        try:
            for tap in sorted(set(taps)):
                if tap == 0:
                    handles.append(self._layers[0].register_forward_pre_hook(before, with_kwargs=True))
                else:
                    handles.append(self._layers[tap - 1].register_forward_hook(after(tap)))
            yield kept
        finally:
            for handle in handles:
                handle.remove()

    @torch.inference_mode()
    def _check(self) -> None:
        """Learn the shapes of keys and values, and compare some passes with the model's own one without a cache."""
        size = 6
        tokens = torch.arange(size, device=self.device)[None] * 7 % self.vocab_size
        shapes: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}

        def update(k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
            shapes[layer] = ((k.shape[1], k.shape[3]), (v.shape[1], v.shape[3]))
            return k, v

        causal = torch.ones((1, size, size), dtype=torch.bool, device=self.device).tril()
        self._forward(tokens, torch.arange(size, device=self.device)[None], causal, update)
        if sorted(shapes) != list(range(self.num_layers)) or len(set(shapes.values())) != 1:
            why = "its layers do not all keep keys and values of one shape"
            raise InputError(f"the architecture is not supported: {why}", file=self.name)
        self._key_shape, self._value_shape = shapes[0]
        states = self._base(input_ids=tokens, use_cache=False).last_hidden_state[0]
        logits = self.model(input_ids=tokens, use_cache=False).logits[0]
        limit = TOLERANCE[self.head.dtype]
        if _distance(self.logits(states), logits) > limit:
            raise InputError(
                "the architecture is not supported: its logits are not head times hidden state", file=self.name
            )
        # Two rows of the cache that go on at different places, then a tree with a branch from each of these places.
        half = size // 2
        cache = self.new_cache(2, size)
        start = torch.tensor([half, half - 1], device=self.device)
        extended = []
        for row, first in enumerate(start.tolist()):
            self.extend(tokens[:, :first], cache.rows(row, row + 1), torch.zeros_like(start[:1]))
            extended.append(torch.arange(first, first + size - half, device=self.device))
        branches = [torch.arange(first, size, device=self.device) for first in start.tolist()]
        nodes = torch.cat(branches)
        prefix = torch.cat([torch.full_like(branch, int(branch[0])) for branch in branches])
        tree = (prefix[:, None] == prefix) & (nodes[:, None] >= nodes)
        branched = self.branch(tokens[0, nodes], nodes, prefix, tree, cache.rows(0, 1))
        _, hidden = self.extend(torch.stack([tokens[0, positions] for positions in extended]), cache, start)
        for ours, theirs in ((branched, states[nodes]), (hidden.flatten(0, 1), states[torch.cat(extended)])):
            if _distance(ours, theirs) > limit:
                raise InputError("the architecture is not supported: a cached pass gives other states", file=self.name)


def _distance(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = ours.double(), theirs.double()
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-12))


def _bridge(update: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]], past: int) -> Any:
    """A cache object for transformers that hands every layer's keys and values to `update`."""
    cache: Any = import_module("transformers").DynamicCache()
    cache.update = lambda k, v, layer, *args, **kwargs: update(k, v, layer)
    cache.get_seq_length = lambda *args, **kwargs: past
    return cache


def _context(config: Any) -> int:
    """Positions that the model can tell apart and see: its context, or its sliding window."""
    limits = [2**31]
    context = getattr(config, "max_position_embeddings", None)
    if isinstance(context, int):
        limits.append(context)
    for key in ("sliding_window", "attention_chunk_size", "window_size"):
        window = getattr(config, key, None)
        if isinstance(window, int) and getattr(config, "use_sliding_window", True):
            limits.append(window)
    return min(limits)


def llama_shape(config: Any, name: str) -> LlamaConfig:
    """Sizes that draft layers take over, from a config of transformers.

    Raises
    ------
    InputError
        A size is missing, or the heads do not divide the hidden size.
    """

    def first(*names: str, default: Any = None) -> Any:
        return next((found for key in names if (found := getattr(config, key, None)) is not None), default)

    sizes: dict[str, Any] = {
        "vocab_size": first("vocab_size"),
        "hidden_size": first("hidden_size"),
        "num_layers": first("num_hidden_layers"),
        "num_heads": first("num_attention_heads"),
    }
    for key, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise InputError("unsupported config", file=name, field=key, value=str(value), expected="an integer >= 1")
    hidden, heads = sizes["hidden_size"], sizes["num_heads"]
    width = first("head_dim", default=hidden // heads)
    if width * heads != hidden or width % 2:
        raise InputError(
            "unsupported by the draft layers",
            file=name,
            field="head_dim",
            value=width,
            expected=f"hidden size / heads = {hidden} / {heads}, an even number",
        )
    kv = first("num_key_value_heads", default=heads)
    if heads % kv:
        raise InputError(
            "unsupported", file=name, field="num_key_value_heads", value=kv, expected=f"a divisor of {heads}"
        )
    return LlamaConfig(
        **sizes,
        num_kv_heads=kv,
        ffn_size=first("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden),
        rope_base=_rope_base(config),
        norm_eps=float(first("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", default=1e-5)),
    )


def _rope_base(config: Any) -> float:
    # transformers 5 keeps it in a table, which may be one a kind of layer.
    found = getattr(config, "rope_parameters", None) or {}
    tables = [found, *(table for table in found.values() if isinstance(table, dict))]
    bases = [table["rope_theta"] for table in tables if "rope_theta" in table]
    return float(bases[0] if bases else getattr(config, "rope_theta", None) or 10_000.0)


_LLAMA_NAMES = {
    "input_layernorm.weight": "input_norm.weight",
    "self_attn.q_proj.weight": "q.weight",
    "self_attn.k_proj.weight": "k.weight",
    "self_attn.v_proj.weight": "v.weight",
    "self_attn.o_proj.weight": "o.weight",
    "post_attention_layernorm.weight": "post_norm.weight",
    "mlp.gate_proj.weight": "gate.weight",
    "mlp.up_proj.weight": "up.weight",
    "mlp.down_proj.weight": "down.weight",
}
