"""vLLM's own code of a sleep over the engines of this process: `EngineCore`, `Executor` and a backend of sleep mode.

vLLM's CPU worker ignores a sleep (v1/worker/cpu_worker.py:179), so what its GPU worker does with the backend is here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.device_allocator.sleep_mode_backend import (
    SleepModeBackend,
    SleepModeBackendFactory,
)
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor

from kvferry.connector.vllm.sleep import CACHES, has_sleep_hooks
from tests.harness.core.node import Node, between_processes, ferry_of

BACKEND = "pages-of-the-test"


class PagesOfTheTest(SleepModeBackend):  # type: ignore[misc]
    """Its pages go as those of all allocations of a process do. `take_pages` is set by the test."""

    take_pages: Callable[[], None] = staticmethod(lambda: None)

    def suspend(self, level: int = 1) -> None:
        self.take_pages()

    def discard(self, tags: tuple[str, ...]) -> None:
        if CACHES in tags:
            self.take_pages()

    def resume(self, tags: list[str] | None = None) -> None:
        pass


SleepModeBackendFactory.register_backend(BACKEND, __name__, PagesOfTheTest.__name__)


class WorkersOfANode(Executor):  # type: ignore[misc]
    """The executor of a node: calls what vLLM's GPU worker does (v1/worker/gpu_worker.py:294)."""

    def __init__(self, node: Node) -> None:
        self.vllm_config = node.engine.config
        self.sleeping_tags: set[str] = set()
        self._node = node
        model_config = node.engine.config.model_config
        model_config.sleep_mode_backend = BACKEND
        self._backends = [
            SleepModeBackendFactory.create_backend(model_config) for _ in node.workers
        ]

    def collective_rpc(self, method: Any, *_: Any, **call: Any) -> Any:
        args = call.get("args", ())
        kwargs = call.get("kwargs") or {}
        answers = []
        for worker, backend in zip(self._node.workers, self._backends, strict=True):
            match method:
                case "sleep":
                    if has_sleep_hooks():
                        worker.unregister_kv_caches()
                    backend.suspend(kwargs["level"])
                case "discard":
                    if has_sleep_hooks() and "kv_cache" in args[0]:
                        worker.unregister_kv_caches()
                    backend.discard(*args)
                case "wake_up":
                    tags = kwargs["tags"]
                    backend.resume(tags)
                    if has_sleep_hooks() and (tags is None or "kv_cache" in tags):
                        worker.restore_kv_caches()
                case "get_kv_connector_handshake_metadata":
                    place = ferry_of(worker).worker_side.worker.description.place
                    described = worker.get_handshake_metadata()
                    answers.append(between_processes({(place.pp, place.tp): described}))
        return answers

    def _init_executor(self) -> None:
        raise NotImplementedError

    def check_health(self) -> None:
        raise NotImplementedError


def core_of(node: Node) -> EngineCore:
    """vLLM's engine core, without a loop, around a node."""
    core = EngineCore.__new__(EngineCore)
    core.scheduler = node.engine.scheduler
    core.model_executor = WorkersOfANode(node)
    core.batch_queue = None
    core.mm_receiver_cache = None
    return core
