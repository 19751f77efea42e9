"""What an operator configures is what a worker goes by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from kvferry.worker.settings import WorkerSettings
from tests.engine_core.node import Node

EXTRA: dict[str, Any] = {
    "lease_slots": 77,
    "handshake_timeout_s": 6.5,
    "load_timeout_s": 61.5,
    "max_loads": 33,
    "staging_pool_bytes": 3 << 20,
    "direct_min_bytes": 4097,
    "huge_pages_s": 0.25,
    "engine_ttl": 3601.0,
    "max_peers": 17,
    "failed_read_grace_s": 59.0,
    "debug_check_integrity": True,
}
NAMES = {"engine_ttl": "peer_ttl_s", "debug_check_integrity": "check_integrity"}
OF_THE_ENVIRONMENT = {"secrets", "host_buffer"}


def test_every_key_of_a_worker_reaches_it(make: Callable[..., Node]) -> None:
    node = make("kv_consumer", extra=EXTRA)
    settings = node.workers[0].worker_side._worker._settings
    wanted = {NAMES.get(key, key): value for key, value in EXTRA.items()}
    assert {name: getattr(settings, name) for name in wanted} == wanted
    assert {field.name for field in fields(WorkerSettings)} == set(wanted) | OF_THE_ENVIRONMENT
    assert all(getattr(WorkerSettings(), name) != value for name, value in wanted.items())
