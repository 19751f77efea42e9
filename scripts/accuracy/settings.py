"""Settings of the accuracy test: the environment as a frozen value, checked as a whole. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.accuracy.gpus import count_gpus
from scripts.accuracy.variables import VARIABLES, BadSetting

ROOT = Path(__file__).resolve().parent.parent.parent
STOCK = "stock"


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that a run depends on."""

    device: str
    models: tuple[str, ...]
    prefill_instances: int
    decode_instances: int
    prefill_tp: int
    decode_tp: int
    decode_dp: int
    dp_ep: bool
    prefill_pp: int
    decode_pp: int
    prefill_block_size: int | None
    decode_block_size: int | None
    gpu_memory_utilization: float
    decode_layout: str
    attention_backend: str
    kv_buffer_device: str
    extra_args: tuple[str, ...]
    dtype: str
    failure_policy: str
    extra_config: Mapping[str, Any]
    max_model_len: int
    cpu_cache_gib: float
    concurrency: int
    start_timeout_s: float
    request_timeout_s: float
    gsm8k: str
    gsm8k_limit: int
    log_dir: Path
    cache_dir: Path
    connector_module: str

    @property
    def prefill_workers(self) -> int:
        """Of each prefill engine."""
        return self.prefill_tp * self.prefill_pp

    @property
    def decode_workers(self) -> int:
        """Of each decode engine."""
        return self.decode_dp * self.decode_tp * self.decode_pp

    @property
    def exact(self) -> bool:
        """Whether tokens must be equal: float32 is reproducible whatever runs beside it, bfloat16 is not."""
        return self.dtype == "float32"

    @property
    def ferry(self) -> bool:
        """Whether kvferry is tried, not vLLM's own connector."""
        return self.connector_module != STOCK


def read_settings(environment: Mapping[str, str], gpus: int | None = None) -> Settings:
    """Read and check the environment.

    Args:
        gpus: how many GPUs there are; None to count them.

    Raises:
        BadSetting: a variable, or the combination of several, cannot be used.
    """
    value = {variable.name: variable.read(environment) for variable in VARIABLES}
    found = count_gpus(environment) if gpus is None else gpus
    device = value["KVFERRY_DEVICE"]
    if device == "auto":
        device = "cuda" if found else "cpu"
    dtype = value["DTYPE"]
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    settings = Settings(
        device=device,
        models=value["MODEL_NAMES"],
        prefill_instances=value["NUM_PREFILL_INSTANCES"],
        decode_instances=value["NUM_DECODE_INSTANCES"],
        prefill_tp=value["PREFILLER_TP_SIZE"],
        decode_tp=1 if value["DP_EP"] else value["DECODER_TP_SIZE"],
        decode_dp=value["DECODER_TP_SIZE"] if value["DP_EP"] else 1,
        dp_ep=value["DP_EP"],
        prefill_pp=value["PREFILLER_PP_SIZE"],
        decode_pp=value["DECODER_PP_SIZE"],
        prefill_block_size=value["PREFILL_BLOCK_SIZE"],
        decode_block_size=value["DECODE_BLOCK_SIZE"],
        gpu_memory_utilization=value["GPU_MEMORY_UTILIZATION"],
        decode_layout=value["DECODER_KV_LAYOUT"],
        attention_backend=value["ATTENTION_BACKEND"],
        kv_buffer_device=value["KV_BUFFER_DEVICE"],
        extra_args=value["VLLM_SERVE_EXTRA_ARGS"],
        dtype=dtype,
        failure_policy=value["KV_LOAD_FAILURE_POLICY"],
        extra_config=value["KV_CONNECTOR_EXTRA_CONFIG"],
        max_model_len=value["MAX_MODEL_LEN"],
        cpu_cache_gib=value["CPU_KVCACHE_GIB"],
        concurrency=value["CONCURRENCY"],
        start_timeout_s=value["START_TIMEOUT_S"],
        request_timeout_s=value["REQUEST_TIMEOUT_S"],
        gsm8k=value["GSM8K"],
        gsm8k_limit=value["GSM8K_LIMIT"],
        log_dir=(ROOT / Path(value["LOG_DIR"]).expanduser()),
        cache_dir=Path(value["KVFERRY_CACHE_DIR"]).expanduser(),
        connector_module=value["KV_CONNECTOR_MODULE"],
    )
    check_gpus(settings, found)
    check_layout(settings)
    check_buffer(settings)
    return settings


def parallel(tp: int, pp: int, dp: int = 1) -> str:
    """An engine's parallel sizes in words."""
    sizes = {"DP": dp, "TP": tp, "PP": pp}
    return " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name == "TP")


def check_gpus(settings: Settings, found: int) -> None:
    """Every engine needs GPUs of its own.

    Raises:
        BadSetting: there are too few.
    """
    if settings.device != "cuda":
        return
    prefill = settings.prefill_instances * settings.prefill_workers
    decode = settings.decode_instances * settings.decode_workers
    if prefill + decode > found:
        need = (
            f"needs {prefill + decode} GPUs: {settings.prefill_instances} prefill × "
            f"{parallel(settings.prefill_tp, settings.prefill_pp)} + {settings.decode_instances} decode × "
            f"{parallel(settings.decode_tp, settings.decode_pp, settings.decode_dp)}; found {found}"
        )
        lower = "NUM_PREFILL_INSTANCES, NUM_DECODE_INSTANCES, PREFILLER_TP_SIZE, DECODER_TP_SIZE or the stages"
        raise TooFewGpus(f"{need}; lower {lower}, or set KVFERRY_DEVICE=cpu")


def check_layout(settings: Settings) -> None:
    """The CPU's attention has one layout.

    Raises:
        BadSetting: another is wanted.
    """
    if settings.device == "cpu" and settings.decode_layout == "NHD":
        raise BadSetting("DECODER_KV_LAYOUT", "NHD", "HND or empty on CPU, whose attention has no other layout")


def check_buffer(settings: Settings) -> None:
    """A buffer on GPUs needs GPUs.

    Raises:
        BadSetting: there are none.
    """
    if settings.device == "cpu" and settings.kv_buffer_device == "cuda":
        raise BadSetting("KV_BUFFER_DEVICE", "cuda", "cpu or empty on CPU, where all caches are in host memory")


class TooFewGpus(BadSetting):
    """There are fewer GPUs than the engines need."""

    def __init__(self, text: str) -> None:
        Exception.__init__(self, text)
