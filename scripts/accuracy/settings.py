"""Settings of the accuracy test: the environment variables as a frozen value, checked before anything is installed.

The fields of `Settings` are the table of variables: `--help` and all errors come from it. Standard library only.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

from scripts.accuracy.devices import hand_out_gpus, visible_gpus

ROOT = Path(__file__).resolve().parent.parent.parent
STOCK = "stock"
DEFAULT_MODEL = "SmolLM2-135M-Instruct"
TINY_MODEL = "tiny-llama"
TINY_MODELS = {TINY_MODEL: 4, "tiny-llama-2-kv-heads": 2, "tiny-llama-1-kv-head": 1}
"""Models of random weights, with their KV heads."""
SMALL_MODELS = ("small-mla", "small-mamba2-hybrid", "small-gdn-hybrid")
"""Models of random weights of other kinds, as `tests/vllm/small_models.py` has them."""
RANDOM_MODELS = (*TINY_MODELS, *SMALL_MODELS)
ATTENTION_HEADS = {
    DEFAULT_MODEL: 9,
    **dict.fromkeys(TINY_MODELS, 8),
    **dict.fromkeys(SMALL_MODELS, 4),
}
"""Of the models that are made here; tensor parallel sizes must divide them."""
_WITH_EXPERTS = "small-gdn-hybrid"
_WITHOUT_EXPERTS = (DEFAULT_MODEL, *TINY_MODELS, "small-mamba2-hybrid")
_LAYOUTS = ("", "HND", "NHD", "LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""Of vLLM's VLLM_KV_CACHE_LAYOUT: L layers, B blocks, H heads, N tokens, C the bytes of a token and head. HND is LBHNC,
NHD is LBNHC."""
_CPU_LAYOUTS = ("", "HND", "LBHNC")
_CROSS_LAYERS = {
    "NHD": "BLNHC",
    "LBNHC": "BLNHC",
    "": "BLHNC",
    "HND": "BLHNC",
    "LBHNC": "BLHNC",
}
"""The layout with all layers of a block side by side, instead of each that has a layer's blocks side by side."""
_MOST_MEMORY = 0.9
"""Share of a GPU's memory for all engines on it; the rest is for their CUDA contexts."""


