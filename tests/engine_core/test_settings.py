"""Workers use the settings that an operator configures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    NixlHandshakePayload,
)

from kvferry.link.allowed_hosts import AllowedHosts
from kvferry.protocol.errors import InvalidConfig
from kvferry.worker.settings import MappedReadsOption, WorkerSettings
from kvferry.worker.worker import FerryWorker
from tests.harness.core.node import Node
from tests.harness.core.scheduler import SchedulerEngine

EXTRA: dict[str, Any] = {
    "lease_slots": 77,
    "handshake_timeout_s": 6.5,
    "load_timeout_s": 61.5,
    "max_loads": 33,
    "staging_pool_bytes": 3 << 20,
    "direct_min_bytes": 4097,
    "engine_ttl": 3601.0,
    "max_peers": 17,
    "failed_read_grace_s": 59.0,
    "mapped_reads": "cuda_ipc",
    "allowed_hosts": ["10.1.0.0/16", "p0.example"],
}
NAMES = {"engine_ttl": "peer_ttl_s"}
OF_THE_ENVIRONMENT = {"secrets", "host_buffer", "is_read_from", "row_blocks"}


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[WorkerSettings]:
    """The settings with which workers are made."""
    settings: list[WorkerSettings] = []

    def noting(**parts: Any) -> FerryWorker:
        settings.append(parts["settings"])
        return FerryWorker(**parts)

    monkeypatch.setattr("kvferry.connector.worker_side.side.FerryWorker", noting)
    return settings


def test_every_key_of_a_worker_reaches_it(
    make: Callable[..., Node], given: list[WorkerSettings]
) -> None:
    make("kv_consumer", extra=EXTRA)
    (settings,) = given
    wanted = {NAMES.get(key, key): value for key, value in EXTRA.items()}
    wanted["allowed_hosts"] = AllowedHosts.from_entries(EXTRA["allowed_hosts"])
    wanted["mapped_reads"] = MappedReadsOption.CUDA_IPC
    assert {name: getattr(settings, name) for name in wanted} == wanted
    assert {field.name for field in fields(WorkerSettings)} == set(
        wanted
    ) | OF_THE_ENVIRONMENT
    assert all(
        getattr(WorkerSettings(), name) != value for name, value in wanted.items()
    )


def test_an_engine_starts_under_the_stock_connectors_name_with_keys_of_other_connectors() -> (
    None
):
    """As the upstream guide writes them, a choice in quotes; under kvferry's own name the unknown one stops it."""
    extra = {
        "shared_storage_path": "cache",
        "enable_cross_layers_blocks": "True",
        "kv_recompute_threshold": 32,
    }
    engine = SchedulerEngine(
        "NixlConnector", module="kvferry.connector", role="kv_consumer", extra=extra
    )
    assert engine.connector.scheduler_side.loads.recompute_threshold == 32
    engine.close()
    with pytest.raises(
        InvalidConfig, match="shared_storage_path is 'cache'; expected one of"
    ):
        SchedulerEngine(
            "FerryConnector",
            module="kvferry.connector",
            role="kv_consumer",
            extra=extra,
        )


@pytest.mark.parametrize(
    ("role", "extra", "is_read_from"),
    [
        ("kv_producer", {}, True),
        ("kv_both", {}, True),
        ("kv_consumer", {}, False),
        ("kv_consumer", {"bidirectional_kv_xfer": True}, True),
    ],
)
def test_a_worker_knows_whether_peers_read_from_it(
    make: Callable[..., Node],
    given: list[WorkerSettings],
    role: str,
    extra: dict[str, bool],
    is_read_from: bool,
) -> None:
    make(role, extra=extra)
    assert [settings.is_read_from for settings in given] == [is_read_from]


def test_another_child_that_hands_prompts_over_is_refused_by_the_type_of_its_handshake(
    make_engine: Any,
) -> None:
    """vLLM gives all children of a MultiConnector the handshake of the first one that has any."""
    stock = NixlHandshakePayload("hash", b"")
    with pytest.raises(
        InvalidConfig,
        match="connectors is 'NixlHandshakePayload'; expected one child that hands prompts",
    ):
        make_engine("kv_producer").connector.set_xfer_handshake_metadata_pp_aware(
            {(0, 0): stock}
        )
