"""The loop of this process's engine: whether it is paused, waking it, and waiting on its thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kvferry.connector.vllm.core import find_core, wakeup_message

logger = logging.getLogger(__name__)


class EngineLoop:
    """The loop of this process's engine. Thread-safe.

    A loop without requests sleeps in its input queue (`_process_input_queue`, v1/engine/core.py:1588), and no
    API of connectors ends the sleep. The sleep is harmless except for metrics: an engine reports the values of its
    last step, so routers that weigh engines by cache use would see leased blocks as used for as long as no request
    arrives, and would send none. So an engine that holds leases takes a step once in a while: it is woken with
    `WAKEUP`, the message that vLLM sends to itself at shutdown.

    If the core is not found (the engine runs within a user's own program, or this vLLM keeps it elsewhere), the loop
    neither waits nor is woken, and no pause is seen.
    """

    def __init__(self) -> None:
        self._core: Any = None
        self._message: Any = None
        self._is_reported = False
        self._is_waiting = False

    def wake(self) -> None:
        """Wake the loop, so that it checks whether it must step; if it is in `wait` of this object, end only that."""
        self._try(self._wake)

    def wait(self, timeout_s: float) -> bool:
        """Wait on the loop's own thread for `wake`, at most `timeout_s`. Returns whether the loop may go on waiting:
        there is no input for it."""
        return bool(self._try(lambda core: self._wait(core.input_queue, timeout_s)))

    @property
    def is_paused(self) -> bool:
        """Whether the engine is paused. vLLM's loop asks this before it sleeps: so here it is first looked for."""
        return bool(self._try(lambda core: core.is_scheduler_paused()))

    def _wake(self, core: Any) -> None:
        with core.input_queue.not_empty:
            if self._is_waiting:
                core.input_queue.not_empty.notify()
                return
        core.input_queue.put_nowait(self._message)

    def _wait(self, queue: Any, timeout_s: float) -> bool:
        with queue.not_empty:
            self._is_waiting = not queue.queue
            while (
                queue.queue and queue.queue[0] is self._message
            ):  # news since the last wait, no input
                queue.queue.popleft()
            if self._is_waiting:
                queue.not_empty.wait(timeout_s)
            self._is_waiting = False
            return not queue.queue

    def _try(self, call: Callable[[Any], Any]) -> Any:
        """The result of `call` with the engine core; None, and one line in the log, if that fails."""
        try:
            if self._core is None:
                self._core = find_core()
                self._message = wakeup_message()
            return call(self._core)
        except Exception as error:  # noqa: BLE001 - vLLM's internals may differ
            if not self._is_reported:
                self._is_reported = True
                logger.info(
                    "this engine cannot be woken (%r): while idle, its metrics are of its last step",
                    error,
                )
            return None