class BadSetting(Exception):
    """A variable, or the combination of several, cannot be used; the text names value and valid ones."""

    @classmethod
    def of(cls, name: str, value: str, valid: str) -> BadSetting:
        """One variable with a value that it may not have."""
        return cls(f"{name}={value!r} cannot be used: {name} must be {valid}")


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable. `parse` takes its text or the default, and raises a ValueError that says what is valid."""

    name: str
    default: str
    doc: str
    parse: Callable[[str], Any]
    upstream: bool

    def read(self, environment: Mapping[str, str]) -> Any:
        """Its value; an empty text is the default.

        Raises:
            BadSetting: it is not valid.
        """
        text = environment.get(self.name, "").strip() or self.default
        try:
            return self.parse(text)
        except ValueError as invalid:
            raise BadSetting.of(self.name, text, str(invalid)) from None


def _theirs(
    name: str, default: str, doc: str, parse: Callable[[str], Any] = str
) -> Any:
    return field(
        metadata={"variable": Variable(name, default, doc, parse, upstream=True)}
    )


def _ours(name: str, default: str, doc: str, parse: Callable[[str], Any] = str) -> Any:
    return field(
        metadata={"variable": Variable(name, default, doc, parse, upstream=False)}
    )


def _number(
    kind: type[int] | type[float], low: float, high: float
) -> Callable[[str], float]:
    valid = f"a {'whole ' if kind is int else ''}number from {low} to {high}"

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise ValueError(valid) from None
        if not low <= value <= high:
            raise ValueError(valid)
        return value

    return parse


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(
                f"one of {', '.join(choice or 'empty' for choice in choices)}"
            )
        return text

    return parse


def _names(text: str) -> tuple[str, ...]:
    found = tuple(text.replace(",", " ").split())
    if not found:
        raise ValueError("at least one name")
    return found


def _arguments(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise ValueError('a JSON object such as {"kv_lease_duration": 10}')
    return value


def _block_size(text: str) -> int | None:
    if text == "auto":
        return None
    value = int(text) if text.isdecimal() else 0
    if not 1 <= value <= 8192 or (value & (value - 1) and value % 16):
        raise ValueError("auto, a power of two or a multiple of 16, at most 8192")
    return value


def _path(text: str) -> Path:
    return ROOT / Path(text).expanduser()


_sizes = _number(int, 1, 64)


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that a run depends on. The first group has the names of vLLM's own script, with their meanings.

    `decode_size`: tensor parallel size of a decode engine, or its data parallel ranks (`dp_ep`).
    """

    models: tuple[str, ...] = _theirs(
        "MODEL_NAMES",
        DEFAULT_MODEL,
        f"models: names on a hub, folders; random: {', '.join((*TINY_MODELS, *SMALL_MODELS))}",
        _names,
    )
    prefill_instances: int = _theirs(
        "NUM_PREFILL_INSTANCES", "1", "prefill engines", _sizes
    )
    decode_instances: int = _theirs(
        "NUM_DECODE_INSTANCES", "1", "decode engines", _sizes
    )
    prefill_tp: int = _theirs(
        "PREFILLER_TP_SIZE", "1", "tensor parallel size of each prefill engine", _sizes
    )
    decode_size: int = _theirs(
        "DECODER_TP_SIZE", "1", "tensor parallel size of each decode engine", _sizes
    )
    prefill_block_size: int | None = _theirs(
        "PREFILL_BLOCK_SIZE",
        "auto",
        "tokens in a block of the prefill engines",
        _block_size,
    )
    decode_block_size: int | None = _theirs(
        "DECODE_BLOCK_SIZE",
        "auto",
        "tokens in a block of the decode engines",
        _block_size,
    )
    gpu_memory_utilization: float = _theirs(
        "GPU_MEMORY_UTILIZATION",
        "0.2",
        "share of each GPU's memory",
        _number(float, 0.01, 1),
    )
    decode_layout: str = _theirs(
        "DECODER_KV_LAYOUT",
        "",
        "cache layout of the decode engines: HND, NHD, or one of vLLM's other names (LBHNC, BLHNC, …)",
        _one_of(*_LAYOUTS),
    )
    attention_backend: str = _theirs(
        "ATTENTION_BACKEND", "", "vLLM's --attention-backend for all engines"
    )
    extra_args: tuple[str, ...] = _theirs(
        "VLLM_SERVE_EXTRA_ARGS",
        "",
        "more arguments for all engines, separated by commas",
        _arguments,
    )
    # Upstream tests whether it is set: "0" switches it on too.
    dp_ep: bool = _theirs(
        "DP_EP",
        "",
        "if set, DECODER_TP_SIZE data parallel ranks of TP 1 with expert parallelism for each decode engine",
        bool,
    )

    kv_buffer_device: str = _ours(
        "KV_BUFFER_DEVICE",
        "",
        "like --kv_buffer_device; cpu: through host memory; empty: cuda on GPUs, else cpu",
        _one_of("", "cuda", "cpu"),
    )
    prefill_layout: str = _ours(
        "PREFILLER_KV_LAYOUT",
        "",
        "cache layout of the prefill engines, as DECODER_KV_LAYOUT",
        _one_of(*_LAYOUTS),
    )
    cross_layers: bool = _ours(
        "CROSS_LAYERS",
        "",
        "if set, like --enable-cross-layers: all layers of a block side by side, on both sides",
        bool,
    )
    prefill_pp: int = _ours(
        "PREFILLER_PP_SIZE", "1", "pipeline stages of each prefill engine", _sizes
    )
    decode_pp: int = _ours(
        "DECODER_PP_SIZE", "1", "pipeline stages of each decode engine", _sizes
    )
    device: str = _ours(
        "KVFERRY_DEVICE",
        "auto",
        "auto: CUDA when there are GPUs, else CPU",
        _one_of("auto", "cpu", "cuda"),
    )
    dtype: str = _ours(
        "DTYPE",
        "auto",
        "auto: float32 on CPU (exact comparison), bfloat16 on CUDA",
        _one_of("auto", "float32", "bfloat16", "float16"),
    )
    failure_policy: str = _ours(
        "KV_LOAD_FAILURE_POLICY",
        "recompute",
        "vLLM's policy for failed loads",
        _one_of("recompute", "fail"),
    )
    extra_config: Mapping[str, Any] = _ours(
        "KV_CONNECTOR_EXTRA_CONFIG",
        "{}",
        "kv_connector_extra_config, as JSON",
        _json_object,
    )
    max_model_len: int = _ours(
        "MAX_MODEL_LEN",
        "2048",
        "tokens of the longest request",
        _number(int, 1024, 1 << 20),
    )
    cpu_cache_gib: int = _ours(
        "CPU_KVCACHE_GIB",
        "1",
        "whole GiB of KV cache of an engine on CPU",
        _number(int, 1, 1024),
    )
    concurrency: int = _ours(
        "CONCURRENCY",
        "8",
        "requests at once in the concurrent part",
        _number(int, 2, 256),
    )
    start_timeout_s: float = _ours(
        "START_TIMEOUT_S",
        "300",
        "seconds that an engine may take to start, after the download of its model",
        _number(float, 10, 7200),
    )
    request_timeout_s: float = _ours(
        "REQUEST_TIMEOUT_S",
        "120",
        "seconds that a request may take",
        _number(float, 5, 3600),
    )
    log_dir: Path = _ours(  # noqa: RUF009
        "LOG_DIR",
        "logs",
        "where each run makes its folder of logs",
        _path,
    )
    cache_dir: Path = _ours(  # noqa: RUF009
        "KVFERRY_CACHE_DIR",
        "~/.cache/kvferry",
        "where the converted default model is kept",
        _path,
    )
    connector_module: str = _ours(
        "KV_CONNECTOR_MODULE",
        "kvferry.connector",
        "module of the class NixlConnector; `stock` for vLLM's own",
    )

    gpus: tuple[str, ...] = ()
    """Names of the GPUs; empty on CPU."""

    @property
    def decode_tp(self) -> int:
        """Tensor parallel size of a decode engine."""
        return 1 if self.dp_ep else self.decode_size

    @property
    def decode_dp(self) -> int:
        """Data parallel ranks of a decode engine."""
        return self.decode_size if self.dp_ep else 1

    @property
    def prefill_workers(self) -> int:
        """Of each prefill engine."""
        return self.prefill_tp * self.prefill_pp

    @property
    def decode_workers(self) -> int:
        """Of each decode engine."""
        return self.decode_size * self.decode_pp

    @property
    def ferry(self) -> bool:
        """Whether kvferry is tried, not vLLM's own connector."""
        return self.connector_module != STOCK

    @property
    def engines(self) -> tuple[str, str]:
        """The prefill and the decode engines in words: `2 prefill × TP 2 × PP 2`."""
        decode = f"{f'DP {self.decode_dp} × ' if self.decode_dp > 1 else ''}TP {self.decode_tp}"
        sides = (
            ("prefill", f"TP {self.prefill_tp}", self.prefill_pp),
            ("decode", decode, self.decode_pp),
        )
        texts = [
            f"{name} × {ranks}{f' × PP {stages}' if stages > 1 else ''}"
            for name, ranks, stages in sides
        ]
        return (
            f"{self.prefill_instances} {texts[0]}",
            f"{self.decode_instances} {texts[1]}",
        )


