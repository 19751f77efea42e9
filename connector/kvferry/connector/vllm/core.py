"""vLLM's engine core in this process: its loop (paused, ending, waking, waiting on its thread), resets of its prefix
cache, and the version of its weights. `EngineLoop` finds it, and the other two get it (`attach`)."""

from __future__ import annotations

import functools
import inspect
import logging
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
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

    Attributes:
        is_ending: whether this process has received SIGTERM or SIGINT.
    """

    def __init__(self) -> None:
        self.is_ending = False
        # Looked for until it is found: at the start of the connector it does not exist yet.
        self._core: Any = None
        # Two messages, told apart by identity. vLLM treats both alike: it looks for work.
        self._wakeup: Any = None
        self._news: Any = None
        self._is_waiting = False
        self._is_reported = False
        # vLLM calls a connector's `shutdown` only at the very end. Python lets the main thread alone set handlers: an
        # engine on another thread notices no signal.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._notice(number)

    def find(self) -> Any:
        """The engine core, looked for if it was not found before; None if there is none.

        Called by `has_pending_push_work`, which vLLM's loop asks before it takes its first request or call: from then
        on `is_paused` is right.
        """
        return self._try(lambda core: core)

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
        if self._core is None:
            return False
        return bool(self._try(lambda core: core.is_scheduler_paused()))

    @property
    def num_requests(self) -> int:
        """The requests of vLLM's scheduler; 0 if it does not tell. Among them are those that have ended, as long as a
        connector holds their blocks."""
        # The attribute by which vLLM's loop goes on for them (`Scheduler.has_finished_requests`).
        return int(
            self._try(lambda core: len(getattr(core.scheduler, "requests", ()))) or 0
        )

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

    def _notice(self, number: signal.Signals) -> None:
        """Set a handler that sets `is_ending` and calls the one that was there."""
        # vLLM sets its handlers before it creates a connector (v1/engine/core.py:1469). If there is none, the engine
        # runs within another program: to set one would change how that program ends.
        before = signal.getsignal(number)
        if not callable(before) or before is signal.default_int_handler:
            return

        def on_signal(given: int, frame: FrameType | None) -> None:
            self.is_ending = True
            before(given, frame)

        signal.signal(number, on_signal)

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


RESET_S = 1.0
"""Most that a reset waits for the workers to end leases: each has a step or two to do."""


class CacheResets:
    """Resets of this process's engine that preempt its requests, so that no block is used.

    vLLM's scheduler raises where one still is (`Scheduler.reset_prefix_cache`, v1/core/sched/scheduler.py:2840), and
    tells the connector of the reset only if none was. So before such a reset leases end here, and the engine takes
    steps without requests until the workers have cleared their slots: a block is never free while its slot is READY.

    Args:
        end_leases: ends every held lease; False if no block is leased any more.
        may_step: whether the engine may step by itself: no other engine steps with it.
    """

    def __init__(self, end_leases: Callable[[], bool], *, may_step: bool) -> None:
        self._end_leases = end_leases
        self._may_step = may_step

    def attach(self, core: Any) -> None:
        """End leases before this engine core's resets from now on."""
        if not self._may_step:
            return
        try:
            reset = core.reset_prefix_cache
            _ = core._process_engine_step
            _ = core.scheduler.set_pause_state
            _ = core.model_executor.is_sleeping
        except Exception:  # noqa: BLE001 - vLLM's internals may differ
            return

        signature = inspect.signature(reset)

        @functools.wraps(reset)  # vLLM converts a client's arguments by its signature
        def without_leases(*args: Any, **options: Any) -> Any:
            given = signature.bind(*args, **options).arguments
            if given.get("reset_running_requests"):
                self._step_without_requests(core)
            return reset(*args, **options)

        core.reset_prefix_cache = without_leases

    def _step_without_requests(self, core: Any) -> None:
        if not self._end_leases() or core.model_executor.is_sleeping:
            return
        scheduler = core.scheduler
        state = scheduler.pause_state
        end_s = time.monotonic() + RESET_S
        # As in a pause: requests that went on computing would open leases, and are about to be preempted.
        scheduler.set_pause_state(type(state).PAUSED_ALL)
        try:
            while self._end_leases() and time.monotonic() < end_s:
                core._process_engine_step()
        finally:
            scheduler.set_pause_state(state)


_FIRST_NAME = "default"
"""vLLM's name of weights that were not updated (v1/engine/core.py:141)."""

_READING_PREFIXES = (
    "get",
    "check",
    "init",
    "shutdown",
    "list",
    "save",
    "dump",
    "is_",
    "has_",
)
"""How the names of calls begin that read weights or prepare an update, and change none."""


class RunningWeights:
    """The version of the weights that this process's engine runs with.

    Weights can be updated at run time, and vLLM does not notify connectors. But whoever updates them can name the new
    ones (`finish_weight_update`, `update_weight_version`), and the engine core keeps the name. The update itself is a
    call to all workers, which the engine core forwards (`EngineCore.collective_rpc`, v1/engine/core.py:1073): there it
    is noticed by the name of the called method. Weights that were updated and have no name yet are those of no other
    engine.

    Attributes:
        is_attached: whether updates are noticed. Until then, and where there is no core, they are those of the start.
    """

    def __init__(self) -> None:
        self.is_attached = False
        self._core: Any = None
        self._num_updates = 0
        self._is_unnamed = False
        self._name_before = ""
        self._own_name = f"unnamed {secrets.token_hex(16)}"

    def attach(self, core: Any) -> None:
        """Notice updates by this engine core from now on."""
        try:
            _ = core.get_weight_version()
            call = core.collective_rpc
        except Exception:  # noqa: BLE001 - vLLM's internals may differ
            return

        @functools.wraps(call)  # vLLM converts a client's arguments by its signature
        def noticed(method: Any, *args: Any, **options: Any) -> Any:
            if _changes_weights(method):
                self._updated()
            return call(method, *args, **options)

        core.collective_rpc = noticed
        self._core = core
        self.is_attached = True

    def version(self) -> str:
        """The name; empty for the weights of the start, which need none, and where there is no core."""
        if not self.is_attached:
            return ""
        name = str(self._core.get_weight_version())
        if self._is_unnamed and name == self._name_before:
            # The number tells two updates without a name apart: a prompt of the first has no digest of the second.
            return f"{self._own_name} {self._num_updates}"
        self._is_unnamed = False
        if name == _FIRST_NAME:
            return ""
        return name

    def _updated(self) -> None:
        if not self._is_unnamed:
            logger.warning(
                "the weights are updated: until the new ones are named (/update_weight_version), "
                "prompts are handed over to no engine"
            )
        self._is_unnamed = True
        self._num_updates += 1
        self._name_before = str(self._core.get_weight_version())


def _changes_weights(method: Any) -> bool:
    """True if a call to all workers may change their weights.

    Decided by its name: vLLM's own are `update_weights`, `reload_weights`, `finish_weight_update` and others, and
    trainers bring workers of their own with similar names. One that changes nothing and is taken for an update costs a
    name; one that is missed mixes caches of two versions. So only the known readers are let through.
    """
    name = method if isinstance(method, str) else getattr(method, "__name__", "")
    is_about_weights = "weight" in name or name == "load_model"
    return is_about_weights and not name.startswith(_READING_PREFIXES)
