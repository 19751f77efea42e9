"""These tests read kvferry's tables of metrics, which need vLLM."""

from __future__ import annotations

import pytest

from tests.needs_vllm import LEFT_OUT, import_quietly

collect_ignore_glob = LEFT_OUT


def pytest_configure(config: pytest.Config) -> None:
    import_quietly(config, "kvferry.connector.metrics.prometheus")