VARIABLES: dict[str, Variable] = {
    each.name: each.metadata["variable"]
    for each in fields(Settings)
    if "variable" in each.metadata
}
"""By the name of the field."""


def read_settings(environment: Mapping[str, str], gpus: int | None = None) -> Settings:
    """Read and check the environment.

    Args:
        gpus: how many GPUs the driver lists; None to ask it.

    Raises:
        BadSetting: a variable, or the combination of several, cannot be used.
    """
    settings = Settings(
        **{name: variable.read(environment) for name, variable in VARIABLES.items()}
    )
    found = visible_gpus(environment, gpus)
    if settings.device == "auto":
        settings = replace(settings, device="cuda" if found else "cpu")
    if settings.dtype == "auto":
        settings = replace(
            settings, dtype="float32" if settings.device == "cpu" else "bfloat16"
        )
    if settings.cross_layers and settings.device == "cuda":
        decode = _CROSS_LAYERS.get(settings.decode_layout, settings.decode_layout)
        prefill = _CROSS_LAYERS.get(settings.prefill_layout, settings.prefill_layout)
        settings = replace(settings, decode_layout=decode, prefill_layout=prefill)
    is_chosen = bool(environment.get(VARIABLES["models"].name, "").strip())
    heads = ATTENTION_HEADS[DEFAULT_MODEL]
    if not is_chosen and (heads % settings.prefill_tp or heads % settings.decode_tp):
        settings = replace(settings, models=(TINY_MODEL,))
    _check_models(settings)
    if settings.device == "cpu":
        _check_cpu(settings)
    else:
        settings = replace(settings, gpus=found)
        _check_gpus(settings)
    return settings


def _check_models(settings: Settings) -> None:
    """What of a model is known before anything is installed: those made here, and folders."""
    for name in settings.models:
        heads = ATTENTION_HEADS.get(name) or _config_in(
            ROOT / Path(name).expanduser()
        ).get("num_attention_heads")
        check_heads(name, heads, settings)
        if settings.dp_ep and name in _WITHOUT_EXPERTS:
            raise BadSetting.of(
                "MODEL_NAMES",
                name,
                f"a model with experts for DP_EP, for instance {_WITH_EXPERTS}",
            )


