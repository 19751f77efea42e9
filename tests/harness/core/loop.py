"""vLLM's engine core with only the parts that its loop needs, found in this process as a real one is."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType, SimpleNamespace
from typing import Any

from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState


@contextmanager
def engine_core(scheduler: Any = None) -> Iterator[Any]:
    """A core, and a thread like that of its sockets, by which it is found (`kvferry.connector.vllm.core.find_core`)."""
    core: Any = EngineCoreProc.__new__(EngineCoreProc)
    core.input_queue, core.aborts_queue = queue.Queue(), queue.Queue()
    core.scheduler = scheduler
    core.batch_queue = None
    core.engines_running = False
    core.shutdown_state = EngineShutdownState.RUNNING
    core.process_input_queue_block = True
    core.model_executor = SimpleNamespace(collective_rpc=lambda *call: None)
    core._idle_state_callbacks = []
    core._weight_version = "default"  # as vLLM begins
    over = threading.Event()
    thread = threading.Thread(target=MethodType(lambda core: over.wait(), core))
    thread.start()
    try:
        yield core
    finally:
        over.set()
        thread.join()
