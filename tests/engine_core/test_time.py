"""Two whole engines when something takes long: a load that hangs, a consumer that is busy, a producer that stalls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.worker.fabric.nixl import NixlFabric
from kvferry.worker.fabric.port import (
    DescriptorRows,
    LocalDescriptors,
    Transfer,
    TransferState,
)
from tests.harness.core.node import Node
from tests.harness.core.scheduler import tokens
from tests.harness.core.toy_model import expected_tokens
from tests.harness.fault_fabric import reads_beside_blocks
from tests.harness.inside import thread_of
from tests.waiting import step_until, wait_until

pytestmark = pytest.mark.slow

COUNT = 4
PROMPT, OTHER = tokens(40), tokens(20, seed=100)
LEASE_S = 2.0


class Hanging:
    """While it is on, no read of this process into blocks ever seems to end. (Others pin no blocks.)"""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_on = False
        self.polled: set[NixlFabric] = set()
        self._beside_blocks: set[LocalDescriptors] = set()
        self._reads: set[Transfer] = set()
        poll, post_read, prepare_local = (
            NixlFabric.poll,
            NixlFabric.post_read,
            NixlFabric.prepare_local,
        )

        def prepare(fabric: NixlFabric, rows: DescriptorRows) -> LocalDescriptors:
            made = prepare_local(fabric, rows)
            if reads_beside_blocks(rows):
                self._beside_blocks.add(made)
            return made

        def post(fabric: NixlFabric, local: LocalDescriptors, *others: Any) -> Transfer:
            made = post_read(fabric, local, *others)
            if local not in self._beside_blocks:
                self._reads.add(made)
            return made

        def poll_late(fabric: NixlFabric, transfer: Transfer) -> TransferState:
            if not self.is_on or transfer not in self._reads:
                return poll(fabric, transfer)
            self.polled.add(fabric)
            return TransferState.IN_FLIGHT

        for name, replaced in (
            ("poll", poll_late),
            ("post_read", post),
            ("prepare_local", prepare),
        ):
            monkeypatch.setattr(NixlFabric, name, replaced)

    def end_deadlines(self, consumer: Node) -> None:
        """The deadlines of all loads pass, once every worker has a transfer under way."""
        workers = consumer.ferry_workers
        wait_until(lambda: len(self.polled) == len(workers), "every worker reads")
        for worker in workers:
            thread_of(worker).runner.timeout_s = 0.0


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    made = Hanging(monkeypatch)
    yield made
    made.is_on = False


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize(
    "config",
    [{}, {"tp": 2, "overlap": True}],
    ids=["one worker", "two workers, overlapping"],
)
def test_a_load_that_hangs_costs_its_deadline_and_its_blocks_until_it_is_dead(
    make: Any, hanging: Hanging, policy: str, config: dict[str, Any]
) -> None:
    producer, consumer = (
        make("kv_producer", **config),
        make("kv_consumer", policy=policy, **config),
    )
    consumer.decode("first", OTHER, producer.prefill("first", OTHER))
    params = producer.prefill("p", PROMPT)
    hanging.is_on = True
    consumer.engine.add("d", PROMPT, params, max_tokens=COUNT)
    consumer.step()
    hanging.end_deadlines(consumer)
    answer = consumer.answer("d")
    right = (expected_tokens(PROMPT, COUNT), "length")
    assert (answer.tokens, answer.finish_reason) == (
        right if policy == "recompute" else ([], "error")
    )
    consumer.until(consumer.engine.is_idle)
    for _ in range(5):
        consumer.step()
    assert not consumer.engine.scheduler.requests
    assert consumer.engine.used_blocks == 3
    assert consumer.engine.scheduler.has_requests(), (
        "the engine must step until the transfer is dead"
    )
    hanging.is_on = False
    consumer.until(lambda: consumer.engine.is_whole)
    assert consumer.engine.counted("failed_loads", "deadline") == config.get("tp", 1)
    assert consumer.engine.counted("failed_requests") == (policy == "fail")
    assert consumer.engine.counted("local_recomputes", "load_failed") == (
        policy == "recompute"
    )
    assert not consumer.engine.counted("aborted_loads")


def test_a_prompt_that_waits_for_blocks_longer_than_its_lease_is_loaded_all_the_same(
    make: Any,
) -> None:
    producer, consumer = (
        make("kv_producer", extra={"kv_lease_duration": LEASE_S}),
        make("kv_consumer", num_blocks=8),
    )
    long = tokens(70, seed=5)
    consumer.engine.add("long", long, max_tokens=40)
    consumer.step()
    consumer.engine.add("d", PROMPT, producer.prefill("p", PROMPT), max_tokens=COUNT)
    leases = producer.engine.connector.scheduler_side.leases
    over_s = leases.clock.awake_s + 2 * LEASE_S
    while len(consumer.engine.answers["long"].tokens) < 20:
        consumer.step()
    step_until(
        lambda: leases.clock.awake_s > over_s, "two leases have passed", producer
    )
    assert consumer.engine.status("d") == "WAITING"
    assert consumer.answer("d").tokens == expected_tokens(PROMPT, COUNT)
    assert consumer.answer("long").tokens == expected_tokens(long, 40)
    assert consumer.engine.counted("local_recomputes", "load_failed") == 0
    assert consumer.engine.counted("heartbeats") > 0
    producer.until(lambda: producer.engine.is_whole)
