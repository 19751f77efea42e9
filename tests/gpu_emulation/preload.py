"""The parts of vLLM's CUDA wheel that forked processes need, imported once; see `tests.forkserver`."""

from __future__ import annotations

import gc
import importlib
import os

os.environ["VLLM_LOGGING_LEVEL"] = "INFO"

for _module in (
    "vllm.config",
    "vllm.distributed.parallel_state",
    "vllm.model_executor.warmup.kernel_warmup",
    "vllm.model_executor.warmup.minimax_m3_msa_warmup",
    "vllm.v1.attention.backends.triton_attn",
    "vllm.v1.engine.core",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu_worker",
    "vllm.model_executor.models.llama",
    "kvferry.connector",
):
    importlib.import_module(_module)

gc.freeze()
"""vLLM collects garbage a dozen times when it starts, which took most of an engine's start."""
