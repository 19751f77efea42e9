"""Tests of this folder use vLLM's own types, operations and factories, but start no engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from tests.needs_vllm import LEFT_OUT, import_quietly

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

collect_ignore_glob = LEFT_OUT


def pytest_configure(config: pytest.Config) -> None:
    import_quietly(
        config, "vllm.v1.core.sched.scheduler", "vllm.v1.attention.backends.cpu_attn"
    )


@pytest.fixture
def ferry_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """kvferry's log, also if an earlier connector has redirected its logger."""
    logger = logging.getLogger("kvferry")
    level, propagate = logger.level, logger.propagate
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    yield caplog
    logger.removeHandler(caplog.handler)
    logger.setLevel(level)
    logger.propagate = propagate
