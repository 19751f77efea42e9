"""Processes that start with vLLM and kvferry already imported: forked from a server that has done nothing but that.

They are as clean as spawned ones, and ready in a fraction of the time: importing vLLM takes most of an engine's start.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.context import ForkServerContext

PRELOAD = [
    "tests.vllm_preload",
    "tests.harness.child",
    # Each guard is switched off in a process of its own, which runs pytest.
    "pytest",
    "hypothesis",
]
"""Modules that the server imports when it starts; tests of another vLLM have others (tests/gpu_emulation)."""


def forkserver() -> ForkServerContext:
    """The context of such processes. The server starts with the first of them and ends with this process.

    PyTorch takes its memory in huge pages there: zeroing an engine's cache takes a quarter of the time.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context
