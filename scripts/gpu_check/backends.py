"""The cache probe on every attention backend that vLLM offers on this machine.

    python -m scripts.gpu_check.backends FILE [--quick]

Each backend gets an engine of its own, of one small model without weights, with the connector: what it found is in the
engine's `description_file`. One that does not start is started once more without the connector, to tell whose fault
it is. Which backends there are is asked of vLLM; those of sparse attention need models of their own and are left out.
FILE gets a list of rows as JSON; `--quick` leaves out caches of FP8.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scripts.accuracy.devices import free_ports
from tests.vllm.small_models import SMALL_MODELS

_START_S = 300.0
_LEFT_OUT = ("SPARSE", "TURBOQUANT")
"""Backends of models and of caches that are not tried here."""
_SHAPES: dict[str, dict[str, Any]] = {
    # what all backends can do: heads of 128, DeepSeek's parts of a head
    "small-llama-4": {"head_dim": 128},
    "small-mla": {"num_attention_heads": 16, "num_key_value_heads": 16, "qk_nope_head_dim": 128, "v_head_dim": 128},
}


@dataclass(frozen=True, slots=True)
class Case:
    """A backend, the dtype of its cache (`auto`: that of the model), and the model of `SMALL_MODELS`."""

    backend: str
    cache: str
    model: str


def cases(*, quick: bool) -> list[Case]:
    """All that vLLM considers on this platform, most wanted first."""
    from vllm.platforms import current_platform as platform

    found = []
    for model in _SHAPES:
        mla = model == "small-mla"
        for cache in ("auto",) if quick else ("auto", "fp8"):
            names = ["CPU_MLA" if mla else "CPU_ATTN"] if platform.is_cpu() else _considered(mla, cache)
            found += [Case(name, cache, model) for name in names if not any(word in name for word in _LEFT_OUT)]
    return found


def _considered(mla: bool, cache: Any) -> list[str]:
    import torch
    from vllm.platforms import current_platform as platform
    from vllm.v1.attention.selector import AttentionSelectorConfig

    config = AttentionSelectorConfig(
        head_size=576 if mla else 128, dtype=torch.bfloat16, kv_cache_dtype=cache, block_size=None, use_mla=mla
    )
    valid, refused = platform.get_valid_backends(platform.get_device_capability(), config, 16)
    return [one.backend.name for one in valid] + [one.name for one in refused]


def row_of(case: Case, folder: Path) -> dict[str, Any]:
    """The findings for a case: the kinds and dtypes of its tensors, or who stopped the engine and why."""
    model = folder / case.model
    if not model.exists():
        _write_config(case.model, model)
    description = folder / "description.json"
    description.unlink(missing_ok=True)
    row = {**asdict(case), "kinds": [], "found": "", "stopped_by": ""}
    if error := _start(case, model, description):
        stopped_by = "vLLM" if _start(case, model, None) else "kvferry"
        return {**row, "found": error, "stopped_by": stopped_by}
    (worker,) = json.loads(description.read_text())["workers"]
    tensors = worker["tensors"]
    kinds = dict.fromkeys(one["kind"] for one in tensors)
    formats = dict.fromkeys(" ".join(str(part) for part in one["format"].values()) for one in tensors)
    return {**row, "kinds": [*kinds], "found": f"{', '.join(kinds)}: {'; '.join(formats)}"}


def _write_config(name: str, folder: Path) -> None:
    import transformers

    model = SMALL_MODELS[name]
    config: Any = getattr(transformers, f"{model.family}Config")(**model.settings | _SHAPES[name])
    config.architectures = [f"{model.family}ForCausalLM"]
    config.save_pretrained(folder)


def _start(case: Case, model: Path, description: Path | None) -> str:
    """Start an engine in a process of its own and end it. Returns its last error, or nothing."""
    command = [sys.executable, "-m", __spec__.name, "--one", json.dumps([*asdict(case).values()]), str(model)]
    command += [str(description)] if description else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_START_S, check=False)
    except subprocess.TimeoutExpired:
        return f"not started within {_START_S:.0f} s"
    print(done.stdout[-20_000:], done.stderr[-20_000:], flush=True)
    lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith(" ")]
    return "" if done.returncode == 0 else (lines[-1] if lines else f"exit status {done.returncode}")[:300]


def start_one(case: Case, model: str, description: str | None) -> None:
    """In a process of its own: an engine, which probes its caches when it starts."""
    (port,) = free_ports(1)
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        "VLLM_NO_USAGE_STATS": "1",
    }
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    transfer = KVTransferConfig(
        kv_connector="NixlConnector",
        kv_connector_module_path="kvferry.connector",
        kv_role="kv_both",
        kv_connector_extra_config={"description_file": description},
    )
    arguments: dict[str, Any] = {
        "model": model,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "attention_backend": case.backend,
        "kv_cache_dtype": case.cache,
        "max_model_len": 512,
        "max_num_seqs": 4,
        "num_gpu_blocks_override": 64,
        "gpu_memory_utilization": 0.2,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "kv_transfer_config": transfer if description else None,
    }
    LLMEngine.from_engine_args(EngineArgs(**arguments)).engine_core.shutdown()


def main(arguments: Sequence[str]) -> None:
    """Entry point."""
    if arguments[0] == "--one":
        start_one(Case(*json.loads(arguments[1])), arguments[2], arguments[3] if arguments[3:] else None)
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(quick="--quick" in arguments):
            rows.append(row_of(case, Path(folder)))
            print(f"{case.backend} {case.cache}: {rows[-1]['found']}", flush=True)
    Path(arguments[0]).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