def check_heads(name: str, heads: int | None, settings: Settings) -> None:
    """Tensor parallel sizes must divide a model's attention heads, or its engines end while they start.

    Raises:
        BadSetting: one does not.
    """
    sizes = {
        "PREFILLER_TP_SIZE": settings.prefill_tp,
        "DECODER_TP_SIZE": settings.decode_tp,
    }
    for variable, size in sizes.items():
        if heads and heads % size:
            more = (
                f"; MODEL_NAMES={TINY_MODEL} has sizes 1, 2, 4 and 8"
                if name in ATTENTION_HEADS
                else ""
            )
            raise BadSetting.of(
                variable,
                str(size),
                f"a divisor of {heads}, the attention heads of {name}{more}",
            )


def _config_in(folder: Path) -> dict[str, Any]:
    """A folder's config.json; empty if it has none that can be read."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _check_cpu(settings: Settings) -> None:
    for name, layout in (
        ("DECODER", settings.decode_layout),
        ("PREFILLER", settings.prefill_layout),
    ):
        if layout not in _CPU_LAYOUTS:
            valid = "HND, LBHNC or empty on CPU, whose attention has no other layout"
            raise BadSetting.of(f"{name}_KV_LAYOUT", layout, valid)
    if settings.kv_buffer_device == "cuda":
        raise BadSetting.of(
            "KV_BUFFER_DEVICE",
            "cuda",
            "cpu or empty on CPU, where all caches are in host memory",
        )


def _check_gpus(settings: Settings) -> None:
    """Each engine has GPUs of its own while there are enough; engines share GPUs otherwise, if their memory lasts."""
    engines = " + ".join(settings.engines)
    if not settings.gpus:
        raise BadSetting(
            f"KVFERRY_DEVICE=cuda needs GPUs for {engines}; nvidia-smi found none that is visible"
        )
    needs = [settings.decode_workers] * settings.decode_instances
    needs += [settings.prefill_workers] * settings.prefill_instances
    try:
        shares = hand_out_gpus(needs, settings.gpus)
    except ValueError as error:
        lower = "lower PREFILLER_TP_SIZE, DECODER_TP_SIZE or the stages, or set KVFERRY_DEVICE=cpu"
        raise BadSetting(
            f"{engines}: {error} (each worker of an engine needs its own); {lower}"
        ) from None
    users = Counter(chain.from_iterable(shares))
    most, number = users.most_common(1)[0]
    if number > 1 and number * settings.gpu_memory_utilization > _MOST_MEMORY:
        share = f"at most {_MOST_MEMORY / number:.2g}: {number} engines share GPU {most} ({engines}; "
        share += f"{len(set(settings.gpus))} GPUs)"
        raise BadSetting.of(
            "GPU_MEMORY_UTILIZATION", f"{settings.gpu_memory_utilization:g}", share
        )


def notes(settings: Settings, environment: Mapping[str, str]) -> list[str]:
    """What a user may not expect of a run with these settings."""
    said: list[str] = []
    if (
        settings.models == (TINY_MODEL,)
        and not environment.get(VARIABLES["models"].name, "").strip()
    ):
        said.append(
            f"MODEL_NAMES is not set: {TINY_MODEL}, of random weights, is taken, since {DEFAULT_MODEL} has "
            f"{ATTENTION_HEADS[DEFAULT_MODEL]} attention heads, which the tensor parallel sizes do not divide"
        )
    if settings.cross_layers and settings.device == "cpu":
        said.append(
            "--enable-cross-layers changes nothing on CPU, whose attention has one layout"
        )
    workers = settings.decode_instances * settings.decode_workers
    workers += settings.prefill_instances * settings.prefill_workers
    if settings.gpus and workers > len(settings.gpus):
        said.append(
            f"{workers} workers share {len(settings.gpus)} GPUs; engines on one GPU start one after the other"
        )
    return said


def help_text() -> str:
    """The table for `--help`."""
    lines: list[str] = []
    for upstream, title in (
        (True, "As in vLLM's own script of this name:"),
        (False, "Here only:"),
    ):
        lines.append(title)
        for variable in VARIABLES.values():
            if variable.upstream is upstream:
                default = f" [{variable.default}]" if variable.default else ""
                lines.append(f"  {variable.name:<26} {variable.doc}{default}")
    return "\n".join(lines)
