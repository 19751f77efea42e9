"""A start that fails half way leaves nothing behind in a process that goes on: no thread, no file, no NIXL agent."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvferry.connector.messages import SiblingFailed
from kvferry.connector.worker_side import side as worker_side
from kvferry.protocol.errors import InvalidConfig
from kvferry.worker.fabric.nixl import NixlFabric
from tests.harness.core.configs import BLOCK_TOKENS, kv_cache_config
from tests.harness.core.node import Node, side_channel
from tests.harness.core.scheduler import SchedulerEngine
from tests.open_files import open_files
from tests.waiting import wait_until

TRACES = "traces-of-a-start"
CLOSED = "its threads have ended, and its trace file is closed"
PARTS = (
    "kvferry.worker.worker.WorkerMemory.allocate",
    "kvferry.worker.worker_memory.SlotReads.prepare",
    "kvferry.worker.worker.FirstContact",
    "kvferry.worker.worker.TransferThread",
    "kvferry.connector.worker_side.side.gather_workers",
    "kvferry.worker.worker.FerryWorker.add_siblings",
)


SCHEDULER_PARTS = (
    "scheduler_side.side.TicketBuilder",
    "scheduler_side.side.BlockDemand",
    "scheduler_side.side.EngineStep",
    "connector.follow_sleep",
)


def left() -> tuple[set[threading.Thread], set[str]]:
    """Threads of kvferry, and the trace files that are open."""
    threads = {
        thread for thread in threading.enumerate() if thread.name.startswith("kvferry-")
    }
    files = {
        os.path.realpath(f"/proc/self/fd/{number}")
        for number in os.listdir("/proc/self/fd")
    }
    return threads, {file for file in files if TRACES in Path(file).parts}


def register(node: Node) -> None:
    """The start of one more worker of this engine."""
    config, described = (
        node.engine.config,
        kv_cache_config(node.engine.cache_config.num_blocks),
    )
    sizes = [BLOCK_TOKENS] * len(described.kv_cache_groups)
    with set_current_vllm_config(config):
        worker = KVConnectorFactory.create_connector(
            config, KVConnectorRole.WORKER, described
        )
        caches = allocate_kv_cache(
            described, torch.device("cpu"), KVCacheLayout.LBHNC, sizes
        )
        worker.register_kv_caches(caches)


@pytest.fixture
def extra(tmp_path: Path) -> dict[str, Any]:
    """The configuration of an engine that opens a trace file."""
    folder = tmp_path / TRACES
    folder.mkdir()
    return {"trace_dir": str(folder)}


@pytest.mark.parametrize("part", PARTS, ids=lambda part: ".".join(part.split(".")[-2:]))
def test_a_worker_whose_start_fails_closes_what_it_has_opened(
    make: Callable[..., Node],
    monkeypatch: pytest.MonkeyPatch,
    extra: dict[str, Any],
    part: str,
) -> None:
    agents: list[str] = []

    class Recorded(NixlFabric):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            agents.append(self.agent_name)

        def close(self) -> None:
            super().close()
            agents.remove(self.agent_name)

    def fail(*_: object, **__: object) -> None:
        raise SiblingFailed("worker 1 has failed")

    node = make("kv_both", extra=extra)
    before = left()
    monkeypatch.setattr(worker_side, "NixlFabric", Recorded)
    with monkeypatch.context() as failing:
        failing.setattr(part, fail)
        with pytest.raises(SiblingFailed):
            register(node)
    wait_until(lambda: left() == before, CLOSED)
    assert agents == []


@pytest.mark.parametrize("part", SCHEDULER_PARTS)
def test_a_scheduler_whose_start_fails_closes_what_it_has_opened(
    make: Callable[..., Node],
    monkeypatch: pytest.MonkeyPatch,
    extra: dict[str, Any],
    part: str,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyError("a bug")

    make("kv_both", extra=extra)  # what is opened once a process
    before = left()
    files = open_files()
    monkeypatch.setattr("kvferry.connector.connector.can_sleep", lambda _: True)
    monkeypatch.setattr(f"kvferry.connector.{part}", fail)
    with pytest.raises(KeyError, match="a bug"):
        SchedulerEngine(
            "FerryConnector", module="kvferry.connector", role="kv_both", extra=extra
        )
    wait_until(lambda: left() == before, CLOSED)
    assert open_files() <= files


def test_an_engine_whose_port_is_in_use_leaves_nothing_open(
    make: Callable[..., Node], extra: dict[str, Any]
) -> None:
    first = make("kv_both", extra=extra)
    before = left()
    with (
        side_channel(first.port),
        pytest.raises(
            InvalidConfig, match="an address of this machine with a free port"
        ),
    ):
        SchedulerEngine(
            "FerryConnector", module="kvferry.connector", role="kv_both", extra=extra
        )
    wait_until(lambda: left() == before, CLOSED)
