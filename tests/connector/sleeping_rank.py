"""A worker of an engine of several, in a process of its own: kvferry's worker side between vLLM's process groups and
NIXL, registered, and then told to sleep and to wake as vLLM 0.33's GPU worker tells a connector.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

from kvferry.worker.fabric.errors import FabricUnavailable
from kvferry.worker.fabric.nixl import NixlFabric
from kvferry.worker.registration import WithdrawalRefused
from kvferry.worker.worker import FerryWorker

RANKS = 2
TIMEOUT_S = 300.0
"""For the groups: the first worker waits for the other's imports."""
REFUSAL = "reads may still write: req=r1 peer=P"
NO_PAGES = "no pages"


@dataclass(frozen=True)
class Told:
    """What has become of a command.

    Attributes:
        error: what was raised; empty if nothing.
        state, generation: of the caches afterwards.
        agent: by which peers know this worker; of the caches' generation.
    """

    error: str
    state: str
    generation: int
    agent: str


def run(channel: Connection, rank: int, rendezvous: str) -> None:
    """Carry out commands, the names of methods of `_Rank`, until the other end of the channel is closed."""
    os.environ.update(
        VLLM_CPU_DIST_TIMEOUT=f"{TIMEOUT_S:g}",
        GLOO_SOCKET_IFNAME="lo",
        VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1",
        # Ranks that differ in it talk over gloo, not over shared memory, where they would spin.
        VLLM_DIST_IDENT=f"rank {rank}",
    )
    worker = _Rank(rank, rendezvous)
    channel.send(worker.told(""))
    with suppress(EOFError):
        while True:
            channel.send(worker.carry_out(channel.recv()))
    worker.connector.shutdown()


class _Rank:
    def __init__(self, rank: int, rendezvous: str) -> None:
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.distributed import parallel_state
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.platforms import current_platform
        from vllm.v1.kv_cache_layout import KVCacheLayout
        from vllm.v1.worker.utils import allocate_kv_cache

        from tests.harness.core.configs import (
            BLOCK_TOKENS,
            kv_cache_config,
            layer_of,
            vllm_config,
        )
        from tests.harness.core.node import LAYER_MODULE

        config = vllm_config("NixlConnector", module="kvferry.connector", tp=RANKS)
        config.compilation_config.static_forward_context[layer_of(0)] = LAYER_MODULE
        current_platform.import_kernels()
        with set_current_vllm_config(config):
            parallel_state.init_distributed_environment(
                RANKS, rank, rendezvous, rank, "gloo"
            )
            parallel_state.initialize_model_parallel(RANKS, backend="gloo")
            caches = kv_cache_config(config.cache_config.num_gpu_blocks, tp=RANKS)
            self.connector: Any = KVConnectorFactory.create_connector(
                config, KVConnectorRole.WORKER, caches
            )
            self.connector.register_kv_caches(
                allocate_kv_cache(
                    caches, torch.device("cpu"), KVCacheLayout.LBHNC, [BLOCK_TOKENS]
                )
            )

    def carry_out(self, command: str) -> Told:
        try:
            getattr(self, command)()
        except Exception as error:  # noqa: BLE001 - sent to the test
            return self.told(f"{type(error).__name__}: {error}")
        return self.told("")

    def told(self, error: str) -> Told:
        worker: FerryWorker = self.connector.worker_side.worker
        registration = worker.registration
        return Told(
            error,
            registration.state.value,
            registration.generation,
            worker.description.agent,
        )

    def sleep(self) -> None:
        self.connector.unregister_kv_caches()

    def sleep_amid_a_read(self) -> None:
        """A sleep at which this worker cannot be quiet."""
        with mock.patch.object(
            FerryWorker, "drain", side_effect=WithdrawalRefused(REFUSAL)
        ):
            self.sleep()

    def wake_up(self) -> None:
        self.connector.restore_kv_caches()

    def wake_up_in_vain(self) -> None:
        """A wake-up at which NIXL refuses this worker's memory."""
        with mock.patch.object(
            NixlFabric, "register", side_effect=FabricUnavailable("register", NO_PAGES)
        ):
            self.wake_up()
