"""The settings that change the values of keys and values, as this engine runs with them.

Two engines may hand caches over only if they compute the same function. The weights are covered by the fingerprint,
types and sizes by the facts and the tensors. What is left is the model's configuration and a few options of vLLM:

- the configuration, resolved once more by vLLM's own function (`resolved_config`);
- what vLLM decides when the model is built, decided here by the same rule (`_decided_by_length`);
- what the processor makes of media, and the model's own code.

Settings that cannot change a value are left out, or equal engines would refuse each other: see `_IRRELEVANT`.
`docs/compatibility.md` has the whole list, and a test compares it with the fields of vLLM's configuration.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvferry.connector.engine.fingerprint import (
    fingerprint,
    local_model_dir,
    local_weights_dir,
    read_json,
)
from kvferry.connector.vllm.model_config import (
    config_revision,
    model_class_name,
    read_model_config,
)
from kvferry.protocol.handshake import MAX_SETTINGS, Setting

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = logging.getLogger(__name__)

_IRRELEVANT = frozenset(
    {
        # of the file, not of the model
        "transformers_version",
        "name_or_path",
        # compared otherwise: the type as a fact, the class by the name that vLLM has resolved, code by its content
        "dtype",
        "torch_dtype",
        "architectures",
        "auto_map",
        # what is done with ids and logits
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "decoder_start_token_id",
        "tokenizer_class",
        "tie_word_embeddings",
        "final_logit_softcapping",
        # what transformers returns
        "use_cache",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "chunk_size_feed_forward",
        "problem_type",
        "id2label",
        "label2id",
        "num_labels",
        # training
        "initializer_range",
        "initializer_factor",
        "pretraining_tp",
        "gradient_checkpointing",
        "router_aux_loss_coef",
        # the length of tables, see `_decided_by_length`
        "max_position_embeddings",
    }
)
"""Keys of a model's configuration, at any depth, that cannot change the values of keys and values."""

_LONGROPE = frozenset({"longrope", "su"})
_ROPE_WITHOUT_LENGTH = frozenset(
    {
        "default",
        "linear",
        "llama3",
        "yarn",
        "deepseek_yarn",
        "deepseek_llama_scaling",
        "mllama4",
        "proportional",
        "mrope",
        "bailing_mrope",
        "openpangu",
    }
)
"""Rotary embeddings whose value at a position does not depend on how many positions there are."""

_LENGTH_IS_OF_THE_ENGINE = ("MiniMax", "Plamo3", "CohereCompass", "EmbeddingGemma2")
"""Classes of models that give their rotary embedding `--max-model-len` as the number of positions."""

_LLAMA_4 = frozenset({"llama4", "llama4_text"})
_TUNES_ABOVE_TOKENS = 32768
"""vLLM tunes Llama-4's attention temperature by default if sequences may be longer."""

_PROCESSOR_FILES = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
_MAX_NAME = 400
_MAX_VALUE = 160
_MAX_DEPTH = 16


def settings_of(vllm_config: VllmConfig) -> tuple[Setting, ...]:
    """The settings of an engine, sorted by name; at most `MAX_SETTINGS`."""
    values = dict(_of_model(vllm_config.model_config, vllm_config))
    draft = draft_model_of(vllm_config)
    if draft is not None:
        for name, value in _of_model(draft, vllm_config):
            values[f"draft.{name}"] = value
        values["draft.dtype"] = str(draft.dtype).removeprefix("torch.")
        values["draft.quantization"] = draft.quantization
        # A drafter within the model's own files is covered by their fingerprint.
        if draft.model != vllm_config.model_config.model:
            values["draft.weights"] = weights_of(draft, vllm_config)
    texts: dict[str, str] = {}
    for name, value in values.items():
        text = _text(value)
        if text is not None:
            texts[_printable(name)] = text
    settings = tuple(Setting(name=name, value=texts[name]) for name in sorted(texts))
    if len(settings) <= MAX_SETTINGS:
        return settings
    # The wire takes no more. The rest is compared as one, so a difference in it is still found, but not named.
    kept = settings[: MAX_SETTINGS - 1]
    rest = settings[MAX_SETTINGS - 1 :]
    digest = _digest("".join(f"{setting.name}={setting.value};" for setting in rest))
    return (*kept, Setting(name="others", value=f"{len(rest)} settings, {digest}"))


_DRAFTS_WITHOUT_CACHE = frozenset(
    {"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"}
)
"""N-grams, suffixes and heads without attention keep nothing for a prompt: engines that differ in them have equal
caches."""


def draft_method(vllm_config: VllmConfig) -> str:
    """The draft method if its drafter has a cache, else `none`."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return "none"
    method = str(speculative.method)
    if method in _DRAFTS_WITHOUT_CACHE:
        return "none"
    return method


def draft_model_of(vllm_config: VllmConfig) -> ModelConfig | None:
    """The draft model, if it has a cache."""
    if draft_method(vllm_config) == "none":
        return None
    return getattr(vllm_config.speculative_config, "draft_model_config", None)


def weights_of(model: ModelConfig, vllm_config: VllmConfig) -> str:
    """The fingerprint of a model's weights; see `fingerprint`. Its configuration is compared by the settings."""
    if str(vllm_config.load_config.load_format) == "dummy":
        return fingerprint({}, None, f"dummy:{model.seed}")
    download_dir = vllm_config.load_config.download_dir
    return fingerprint({}, local_weights_dir(model.model, model.revision, download_dir))


