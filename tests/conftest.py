"""Settings of every test: hypothesis prints what reproduces a failure, and times nothing on a shared machine."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "kvferry",
    print_blob=True,
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kvferry")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes minutes comes last, and its engines live no longer than it does."""
    items.sort(key=lambda item: "vllm" in item.path.parts)
