"""The engine core of this process.

vLLM passes connectors no reference to it. The two threads of its sockets have one: their target is a bound method of
the core (v1/engine/core.py:1218 and 1230).
"""

from __future__ import annotations

import sys
import threading
from typing import Any


def find_core() -> Any:
    """The engine core whose loop runs in this process.

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
    _ = wakeup_message()
    return core


def wakeup_message() -> tuple[Any, None]:
    """A new message that only wakes the loop: vLLM sends it to itself at shutdown (v1/engine/core.py:1449)."""
    return (sys.modules["vllm.v1.engine"].EngineCoreRequestType.WAKEUP, None)