def model_dir(model: ModelConfig, vllm_config: VllmConfig) -> Path | None:
    """Where the configuration of a model is on this machine, or None; its weights may be elsewhere."""
    return local_model_dir(
        model.model, model.revision, vllm_config.load_config.download_dir
    )


def _of_model(model: ModelConfig, vllm_config: VllmConfig) -> Iterator[tuple[str, Any]]:
    """The settings of one model, as (name, value); some values say nothing, see `_text`."""
    directory = model_dir(model, vllm_config)
    config = resolved_config(model, _config_dir(model, directory, vllm_config))
    left_out = _IRRELEVANT
    if config.get("model_type") in _LLAMA_4:
        # Not what the configuration says: `_tunes_temperature` decides it.
        left_out = _IRRELEVANT | {"attn_temperature_tuning"}
    yield from _flat("config", config, left_out)
    yield from _decided_by_length(model, vllm_config, config)
    yield from _flat("online_quantization", getattr(model, "quantization_config", None))
    yield "model_class", model_class_name(model)
    yield from _flat(
        "model_class.overrides", getattr(model, "model_class_overrides", None)
    )
    if getattr(model, "multimodal_config", None) is not None:
        yield from _of_media(model, directory)
    if _runs_own_code(model):
        yield "code", _digest_of_code(directory)


# The model's configuration.


def resolved_config(model: ModelConfig, directory: Path | None) -> dict[str, Any]:
    """A model's configuration as vLLM resolves it: from the folder of its `config.json`, overrides applied.

    Args:
        directory: where its `config.json` is on this machine; the network is not used. If it is not there, or is not
            read, the configuration in memory is taken.
    """
    # The configuration in memory is not the first choice. Models change theirs while they are loaded, in the workers
    # only, and some write sizes of this engine into it: equal engines would differ.
    if directory is not None:
        try:
            return read_model_config(model, directory)
        except Exception as error:  # noqa: BLE001 - any code of a model may run here, and must not stop the start
            logger.warning(
                "the configuration of %s is taken from memory: %r", model.model, error
            )
    config: dict[str, Any] = model.hf_config.to_dict()
    return config


def _config_dir(
    model: ModelConfig, directory: Path | None, vllm_config: VllmConfig
) -> Path | None:
    """The folder of the `config.json` that the engine uses; None if it is not on this machine.

    Args:
        directory: the folder of the model.
    """
    # vLLM can take the configuration from elsewhere than the weights (`--hf-config-path`).
    path = getattr(model, "hf_config_path", None)
    if path is not None and path != model.model:
        revision = config_revision(model)
        directory = local_model_dir(
            path, revision, vllm_config.load_config.download_dir
        )
    if directory is None:
        return None
    for name in ("config.json", "params.json"):
        if (directory / name).is_file():
            return directory
    return None


# What vLLM decides when the model is built.


def _decided_by_length(
    model: ModelConfig, vllm_config: VllmConfig, config: Any
) -> Iterator[tuple[str, Any]]:
    """Decisions by the longest sequence. Wherever there is none of these, engines may differ in `--max-model-len`."""
    target_length = _length_at_load(vllm_config.model_config)
    # A drafter is built with its own length or with the target's, which depends on the method. So both are compared.
    lengths = (target_length, _length_at_load(model))
    ropes = list(_ropes(config))
    for path, rope, original in ropes:
        if _rope_type(rope) in _LONGROPE:
            factors = dict.fromkeys(_factors(length, original) for length in lengths)
            yield f"longrope.{path}", "/".join(factors)
    if any(_rope_type(rope) not in _ROPE_WITHOUT_LENGTH for _, rope, _ in ropes):
        for path, value in _flat("config", config):
            if _last_key(path) == "max_position_embeddings":
                yield path, value
        if str(getattr(model, "_architecture", "")).startswith(
            _LENGTH_IS_OF_THE_ENGINE
        ):
            yield "max_model_len", target_length
    if config.get("model_type") in _LLAMA_4:
        yield "attention_temperature", _tunes_temperature(model, target_length)


def _length_at_load(model: ModelConfig) -> int:
    """The longest sequence when the model was built."""
    length = model.max_model_len
    if getattr(model, "original_max_model_len", None) == -1:
        # `--max-model-len auto`: vLLM shortens it to the cache's size after the model was built.
        length = max(length, model.get_and_verify_max_len(-1))
    return int(length)


def _last_key(path: str) -> str:
    return path.rpartition(".")[2]


def _factors(length: int, original: Any) -> str:
    """LongRoPE has factors for short sequences and for long ones, and vLLM uses one kind for all of an engine's."""
    if not isinstance(original, int | float):
        return f"of a --max-model-len of {length}"
    if length > original:
        return "long"
    return "short"


