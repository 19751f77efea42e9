"""kvferry's log lines in vLLM's log: same handlers, same format, same level."""

from __future__ import annotations

import logging


def join_vllm_log() -> None:
    """Let the logger `kvferry` write where vLLM writes, unless somebody has configured it. Idempotent."""
    ours, theirs = logging.getLogger("kvferry"), logging.getLogger("vllm")
    if ours.handlers or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.level)
    ours.propagate = False
