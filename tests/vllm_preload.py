"""The parts of vLLM that forked processes need, imported once, see `tests.forkserver`."""

from __future__ import annotations

import importlib
import logging
import os

# A test that collects elsewhere may have asked for less; the logs of engines are read.
os.environ["VLLM_LOGGING_LEVEL"] = "INFO"

from vllm.config import VllmConfig
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

logging.disable(logging.WARNING)
CONFIG = VllmConfig()
"""Making it imports the greater part of vLLM."""

MODELS = (
    "blip2",
    "deepseek_v2",
    "falcon_h1",
    "gemma3",
    "granitemoehybrid",
    "llama",
    "mamba2",
    "opt",
    "qwen3_next",
)

for _module in (
    "vllm.distributed.parallel_state",
    *(f"vllm.model_executor.models.{name}" for name in MODELS),
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.engine.core",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "kvferry.connector",
):
    importlib.import_module(_module)
logging.disable(logging.NOTSET)

SpinCondition.__init__.__defaults__ = (0.002,)
"""Seconds for which vLLM's processes poll after every message: one second, in which two engines take all cores."""
