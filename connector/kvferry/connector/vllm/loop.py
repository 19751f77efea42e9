"""The loop of this process's engine: whether it is paused, waking it, and waiting on its thread."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

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
        # Two messages, told apart by identity. vLLM treats both alike: it looks for work.
        self._wakeup: Any = None
        self._news: Any = None
        self._is_waiting = False
        self._is_reported = False

    def wake(self) -> None:
        """Have the loop check whether it must step; ends `wait`, which then returns False."""
        self._try(lambda core: core.input_queue.put_nowait(self._wakeup))

    def notify(self) -> None:
        """There is news for the thread in `wait`, which then returns True. A loop that is not in `wait` wakes."""
        self._try(self._notify)

    def wait(self, timeout_s: float) -> bool:
        """Wait on the loop's own thread, at most `timeout_s`, for `notify`, `wake` or input.

        Returns:
            Whether the loop may go on waiting: there is no input for it.
        """
        return bool(self._try(lambda core: self._wait(core.input_queue, timeout_s)))

    @property
    def is_paused(self) -> bool:
        """True if the engine is paused (`is_scheduler_paused`, v1/engine/core.py:955)."""
        return bool(self._try(lambda core: core.is_scheduler_paused()))

    def _notify(self, core: Any) -> None:
        # Under the queue's lock: `_wait` has either not looked at the queue yet, and finds the message, or waits.
        with core.input_queue.not_empty:
            if self._is_waiting:
                core.input_queue.not_empty.notify()
                return
        core.input_queue.put_nowait(self._news)

    def _wait(self, queue: Any, timeout_s: float) -> bool:
        # `queue.Queue.get` waits for this condition; whatever is put into the queue notifies it. So one wait hears of
        # input, of `wake` and of `notify`, and takes no input out of the queue: vLLM's loop does that after the step.
        with queue.not_empty:
            if not queue.queue:
                self._is_waiting = True
                try:
                    queue.not_empty.wait(timeout_s)
                finally:
                    self._is_waiting = False
            else:
                # News since the last wait. Left in the queue, it would end this wait and every later one.
                while queue.queue and queue.queue[0] is self._news:
                    queue.queue.popleft()
            return not queue.queue

    def _try(self, call: Callable[[Any], Any]) -> Any:
        """The result of `call` with the engine core; None, and one line in the log, if that fails."""
        try:
            if self._core is None:
                core = find_core()
                self._wakeup = _wakeup_message()
                self._news = _wakeup_message()
                # Last: other threads use the messages as soon as it is set.
                self._core = core
            return call(self._core)
        except Exception as error:  # noqa: BLE001 - vLLM's internals may differ
            if not self._is_reported:
                self._is_reported = True
                logger.info(
                    "this engine cannot be woken (%r): while it is idle, its metrics are those of its last step",
                    error,
                )
            return None


def find_core() -> Any:
    """The engine core whose loop runs in this process.

    vLLM passes connectors no reference to it. The two threads of its sockets have one: their target is a bound method
    of the core (v1/engine/core.py:1218 and 1230).

    Raises:
        LookupError: there is none (the engine runs within a user's own program), or more than one.
        AttributeError: it lacks what is used of it.
    """
    # Not imported: in a process without an engine, importing the module would take seconds and find nothing.
    module = sys.modules.get("vllm.v1.engine.core")
    kind = getattr(module, "EngineCoreProc", ())
    cores = {}
    for thread in threading.enumerate():
        # Several threads belong to one core, so cores are told apart by their identity.
        target = getattr(thread, "_target", None)
        owner = getattr(target, "__self__", None)
        if isinstance(owner, kind):
            cores[id(owner)] = owner
    # With two cores in one process there is no way to tell which one this connector belongs to. To wait in the other's
    # queue would stop that engine.
    if len(cores) != 1:
        raise LookupError(f"{len(cores)} engine cores run in this process")
    (core,) = cores.values()
    _ = core.is_scheduler_paused
    _ = core.input_queue.put_nowait
    _ = core.input_queue.not_empty
    _ = _wakeup_message()
    return core


def _wakeup_message() -> tuple[Any, None]:
    """A new message that only wakes the loop: vLLM sends it to itself at shutdown (v1/engine/core.py:1449)."""
    return (sys.modules["vllm.v1.engine"].EngineCoreRequestType.WAKEUP, None)