def _ropes(
    config: Any, path: str = "config", original: Any = None
) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Every rotary embedding in a configuration: its path, its parameters, and its `original_max_position_embeddings`.

    Args:
        original: that of the configuration around this one, where the key may be as well.
    """
    if not isinstance(config, dict) or path.count(".") > _MAX_DEPTH:
        return
    original = config.get("original_max_position_embeddings", original)
    is_rope = "rope_type" in config or _last_key(path).startswith("rope")
    if is_rope and _rope_type(config) is not None:
        yield path, config, original
        return
    for key, inner in config.items():
        yield from _ropes(inner, f"{path}.{key}", original)


def _rope_type(rope: Mapping[str, Any]) -> str | None:
    rope_type = rope.get("rope_type", rope.get("type"))
    return rope_type if isinstance(rope_type, str) else None


def _tunes_temperature(model: ModelConfig, length: int) -> Any:
    """Whether Llama-4's attention is tuned: vLLM reads it from the generation config, not from the model's."""
    generation: dict[str, Any] = {}
    try:
        generation = dict(model.try_get_generation_config())
    except Exception as error:  # noqa: BLE001 - it may need the network; the model itself could not be loaded then
        logger.warning(
            "the generation config of %s cannot be read: %r", model.model, error
        )
    generation.update(model.override_generation_config or {})
    return generation.get("attn_temperature_tuning", length > _TUNES_ABOVE_TOKENS)


# Media, and the model's own code.


def _of_media(model: ModelConfig, directory: Path | None) -> Iterator[tuple[str, Any]]:
    """vLLM identifies an image by its content as it was sent. What the processor makes of it is set here."""
    media: Any = model.multimodal_config
    yield from _flat("media.processor", media.mm_processor_kwargs, {"device"})
    yield from _flat("media.io", media.media_io_kwargs)
    if media.video_pruning_rate:
        yield (
            "media.video_pruning",
            [media.video_pruning_method, media.video_pruning_rate],
        )
    if media.mm_encoder_attn_dtype is not None:
        yield "media.encoder_attention", media.mm_encoder_attn_dtype
        if media.mm_encoder_fp8_scale_path is not None:
            scales = read_json(Path(media.mm_encoder_fp8_scale_path))
            yield from _flat("media.encoder_scales", scales)
    if directory is None:
        return
    for name in _PROCESSOR_FILES:
        path = f"processor.{name.removesuffix('.json')}"
        yield from _flat(path, read_json(directory / name), {"auto_map"})


def _runs_own_code(model: ModelConfig) -> bool:
    """Whether code beside the model computes keys and values."""
    if not model.trust_remote_code or not getattr(model.hf_config, "auto_map", None):
        return False
    # Such code prepares media, or is the model itself where vLLM has no implementation. For all other models it is only
    # the class of the configuration, and that is compared as it was resolved.
    return model.multimodal_config is not None or bool(
        model.using_transformers_backend()
    )


def _digest_of_code(directory: Path | None) -> str | None:
    if directory is None:
        return None
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(directory.glob("*.py")):
        text = file.read_bytes()
        digest.update(f"{file.name} {len(text)} ".encode())
        digest.update(text)
    return digest.hexdigest()


# Values as text.


def _flat(
    path: str, value: Any, without: frozenset[str] | set[str] = frozenset()
) -> Iterator[tuple[str, Any]]:
    """The leaves of nested objects, each with its path.

    Args:
        without: keys that are left out, at any depth.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if not isinstance(value, Mapping) or path.count(".") > _MAX_DEPTH:
        yield path, value
        return
    for key, inner in value.items():
        name = str(key)
        # Keys with an underscore are transformers' own; dropouts act in training only.
        if name in without or name.startswith("_") or "dropout" in name:
            continue
        yield from _flat(f"{path}.{name}", inner, without)


def _text(value: Any) -> str | None:
    """A value as one line of text, equal for equal values: `10000.0` is `10000`. None for what says nothing."""
    plain = _plain(value)
    # An option that is absent in one release of a library is often empty in the next.
    if plain is None or plain in ([], {}):
        return None
    text = json.dumps(plain, sort_keys=True)
    if len(text) <= _MAX_VALUE:
        return text
    beginning = text[: _MAX_VALUE // 2]
    return f"{beginning}… ({len(text)} characters, {_digest(text)})"


def _plain(value: Any) -> Any:
    """A value of plain types, as JSON has them."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, set | frozenset):
        return sorted(str(inner) for inner in value)
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    text = str(value)
    if " at 0x" in text:
        # The address of an object is another one in every process.
        return type(value).__qualname__
    return text


def _printable(name: str) -> str:
    """A name as the wire takes it: a configuration may have any text as a key."""
    characters = []
    for character in name[:_MAX_NAME]:
        is_accepted = character.isascii() and character.isprintable()
        characters.append(character if is_accepted else "?")
    return "".join(characters)


def _digest(text: str) -> str:
    # `surrogatepass`: a configuration may have lone surrogates in its texts.
    return hashlib.blake2b(
        text.encode("utf-8", "surrogatepass"), digest_size=8
    ).hexdigest()
