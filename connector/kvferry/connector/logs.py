"""kvferry's log lines in vLLM's log: same handlers, format and level, with the prefix `kvferry:`."""

from __future__ import annotations

import copy
import logging

from kvferry.protocol.visible import escape_logs, other_handlers


class _Forward(logging.Handler):
    """Passes records on to vLLM's handlers, with the prefix."""

    def emit(self, record: logging.LogRecord) -> None:
        prefixed = copy.copy(record)
        prefixed.msg = f"kvferry: {record.msg}"
        for handler in logging.getLogger("vllm").handlers:
            if prefixed.levelno >= handler.level:
                handler.handle(prefixed)


def join_vllm_log() -> None:
    """Send the logger `kvferry` to vLLM's handlers, unless it has handlers of its own. Idempotent."""
    escape_logs()
    own_logger = logging.getLogger("kvferry")
    vllm_logger = logging.getLogger("vllm")
    if other_handlers(own_logger) or not vllm_logger.handlers:
        return
    own_logger.addHandler(_Forward())
    own_logger.setLevel(vllm_logger.level)
    own_logger.propagate = False
