"""Tests of this folder use vLLM's own types, operations and factories, but start no engine.

vLLM is optional for the rest of the project, so without it the folder is left out. Its import, and torch's under it,
raise warnings that are not ours to fix: they are named here, and everything else still fails a test.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
from collections.abc import Iterator

import pytest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

_NOT_OURS = (
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning",
    "ignore:builtin type .* has no __module__ attribute:DeprecationWarning",
)

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    for line in _NOT_OURS:
        config.addinivalue_line("filterwarnings", line)
    if importlib.util.find_spec("vllm"):
        logging.getLogger("vllm").setLevel(logging.ERROR)  # until its own configuration takes over
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            importlib.import_module("vllm.v1.core.sched.scheduler")
            importlib.import_module("vllm.v1.attention.backends.cpu_attn")


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
