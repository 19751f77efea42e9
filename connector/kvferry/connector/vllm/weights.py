"""The version of the weights that this process's engine runs with."""

from __future__ import annotations

import functools
import logging
import secrets
from typing import Any

from kvferry.connector.vllm.loop import find_core

logger = logging.getLogger(__name__)

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
    """

    def __init__(self) -> None:
        self._core: Any = None
        self._num_updates = 0
        self._is_unnamed = False
        self._name_before = ""
        self._own_name = f"unnamed {secrets.token_hex(16)}"

    def watch(self) -> None:
        """Notice updates from now on, if there is an engine core. Idempotent."""
        # Called by `has_pending_push_work`, which vLLM's loop asks before it takes its first request or call. At the
        # start of the connector the core does not exist yet.
        if self._core is not None:
            return
        try:
            core = find_core()
            _ = core.get_weight_version()
            call = core.collective_rpc
        except Exception:  # noqa: BLE001 - vLLM's internals may differ, or the engine is in a user's own program
            return

        @functools.wraps(call)  # vLLM converts a client's arguments by its signature
        def noticed(method: Any, *args: Any, **options: Any) -> Any:
            if _changes_weights(method):
                self._updated()
            return call(method, *args, **options)

        core.collective_rpc = noticed
        self._core = core

    def version(self) -> str:
        """The name; empty for the weights of the start, which need none, and where no core is found."""
        self.watch()
        if self._core is None:
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
