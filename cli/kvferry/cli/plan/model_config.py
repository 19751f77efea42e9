"""A model's `config.json`, as its author wrote it, as keys of the short form.

Only what config.json itself says is used. Where the rest is in a model's code, as the shapes of recurrent states are,
it is refused with the keys to add: `./config.json,window=4096@0-30/2`. The rules are those by which transformers and
vLLM read it, for the families in model_families.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvferry.cli.arguments import InvalidModel, read_json
from kvferry.cli.plan.short_form import KEYS, MAX_LAYERS, MAX_SIZE
from kvferry.plan.wording import format_runs
from kvferry.protocol.errors import MISSING, Shown

MAX_CONFIG_BYTES = 4 << 20

_KINDS = ("full_attention", "sliding_attention")
_EXAMPLES = {
    "layers": "layers=32",
    "heads": "heads=8",
    "dim": "dim=128",
    "mla": "mla=576",
    "dtype": "dtype=bfloat16",
    "window": "window=4096, window=4096@0-30/2 or window=0",
}
# Where a multi-modal model has the configuration of its language model.
_NESTED = ("text_config", "llm_config", "language_config")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_head_kv",
    "multi_query_group_num",
)
_HIDDEN = ("hidden_size", "n_embd", "d_model")


class _Families(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """model_families.json: what the code of model types says about the cache where their config.json says nothing.

    Attributes:
        kv_heads_are_heads: there are as many KV heads as heads; those of other types have a number in their code.
        is_multi_query: there is one KV head unless `multi_query` is false.
        has_head_dim: there is a number for the head size; others divide the hidden size.
        has_latent: vLLM serves it with a latent cache.
        has_window: it has a window even without `sliding_window`.
        full_every: every n-th layer has full attention if the layers of the window are not listed; 0: none has.
        keys_of_states: beginnings of keys that only models with recurrent states or convolutions have.
        keys_of_other_caches: keys of models whose caches neither config.json nor a short form describes, and why.
    """

    kv_heads_are_heads: frozenset[str]
    is_multi_query: frozenset[str]
    has_head_dim: frozenset[str]
    has_latent: frozenset[str]
    has_window: frozenset[str]
    full_every: dict[str, int]
    keys_of_states: tuple[str, ...]
    keys_of_other_caches: dict[str, str]


_FAMILIES = msgspec.json.decode(
    Path(__file__).with_name("model_families.json").read_bytes(), type=_Families
)
# Beginnings of model types that have windows only if `use_sliding_window` is true.
_OPTIONAL_WINDOWS = ("dots1", "qwen2", "qwen3", "smollm3")
# vLLM serves float32 weights in bfloat16 unless `--dtype` says otherwise.
_DTYPES = {"float32": "bfloat16", "bfloat16": "bfloat16", "float16": "float16"}


def read_model_config(text: bytes, given: Mapping[str, str]) -> dict[str, str]:
    """Layers, heads, head size, windows and dtype, as pairs of a short form.

    Args:
        given: pairs of a short form that the user has written, which config.json need not say.

    Raises:
        InvalidModel: it is no such file, or does not say enough; with the keys to add.
    """
    config = read_json(InvalidModel, text, MAX_CONFIG_BYTES)
    if not isinstance(config, dict):
        raise InvalidModel("file", Shown("no object"), "the config.json of a model")
    nested = next(
        (config[key] for key in _NESTED if isinstance(config.get(key), dict)), None
    )
    return _Config(config, nested, given).pairs()


class _Config:
    """One config.json.

    Attributes:
        _whole, _nested: the whole of it, and the configuration of the language model within, if it is nested.
        _own: the part that describes the language model, without its nulls.
        _given: pairs that the user has written.
    """

    def __init__(
        self,
        whole: Mapping[str, Any],
        nested: Mapping[str, Any] | None,
        given: Mapping[str, str],
    ) -> None:
        self._whole = whole
        self._nested = nested
        self._given = given
        own = whole if nested is None else nested
        self._own = {key: value for key, value in own.items() if value is not None}
        # Cut, because errors show it.
        self._type = str(self._own.get("model_type", "missing"))[:64]

    def pairs(self) -> dict[str, str]:
        """The pairs that the user has not written.

        Raises:
            InvalidModel: config.json does not describe the model.
        """
        self._refuse_others()
        all_layers = self._layers()
        # Layers that share another layer's cache have none, and are the last ones.
        shared = 0
        if "num_kv_shared_layers" in self._own:
            shared = self._number(("num_kv_shared_layers",), 0, all_layers - 1)
        layers = all_layers - shared
        pairs = {"layers": str(layers)}
        pairs.update(self._sizes())
        if "dtype" not in self._given:
            pairs["dtype"] = self._dtype()
        if "window" not in self._given:
            window = self._window(all_layers, layers)
            if window:
                pairs["window"] = window
        return pairs

    def _sizes(self) -> dict[str, str]:
        """The latent, or the heads and their size."""
        given = self._given
        if "mla" in given:
            return {}
        has_heads = "heads" in given or "dim" in given
        if self._own.get("kv_lora_rank") and not has_heads:
            latent = self._number(("kv_lora_rank",), 1)
            rope = self._number(("qk_rope_head_dim",), 0, add="mla")
            return {"mla": str(latent + rope)}
        sizes = {}
        if "heads" not in given:
            sizes["heads"] = str(self._kv_heads())
        if "dim" not in given:
            sizes["dim"] = str(self._head_dim())
        return sizes

    def _refuse_others(self) -> None:
        """Refuse models whose caches neither config.json nor the short form describes."""
        own = self._own
        for key, why in _FAMILIES.keys_of_other_caches.items():
            if own.get(key):
                raise _not_here(key, own[key], why)
        if own.get("is_encoder_decoder") or self._whole.get("is_encoder_decoder"):
            why = _FAMILIES.keys_of_other_caches["encoder_layers"]
            raise _not_here("is_encoder_decoder", True, why)
        has_latent = own.get("kv_lora_rank")
        if has_latent and self._type not in _FAMILIES.has_latent:
            why = "its code says how much of a kv_lora_rank is in the cache"
            raise _not_here("model_type", self._type, why)
        if not has_latent and own.get("v_head_dim", 0) not in (0, own.get("head_dim")):
            raise _not_here("v_head_dim", own["v_head_dim"], "K and V differ in size")
        if "state_layers" in self._given:
            return
        # The shapes of recurrent states are in a model's code.
        types = own.get("layer_types", [])
        if not isinstance(types, list):
            raise _without_states("layer_types", types)
        for layer_type in types:
            if layer_type not in _KINDS:
                raise _without_states("layer_types", layer_type)
        for key, value in own.items():
            if value and key.startswith(_FAMILIES.keys_of_states):
                raise _without_states(key, value)

    def _layers(self) -> int:
        if "layers" in self._given:
            return int(KEYS["layers"].read("layers", self._given["layers"]))
        return self._number(_LAYERS, 1, MAX_LAYERS, add="layers")

    def _kv_heads(self) -> int:
        own = self._own
        is_grouped = own.get("new_decoder_architecture") or not own.get(
            "multi_query", True
        )
        if self._type in _FAMILIES.is_multi_query and not is_grouped:
            return 1
        keys: Sequence[str] = _KV_HEADS
        if self._nested is None and self._type in _FAMILIES.kv_heads_are_heads:
            keys = (*_KV_HEADS, *_HEADS)
        return self._number(keys, 1, add="heads")

    def _head_dim(self) -> int:
        for key in ("head_dim", "hidden_size_per_head", "kv_channels"):
            if self._own.get(key, 0) != 0:
                return self._number((key,), 1, add="dim")
        is_nested_llama = self._nested is not None and self._type == "llama"
        if self._type in _FAMILIES.has_head_dim or is_nested_llama:
            expected = f"a number, which is in the code of {self._type}; {_add('dim')}"
            raise InvalidModel("head_dim", MISSING, expected)
        hidden = self._number(_HIDDEN, 1, 1 << 24, add="dim")
        heads = self._number(_HEADS, 1, add="dim")
        if hidden % heads:
            raise InvalidModel(
                "hidden_size", hidden, f"a multiple of {heads} heads; {_add('dim')}"
            )
        return hidden // heads

    def _dtype(self) -> str:
        key = "quantization_config"
        scheme = self._own.get(key) or self._whole.get(key)
        if isinstance(scheme, dict) and (
            scheme.get("kv_cache_scheme") or scheme.get("kv_cache_quant_algo")
        ):
            # The cache has the scheme's type then, not that of the activations.
            quantised = Shown("one with a quantised cache")
            raise InvalidModel(key, quantised, _add("dtype"))
        written = [
            config[key]
            for config in (self._whole, self._own)
            for key in ("dtype", "torch_dtype")
            if config.get(key) is not None
        ]
        dtype = written[0] if written else MISSING
        name = str(dtype).removeprefix("torch.")
        if name not in _DTYPES:
            expected = f"one of {', '.join(_DTYPES)}; {_add('dtype')}"
            raise InvalidModel("dtype", dtype, expected)
        return _DTYPES[name]

    def _window(self, all_layers: int, layers: int) -> str:
        """`4096@0-30/2`, or empty. Of `all_layers` the first `layers` have a cache."""
        if not self._has_window():
            return ""
        tokens = self._number(("sliding_window",), 1, 1 << 40, add="window")
        if self._type.startswith("cohere2"):
            # vLLM counts the token itself, too.
            tokens += 1
        with_window = self._layers_with_window(all_layers, layers)
        if len(with_window) == layers:
            return f"{tokens}"
        if not with_window:
            return ""
        return f"{tokens}@{_layer_list(with_window)}"

    def _has_window(self) -> bool:
        uses_windows = not self._type.startswith(_OPTIONAL_WINDOWS)
        if not self._own.get("use_sliding_window", uses_windows):
            return False
        # In `_own` a null is left out; here it says that there is no window, where its absence does not.
        source = self._whole if self._nested is None else self._nested
        if "sliding_window" in source:
            return source["sliding_window"] is not None
        return self._type in _FAMILIES.has_window

    def _layers_with_window(self, all_layers: int, layers: int) -> list[int]:
        """Those of the first `layers` of `all_layers` that have a window."""
        kinds = self._own.get("layer_types")
        if isinstance(kinds, list):
            if len(kinds) != all_layers:
                expected = f"one for each of {all_layers} layers"
                raise InvalidModel(
                    "layer_types", Shown(f"{len(kinds)} names"), expected
                )
            return [layer for layer in range(layers) if kinds[layer] == _KINDS[1]]
        # Hostile or of another meaning: what is no number counts as missing.
        pattern = self._own.get(
            "sliding_window_pattern", _FAMILIES.full_every.get(self._type)
        )
        if type(pattern) is not int or not 0 <= pattern <= MAX_LAYERS:
            pattern = None
        if pattern is None or self._type.startswith(_OPTIONAL_WINDOWS):
            expected = f"the layers of the window; {_add('window')}"
            raise InvalidModel("layer_types", MISSING, expected)
        if pattern == 0:
            return list(range(layers))
        return [layer for layer in range(layers) if (layer + 1) % pattern]

    def _number(
        self, keys: Sequence[str], low: int, high: int = MAX_SIZE, *, add: str = ""
    ) -> int:
        """The first of these keys that is there, a whole number.

        Args:
            add: a key of the short form that the user can write instead.
        """
        key = next((key for key in keys if key in self._own), keys[0])
        value = self._own.get(key, MISSING)
        # `True` is an int of Python's, and no number of layers.
        if type(value) is int and low <= value <= high:
            return value
        expected = f"a whole number from {low} to {high}"
        if add:
            expected = f"{expected}; {_add(add)}"
        raise InvalidModel(key, value, expected)


def _layer_list(layers: Sequence[int]) -> str:
    """Layers as in a short form, e.g. `0-30/2+31`."""
    return "+".join(format_runs(layers)).replace("…", "-").replace(" by ", "/")


def _add(key: str) -> str:
    return f"or add {_EXAMPLES[key]} behind a comma"


def _without_states(field: str, value: object) -> InvalidModel:
    why = "config.json lacks the states of its layers"
    return _not_here(field, value, why, "state_layers, ssm and conv")


def _not_here(field: str, value: object, why: str, keys: str = "") -> InvalidModel:
    """The error for a model that config.json does not describe, with what to do."""
    do = "start an engine with the key description_file and give that file"
    if keys:
        do = f"{do}, or add {keys} behind a comma"
    return InvalidModel(field, value, f"another model: {why}; {do}")
