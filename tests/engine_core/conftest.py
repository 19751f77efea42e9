"""Tests of this folder drive vLLM's real scheduler in process: no server, no model weights, no workers.

vLLM is optional for the rest of the project, so without it the folder is left out. Its import, and torch's under it,
raise warnings that are not ours to fix: they are named here, and everything else still fails a test.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

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


@pytest.fixture(scope="module", autouse=True)
def _process_groups() -> Iterator[None]:
    """vLLM's process groups, which nodes start, end with the module."""
    yield
    importlib.import_module("tests.harness.core.node").stop_parallel_state()


@pytest.fixture
def make() -> Iterator[Any]:
    """Makes nodes: `make(role, **config)`. They are closed at the end of the test, with an integrity check."""
    node_type = importlib.import_module("tests.harness.core.node").Node
    nodes: list[Any] = []

    def build(role: str, **config: Any) -> Any:
        nodes.append(node_type(role, **config))
        return nodes[-1]

    yield build
    for node in nodes:
        node.close()


@pytest.fixture
def make_slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes producers with slow routers: `make_slow(**keys)`. Their integrity is checked in every step."""
    slow_type = importlib.import_module("tests.engine_core.slow_router").Slow
    made: list[Any] = []

    def build(**extra: Any) -> Any:
        made.append(slow_type(monkeypatch, **extra))
        return made[-1]

    yield build
    for slow in made:
        slow.side.check_integrity()
        assert slow.engine.counted("integrity_errors") == 0
        slow.engine.close()
