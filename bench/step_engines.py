"""Engines whose step thread is timed: vLLM's real scheduler, real connectors at both ends, no model.

What vLLM pickles between scheduler and worker is pickled here too, and counted on the side where it happens.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import msgspec
import numpy as np
from vllm.v1.outputs import ModelRunnerOutput

from bench.step_clock import StepClock
from bench.step_scenes import FabricKind
from kvferry.protocol.digests import Prompt, digest_chain
from kvferry.protocol.params import RemotePrefill, read_params, sign_params
from kvferry.protocol.slots import epoch_to_text, new_epoch
from kvferry.worker.loads.state import LoadState
from tests.fakes.memory_fabric import MemoryFabric, MemoryNetwork
from tests.harness.core.configs import BLOCK_TOKENS
from tests.harness.core.node import Node
from tests.harness.core.runners import no_forward

SCHEDULER_CALLS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "get_loaded_kv_cache_group_ids",
    "update_state_after_alloc",
    "request_finished",
    "request_finished_all_groups",
    "build_connector_meta",
    "update_connector_output",
    "get_kv_connector_stats",
    "has_pending_push_work",
    "has_pending_block_frees",
    "take_events",
)
WORKER_CALLS = (
    "handle_preemptions",
    "bind_connector_metadata",
    "clear_connector_metadata",
    "start_load_kv",
    "wait_for_save",
    "get_finished",
    "get_transfer_results",
    "get_kv_connector_stats",
    "build_connector_worker_meta",
    "get_block_ids_with_load_errors",
)
LONGEST_TOKENS = 1 << 17
_LEASE_S = 3600.0
_MOST_AT_ONCE = 256
_TIMEOUT_S = 120.0


@contextmanager
def _fabric(kind: FabricKind, network: MemoryNetwork) -> Iterator[None]:
    """Workers that are made meanwhile are on this network, or on NIXL."""
    if kind == "nixl":
        yield
        return
    with mock.patch(
        "kvferry.connector.worker_side.side.NixlFabric",
        lambda name, agent: MemoryFabric(name, network),
    ):
        yield


class TimedNode(Node):
    """One engine, and what its connector takes of the scheduler's thread and of the worker's."""

    def __init__(
        self,
        role: str,
        kind: FabricKind,
        network: MemoryNetwork,
        num_blocks: int,
        lease_slots: int,
    ) -> None:
        self.network = network
        with _fabric(kind, network):
            self._make(role, num_blocks, lease_slots)
        self.engine.sample = lambda request_id: 7
        self.scheduler_clock, self.worker_clock = StepClock(), StepClock()
        self.scheduler_clock.wrap(self.engine.connector, SCHEDULER_CALLS)
        self.worker_clock.wrap(self.workers[0], WORKER_CALLS)
        self._dumps = self.scheduler_clock.timed("pickle", pickle.dumps)
        self._loads = self.worker_clock.timed("unpickle", pickle.loads)
        self._report_dumps = self.worker_clock.timed("pickle", pickle.dumps)
        self._report_loads = self.scheduler_clock.timed("unpickle", pickle.loads)

    def _make(self, role: str, num_blocks: int, lease_slots: int) -> None:
        super().__init__(
            role,
            num_blocks=num_blocks,
            max_num_seqs=_MOST_AT_ONCE,
            max_tokens=LONGEST_TOKENS,
            max_step_tokens=LONGEST_TOKENS,
            extra={
                "lease_slots": lease_slots,
                "kv_lease_duration": _LEASE_S,
                "max_leased_fraction": 1.0,
                "load_timeout_s": 3600,
                "max_loads": 4096,
                "staging_pool_bytes": 0,
            },
        )

    def step(self) -> Any:
        """One turn of the engine's loop."""
        self.engine.scheduler.has_requests()
        step = self.engine.schedule()
        step.output.kv_connector_metadata = self._loads(
            self._dumps(step.output.kv_connector_metadata)
        )
        report = self.runners[0].step(step.output, no_forward)
        if report is not None:
            report.kv_connector_worker_meta = self._reported(
                report.kv_connector_worker_meta
            )
            report.kv_connector_stats = self._reported(report.kv_connector_stats)
        output = ModelRunnerOutput(
            req_ids=[], req_id_to_index={}, kv_connector_output=report
        )
        self.engine.finish(
            step, worker=self.aggregator.aggregate([output]).kv_connector_output
        )
        self.engine.stats.clear()
        self.scheduler_clock.end_step()
        self.worker_clock.end_step()
        return step

    def _reported(self, reported: Any) -> Any:
        return (
            None
            if reported is None
            else self._report_loads(self._report_dumps(reported))
        )

    def forget(self) -> None:
        """Forget the times of the preparation."""
        self.scheduler_clock.forget()
        self.worker_clock.forget()

    def loads_running(self) -> int:
        """Loads that have begun and have not ended."""
        return int(self._worker_half.count_loads(LoadState.RUNNING))

    @property
    def agent_name(self) -> str:
        return str(self._worker_half.description.agent)

    @property
    def _worker_half(self) -> Any:
        return self.workers[0].worker_side.worker


