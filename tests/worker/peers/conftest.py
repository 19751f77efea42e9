"""A peer registry for each test, without jitter in its back-off."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.worker.peers.scene import Scene


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr("kvferry.link.limits.random.uniform", lambda *_: 1.0)
    made = Scene()
    yield made
    made.close()
