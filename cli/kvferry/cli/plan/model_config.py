"""A model's `config.json`, as its author wrote it, as keys of the short form.

Only what config.json itself says is used. Where the rest is in a model's code, as the shapes of recurrent states are,
it is refused with the keys to add: `./config.json,window=4096@0-30/2`. The rules are those by which transformers and
vLLM read it, for the families in the tables below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvferry.cli.arguments import InvalidModel
from kvferry.cli.plan.short_form import KEYS
from kvferry.cli.plan.short_values import MAX_LAYERS, MAX_SIZE
from kvferry.plan.wording import progressions
from kvferry.protocol.errors import MISSING, Shown, cut

MAX_CONFIG_BYTES = 4 << 20

_KINDS = ("full_attention", "sliding_attention")
_EXAMPLES = {
    "layers": "layers=32",
    "heads": "heads=8",
    "dim": "dim=128",
    "mla": "mla=576",
    "dtype": "dtype=bfloat16",
}
_EXAMPLES["window"] = "window=4096, window=4096@0-30/2 or window=0"
_NESTED = ("text_config", "llm_config", "language_config")
"""Where a multi-modal model has the configuration of its language model."""
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_HIDDEN = ("hidden_size", "n_embd", "d_model")

_AS_MANY_KV_HEADS = (
    "bloom",
    "cohere",
    "falcon",
    "gpt2",
    "gpt_neox",
    "gptj",
    "granite",
    "llama",
    "olmo",
    "opt",
    "phi",
)
"""Model types with as many KV heads as heads if config.json has no number of them; others have one in their code."""
_HEAD_DIM_OF_CODE = (
    *(
        "afmoe",
        "cohere2_moe",
        "cwm",
        "ernie4_5",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gemma3n_text",
        "glm",
        "glm4",
    ),
    *(
        "gpt_oss",
        "helium",
        "hy_v3",
        "llama4_text",
        "mellum",
        "minimax_m2",
        "ministral3",
        "muse_glimmer_assistant",
    ),
    *(
        "muse_glimmer_text",
        "paddleocr_vl_text",
        "qwen3",
        "qwen3_vl_text",
        "seed_oss",
        "solar_open",
        "step3p5",
    ),
    *("vaultgemma", "zaya"),
)
"""Model types whose code has a number for a missing head_dim; others divide the hidden size."""
_MULTI_QUERY = ("falcon", "gpt_bigcode")
"""Model types with one KV head unless `multi_query` is false."""
_MLA = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "pangu_ultra_moe", "axk1")
"""Model types that vLLM serves with a latent cache."""
_WINDOWS = {
    **dict.fromkeys(("mistral", "mixtral", "phi3", "starcoder2"), 0),
    "cohere2": 4,
    "exaone4": 4,
    "gemma2": 2,
    "gemma3_text": 6,
    "gemma3n_text": 5,
    "gpt_oss": 2,
    "olmo3": 4,
}
"""Model types with windows if config.json does not list the layers: every n-th has full attention; 0: none has."""
_WINDOW_OF_CODE = (
    *(
        "afmoe",
        "cohere2",
        "cohere2_moe",
        "cwm",
        "exaone4",
        "exaone_moe",
        "gemma2",
        "gemma3_text",
        "gemma3n_text",
    ),
    *("gpt_oss", "granite_swa", "granitemoe_swa", "ministral", "mistral", "muse_glimmer_assistant"),
    *("muse_glimmer_text", "olmo3", "vaultgemma", "voxtral_realtime_text"),
)
"""Those that have a window even if config.json has no `sliding_window`."""
_ASKED_WINDOWS = ("dots1", "qwen2", "qwen3", "smollm3")
"""Beginnings of model types that have windows only if `use_sliding_window` is true."""

_STATES = (
    *(
        "mamba",
        "ssm",
        "linear_",
        "conv_",
        "rwkv",
        "state_size",
        "lru_width",
        "hybrid",
        "layers_block_type",
    ),
    *(
        "attn_layer",
        "attn_type_list",
        "layer_group_size",
        "time_mix",
        "block_types",
        "full_attn_idxs",
    ),
)
"""Beginnings of keys that only models with recurrent states or convolutions have."""
_ELSEWHERE = {
    "index_topk": "an indexer has a cache of its own beside the latent",
    "index_head_dim": "an indexer has a cache of its own beside the latent",
    "compress_ratios": "its caches are compressed, layer by layer",
    "attention_chunk_size": "some layers have chunked attention",
    "global_head_dim": "its layers have heads of two sizes",
    "swa_head_dim": "its layers have heads of two sizes",
    "swa_num_key_value_heads": "its layers have different numbers of KV heads",
    "num_attention_heads_per_layer": "its layers have different numbers of heads",
    "attention_other_setting": "its layers have different numbers of heads",
    "block_configs": "its layers differ",
    "per_layer_config": "its layers differ",
    "cross_attention_layers": "some layers have a cache of the image",
    "cla_share_factor": "some layers share a cache",
    "encoder_layers": "it has an encoder",
}
"""Keys of models whose caches neither config.json nor a short form describes."""
_DTYPES = {"float32": "bfloat16", "bfloat16": "bfloat16", "float16": "float16"}
"""vLLM serves float32 weights in bfloat16 unless `--dtype` says otherwise."""


def read_model_config(text: bytes, given: Mapping[str, str]) -> dict[str, str]:
    """Layers, heads, head size, windows and dtype, as pairs of a short form.

    Args:
        given: pairs of a short form that the user has written, which config.json need not say.

    Raises:
        InvalidModel: it is no such file, or does not say enough; with the keys to add.
    """
    if len(text) > MAX_CONFIG_BYTES:
        raise InvalidModel("file", Shown(f"{len(text)} bytes"), f"at most {MAX_CONFIG_BYTES} bytes")
    try:
        whole = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as refused:
        raise InvalidModel("file", text[:32], cut(f"JSON in UTF-8 ({refused})")) from None
    if not isinstance(whole, dict):
        raise InvalidModel("file", Shown("no object"), "the config.json of a model")
    nested = next((whole[key] for key in _NESTED if isinstance(whole.get(key), dict)), None)
    return _Config(whole, nested, given).pairs()


class _Config:
    """One config.json. `_own` is the part that describes the language model, without its nulls."""

    def __init__(
        self, whole: Mapping[str, Any], nested: Mapping[str, Any] | None, given: Mapping[str, str]
    ) -> None:
        self._whole, self._nested, self._given = whole, nested, given
        self._own = {
            key: value
            for key, value in (whole if nested is None else nested).items()
            if value is not None
        }
        self._type = str(self._own.get("model_type", "missing"))[:64]

    def pairs(self) -> dict[str, str]:
        self._refuse_others()
        given = self._given
        every = (
            int(KEYS["layers"].value.read("layers", given["layers"]))
            if "layers" in given
            else self._layers()
        )
        shared = (
            self._number(("num_kv_shared_layers",), 0, every - 1)
            if "num_kv_shared_layers" in self._own
            else 0
        )
        found = {"layers": str(every - shared)}
        if "mla" in given:
            pass
        elif self._own.get("kv_lora_rank") and "heads" not in given and "dim" not in given:
            found["mla"] = str(
                self._number(("kv_lora_rank",), 1)
                + self._number(("qk_rope_head_dim",), 0, add="mla")
            )
        else:
            readers = {"heads": self._kv_heads, "dim": self._head_dim}
            found.update({key: str(read()) for key, read in readers.items() if key not in given})
        if "dtype" not in given:
            found["dtype"] = self._dtype()
        if "window" not in given and (window := self._window(every, every - shared)):
            found["window"] = window
        return found

    def _refuse_others(self) -> None:
        """Caches that neither config.json nor the short form describes."""
        for key, why in _ELSEWHERE.items():
            if self._own.get(key):
                raise _not_here(key, self._own[key], why)
        if self._own.get("is_encoder_decoder") or self._whole.get("is_encoder_decoder"):
            raise _not_here("is_encoder_decoder", True, _ELSEWHERE["encoder_layers"])
        if self._own.get("kv_lora_rank") and self._type not in _MLA:
            raise _not_here(
                "model_type", self._type, "its code says how much of a kv_lora_rank is in the cache"
            )
        if not self._own.get("kv_lora_rank") and self._own.get("v_head_dim", 0) not in (
            0,
            self._own.get("head_dim"),
        ):
            raise _not_here("v_head_dim", self._own["v_head_dim"], "K and V differ in size")
        types = self._own.get("layer_types", [])
        unlike = (
            [kind for kind in types if kind not in _KINDS] if isinstance(types, list) else [types]
        )
        states = [key for key in self._own if key.startswith(_STATES) and self._own[key]]
        if (unlike or states) and "state_layers" not in self._given:
            field, value = (
                ("layer_types", unlike[0]) if unlike else (states[0], self._own[states[0]])
            )
            raise _not_here(
                field,
                value,
                "config.json lacks the states of its layers",
                "state_layers, ssm and conv",
            )

    def _layers(self) -> int:
        return self._number(_LAYERS, 1, MAX_LAYERS, add="layers")

    def _kv_heads(self) -> int:
        own = self._own
        if (
            self._type in _MULTI_QUERY
            and own.get("multi_query", True)
            and not own.get("new_decoder_architecture")
        ):
            return 1
        if (
            self._nested is None
            and self._type in _AS_MANY_KV_HEADS
            and not any(key in self._own for key in _KV_HEADS)
        ):
            return self._number(_HEADS, 1, add="heads")
        return self._number(_KV_HEADS, 1, add="heads")

    def _head_dim(self) -> int:
        for key in ("head_dim", "hidden_size_per_head", "kv_channels"):
            if self._own.get(key, 0) != 0:
                return self._number((key,), 1, add="dim")
        if self._type in _HEAD_DIM_OF_CODE or (self._nested is not None and self._type == "llama"):
            raise InvalidModel(
                "head_dim",
                MISSING,
                f"a number, which is in the code of {self._type}; {_add('dim')}",
            )
        hidden, heads = (
            self._number(_HIDDEN, 1, 1 << 24, add="dim"),
            self._number(_HEADS, 1, add="dim"),
        )
        if hidden % heads:
            raise InvalidModel("hidden_size", hidden, f"a multiple of {heads} heads; {_add('dim')}")
        return hidden // heads

    def _dtype(self) -> str:
        scheme = self._own.get("quantization_config") or self._whole.get("quantization_config")
        if isinstance(scheme, dict) and (
            scheme.get("kv_cache_scheme") or scheme.get("kv_cache_quant_algo")
        ):
            raise InvalidModel(
                "quantization_config", Shown("one with a quantised cache"), _add("dtype")
            )
        places = [
            one.get(key) for one in (self._whole, self._own) for key in ("dtype", "torch_dtype")
        ]
        found = next((place for place in places if place is not None), MISSING)
        name = found.removeprefix("torch.") if isinstance(found, str) else ""
        if name not in _DTYPES:
            raise InvalidModel("dtype", found, f"one of {', '.join(_DTYPES)}; {_add('dtype')}")
        return _DTYPES[name]

    def _window(self, every: int, layers: int) -> str:
        """`4096@0-30/2`, or empty. The first `layers` of `every` layer have a cache."""
        source = self._whole if self._nested is None else self._nested
        is_asked = self._own.get("use_sliding_window", not self._type.startswith(_ASKED_WINDOWS))
        if not is_asked or ("sliding_window" in source and source["sliding_window"] is None):
            return ""
        if "sliding_window" not in source and self._type not in _WINDOW_OF_CODE:
            return ""
        tokens = self._number(("sliding_window",), 1, 1 << 40, add="window")
        kinds, pattern = (
            self._own.get("layer_types"),
            self._own.get("sliding_window_pattern", _WINDOWS.get(self._type)),
        )
        if isinstance(kinds, list):
            if len(kinds) != every:
                raise InvalidModel(
                    "layer_types", Shown(f"{len(kinds)} names"), f"one for each of {every} layers"
                )
            having = [index for index in range(layers) if kinds[index] == _KINDS[1]]
        elif (
            type(pattern) is int
            and 0 <= pattern <= MAX_LAYERS
            and not self._type.startswith(_ASKED_WINDOWS)
        ):
            having = [index for index in range(layers) if not pattern or (index + 1) % pattern]
        else:
            raise InvalidModel(
                "layer_types", MISSING, f"the layers of the window; {_add('window')}"
            )
        tokens += self._type.startswith("cohere2")  # vLLM counts the token itself, too
        if len(having) == layers:
            return f"{tokens}"
        items = [
            f"{first}" if first == last else f"{first}-{last}{f'/{step}' if step > 1 else ''}"
            for first, last, step in progressions(having)
        ]
        return f"{tokens}@{'+'.join(items)}" if having else ""

    def _number(self, keys: Sequence[str], low: int, high: int = MAX_SIZE, *, add: str = "") -> int:
        """The first of these keys that is there, a whole number."""
        key = next((key for key in keys if key in self._own), keys[0])
        value = self._own.get(key, MISSING)
        if type(value) is not int or not low <= value <= high:
            raise InvalidModel(
                key, value, f"a whole number from {low} to {high}{f'; {_add(add)}' if add else ''}"
            )
        return value


def _add(key: str) -> str:
    return f"or add {_EXAMPLES[key]} behind a comma"


def _not_here(field: str, value: object, why: str, keys: str = "") -> InvalidModel:
    """The error for a model that config.json does not describe, with what to do."""
    do = "start an engine with the key description_file and give that file"
    return InvalidModel(
        field,
        value,
        f"another model: {why}; {do}{f', or add {keys} behind a comma' if keys else ''}",
    )
