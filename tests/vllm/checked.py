"""Servers of these tests check their own integrity in every step, and log what is wrong.

What checks is imported by the servers: the process of the tests does without vLLM and torch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

MARK = "integrity of this engine:"
_WORKER_INTERVAL_S = 1.0
"""Between two checks of a worker: one waits for a turn of the transfer thread, and the step waits for it."""
logger = logging.getLogger("kvferry.integrity")


def check_every_step() -> None:
    """The engines of this process, and of those that it forks, are checked from now on."""
    from kvferry.connector import FerryConnector

    for hook in ("build_connector_meta", "update_connector_output"):
        setattr(
            FerryConnector, hook, _then(getattr(FerryConnector, hook), _check_scheduler)
        )
    FerryConnector.get_finished = _then(FerryConnector.get_finished, _WorkerChecks())  # type: ignore[method-assign]


def broken_of(log: Path) -> list[str]:
    """The lines of a server's log that say what is wrong."""
    return [line for line in log.read_text().splitlines() if MARK in line]


def _then(hook: Callable[..., Any], check: Callable[[Any], None]) -> Callable[..., Any]:
    @wraps(hook)
    def checked(connector: Any, *args: Any, **kwargs: Any) -> Any:
        result = hook(connector, *args, **kwargs)
        try:
            check(connector)
        except Exception:
            logger.exception(MARK)
        return result

    return checked


def _check_scheduler(connector: Any) -> None:
    from tests.harness.core.integrity import check_scheduler_side

    check_scheduler_side(connector.scheduler_side)


class _WorkerChecks:
    """Check a worker now and then."""

    def __init__(self) -> None:
        self._checked_s = 0.0

    def __call__(self, connector: Any) -> None:
        if time.monotonic() < self._checked_s + _WORKER_INTERVAL_S:
            return
        from tests.harness.integrity import check_worker

        check_worker(connector.worker_side.worker)
        self._checked_s = time.monotonic()
