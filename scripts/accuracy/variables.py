"""The environment variables: one table with name, default, meaning and check. `--help` and all errors come from it.

Names and meanings of the first group are those of the script of this name in vLLM's own tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


class BadSetting(Exception):
    """A variable cannot be used; the text names it, its value and what is valid."""

    def __init__(self, name: str, value: str, valid: str) -> None:
        super().__init__(f"{name}={value!r} cannot be used: {name} must be {valid}")


class Invalid(Exception):
    """A value is not valid; the text says what is."""


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable. `parse` takes the text and raises `Invalid`; the default is a text too, shown in `--help`."""

    name: str
    default: str
    doc: str
    parse: Callable[[str], Any]
    upstream: bool = False

    def read(self, environment: Mapping[str, str]) -> Any:
        """Its value; an empty text is the default.

        Raises:
            BadSetting: it is not valid.
        """
        text = environment.get(self.name, "").strip() or self.default
        try:
            return self.parse(text)
        except Invalid as invalid:
            raise BadSetting(self.name, text, str(invalid)) from None


def whole(low: int, high: int) -> Callable[[str], int]:
    """A whole number within bounds."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise Invalid(f"a whole number from {low} to {high}")
        return value

    return parse


def number(low: float, high: float) -> Callable[[str], float]:
    """A number within bounds."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise Invalid(f"a number from {low:g} to {high:g}")
        return value

    return parse


def one_of(*choices: str) -> Callable[[str], str]:
    """One of a few words."""

    def parse(text: str) -> str:
        if text not in choices:
            raise Invalid(f"one of {', '.join(choice or 'empty' for choice in choices)}")
        return text

    return parse


def is_set(text: str) -> bool:
    """Any text but the empty one, as upstream tests a switch: also `0` switches it on."""
    return bool(text)


def anything(text: str) -> str:
    """Any text."""
    return text


def words(text: str) -> tuple[str, ...]:
    """A list, separated by commas or blanks."""
    found = tuple(text.replace(",", " ").split())
    if not found:
        raise Invalid("at least one name")
    return found


def arguments(text: str) -> tuple[str, ...]:
    """Command line arguments, separated by commas, as upstream has them."""
    return tuple(part for part in text.split(",") if part)


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise Invalid('a JSON object such as {"kv_lease_duration": 10}')
    return value


def layout(text: str) -> str:
    """A cache layout; empty for the connector's own choice."""
    if text not in ("", "HND", "NHD"):
        raise Invalid("HND, NHD or empty")
    return text


def block_size(text: str) -> int | None:
    """A block size, or `auto` for the engine's own choice."""
    if text == "auto":
        return None
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= 8192 or (value & (value - 1) and value % 16):
        raise Invalid("auto, a power of two or a multiple of 16, at most 8192")
    return value


DEFAULT_MODEL = "SmolLM2-135M-Instruct"
TINY_MODEL = "tiny-llama"
TINY_MODELS = {TINY_MODEL: 4, "tiny-llama-2-kv-heads": 2, "tiny-llama-1-kv-head": 1}
"""Models of random weights, with their KV heads."""

VARIABLES: tuple[Variable, ...] = (
    Variable(
        "MODEL_NAMES", DEFAULT_MODEL, f"models: names on a hub, folders; random: {', '.join(TINY_MODELS)}", words, True
    ),
    Variable("NUM_PREFILL_INSTANCES", "1", "prefill engines", whole(1, 64), True),
    Variable("NUM_DECODE_INSTANCES", "1", "decode engines", whole(1, 64), True),
    Variable("PREFILLER_TP_SIZE", "1", "tensor parallel size of each prefill engine", whole(1, 64), True),
    Variable("DECODER_TP_SIZE", "1", "tensor parallel size of each decode engine", whole(1, 64), True),
    Variable("PREFILL_BLOCK_SIZE", "auto", "tokens in a block of the prefill engines", block_size, True),
    Variable("DECODE_BLOCK_SIZE", "auto", "tokens in a block of the decode engines", block_size, True),
    Variable("GPU_MEMORY_UTILIZATION", "0.2", "share of each GPU's memory", number(0.01, 1.0), True),
    Variable("DECODER_KV_LAYOUT", "", "cache layout of the decode engines: HND or NHD", layout, True),
    Variable("ATTENTION_BACKEND", "", "vLLM's --attention-backend for all engines", anything, True),
    Variable("VLLM_SERVE_EXTRA_ARGS", "", "more arguments for all engines, separated by commas", arguments, True),
    Variable(
        "DP_EP",
        "",
        "if set, DECODER_TP_SIZE data parallel ranks of TP 1, experts shared out, on decoders",
        is_set,
        True,
    ),
    Variable(
        "KV_BUFFER_DEVICE",
        "",
        "like --kv_buffer_device; cpu: through host memory; empty: cuda on GPUs, else cpu",
        one_of("", "cuda", "cpu"),
    ),
    Variable("PREFILLER_PP_SIZE", "1", "pipeline stages of each prefill engine", whole(1, 64)),
    Variable("DECODER_PP_SIZE", "1", "pipeline stages of each decode engine", whole(1, 64)),
    Variable("KVFERRY_DEVICE", "auto", "auto: CUDA when there are GPUs, else CPU", one_of("auto", "cpu", "cuda")),
    Variable(
        "DTYPE",
        "auto",
        "auto: float32 on CPU (exact comparison), bfloat16 on CUDA",
        one_of("auto", "float32", "bfloat16", "float16"),
    ),
    Variable("KV_LOAD_FAILURE_POLICY", "recompute", "vLLM's policy for failed loads", one_of("recompute", "fail")),
    Variable("KV_CONNECTOR_EXTRA_CONFIG", "{}", "kv_connector_extra_config, as JSON", json_object),
    Variable("MAX_MODEL_LEN", "2048", "tokens of the longest request", whole(1024, 1 << 20)),
    Variable("CPU_KVCACHE_GIB", "1", "GiB of KV cache of an engine on CPU", number(0.1, 1024)),
    Variable("CONCURRENCY", "8", "requests at once in the concurrent part", whole(2, 256)),
    Variable("START_TIMEOUT_S", "300", "seconds that an engine may take to start", number(10, 7200)),
    Variable("REQUEST_TIMEOUT_S", "120", "seconds that a request may take", number(5, 3600)),
    Variable("GSM8K", "auto", "auto: when lm-eval and its data are at hand", one_of("auto", "on", "off")),
    Variable("GSM8K_LIMIT", "200", "questions of gsm8k", whole(10, 1319)),
    Variable("LOG_DIR", "logs", "where each run makes its folder of logs", anything),
    Variable("KVFERRY_CACHE_DIR", "~/.cache/kvferry", "where the converted default model is kept", anything),
    Variable(
        "KV_CONNECTOR_MODULE",
        "kvferry.connector",
        "module of the class NixlConnector; `stock` for vLLM's own",
        anything,
    ),
)


def help_text(groups: Iterable[Variable] = VARIABLES) -> str:
    """The table for `--help`."""
    lines: list[str] = []
    for upstream, title in ((True, "As in vLLM's own script of this name:"), (False, "Here only:")):
        lines.append(title)
        for variable in groups:
            if variable.upstream is upstream:
                default = f" [{variable.default}]" if variable.default else ""
                lines.append(f"  {variable.name:<26} {variable.doc}{default}")
    return "\n".join(lines)