class Prompts:
    """Prompts that share no prefix."""

    def __init__(self, seed: int = 1) -> None:
        self._draw = np.random.default_rng(seed)
        self._number = 0

    def next(self, blocks: int) -> tuple[str, list[int]]:
        """A request's name, and as many tokens as fill so many blocks but for one."""
        self._number += 1
        return f"r{self._number}", self._draw.integers(
            1, 1000, blocks * BLOCK_TOKENS - 1
        ).tolist()


def hold(producer: TimedNode, prompts: Prompts, count: int, blocks: int) -> None:
    """`count` leases that no consumer reads."""
    left, side = count, producer.engine.connector.scheduler_side
    end_s = time.monotonic() + _TIMEOUT_S
    while left or not producer.engine.is_idle():
        for _ in range(min(left, _MOST_AT_ONCE)):
            name, prompt = prompts.next(blocks)
            producer.engine.add(name, prompt, {"do_remote_decode": True}, max_tokens=1)
            left -= 1
        producer.step()
        if time.monotonic() > end_s:
            raise TimeoutError(f"{left} leases are not held")
    producer.step()
    if len(side.leases.block_references.held) < count:
        raise RuntimeError(
            f"{len(side.leases.block_references.held)} leases are held, {count} were wanted"
        )


def hand_over(
    producer: TimedNode, consumer: TimedNode, prompts: Prompts, blocks: int
) -> dict[str, Any]:
    """One whole handover. Returns the offer."""
    name, prompt = prompts.next(blocks)
    producer.engine.add(name, prompt, {"do_remote_decode": True}, max_tokens=1)
    params = producer.answer(name).params
    assert params is not None, "the producer made no offer"
    producer.step()
    consumer.engine.add(name, prompt, params, max_tokens=1)
    consumer.answer(name)
    return params


def fly(
    consumer: TimedNode, stuck: TimedNode, prompts: Prompts, count: int, blocks: int
) -> None:
    """`count` loads from a producer that does not answer any more: in flight for ever."""
    params = hand_over(stuck, consumer, prompts, blocks)
    consumer.network.freeze(stuck.agent_name)
    mac_key = stuck.engine.connector.scheduler_side.channel.local.memory.mac_key
    for index in range(count):
        name, prompt = prompts.next(blocks)
        consumer.engine.add(
            name, prompt, another_offer(params, prompt, blocks, index, mac_key)
        )
        if index % _MOST_AT_ONCE == 0:
            consumer.step()
    consumer.until(lambda: consumer.loads_running() >= count)


def another_offer(
    params: Any, prompt: Sequence[int], blocks: int, index: int, mac_key: bytes
) -> dict[str, Any]:
    """The params that the same producer would have written for another prompt."""
    source = read_params(params)
    assert isinstance(source, RemotePrefill)
    ticket = msgspec.structs.replace(
        source.kvferry,
        lease_slot=index,
        lease_epoch=epoch_to_text(new_epoch()),
        digests=digest_chain(Prompt(tokens=prompt)),
    )
    mine = msgspec.structs.replace(
        source,
        remote_request_id=f"stuck-{index}",
        remote_block_ids=(tuple(range(1, blocks + 1)),),
        remote_num_tokens=len(prompt),
        kvferry=ticket,
    )
    return sign_params(mine, mac_key).to_json()
