"""These tests read kvferry's tables of metrics, which need vLLM; see `tests/connector/conftest.py`."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import warnings

import pytest

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
        logging.getLogger("vllm").setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            importlib.import_module("kvferry.connector.metrics.prometheus")
