"""Engines without vLLM, alone: what the tests' own engines, which are made of them, do not use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvferry.connector.standalone import StandaloneEngine
from kvferry.protocol.digests import Prompt
from kvferry.protocol.errors import InvalidBlocks, InvalidParams
from kvferry.protocol.geometry import Place, Topology
from kvferry.protocol.handshake import CacheGroup
from kvferry.protocol.orders import FailureReason
from kvferry.worker.caches import KvCaches
from kvferry.worker.registration import WithdrawalRefused
from tests.fakes.memory_fabric import MemoryFabric, MemoryNetwork
from tests.harness.cache_engine import FACTS, SETTINGS
from tests.harness.exported import slots_of
from tests.harness.fault_fabric import FaultFabric
from tests.harness.inside import thread_of
from tests.harness.ledgers import check_ledgers
from tests.ports import free_port
from tests.waiting import step_until

HEADS, SIZE, BLOCK = 2, 8, 16
PROMPT = Prompt(tokens=range(300))
BLOCKS = (tuple(range(3, 22)),)


class StandalonePair:
    """Producer and consumer of one layer, both of two workers with one head each."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.fabrics: dict[str, FaultFabric] = {}
        self.caches = {
            name: torch.zeros(32, HEADS, BLOCK, SIZE)
            for name in ("producer", "consumer")
        }
        self.producer, self.consumer = (self.engine(name) for name in self.caches)
        self.failed: dict[str, FailureReason] = {}

    def engine(self, name: str) -> StandaloneEngine:
        cache = self.caches[name]
        shards = [
            (
                Place(tp=rank),
                KvCaches.from_views(
                    {("layers.0", "kv"): cache[:, rank : rank + 1]}, first_head=rank
                ),
            )
            for rank in range(HEADS)
        ]
        return StandaloneEngine(
            name,
            shards,
            (CacheGroup(policy="full", block_tokens=BLOCK),),
            FACTS,
            port=free_port(),
            topology=Topology(tp=HEADS),
            settings=SETTINGS,
            make_fabric=self.fabric,
        )

    def fabric(self, agent: str) -> FaultFabric:
        made = self.fabrics[agent] = FaultFabric(MemoryFabric(agent, self.network))
        return made

    def offer(self, request_id: str) -> object:
        """Compute the prompt and offer it."""
        assert self.producer.leases.open(request_id)
        self.producer.step(lambda: self.caches["producer"].normal_())
        params = self.producer.offer(request_id, BLOCKS, PROMPT)
        self.producer.step()
        return params

    def until_sent(self, request_id: str) -> None:
        step_until(
            lambda: request_id in self.producer.step().sent,
            "the blocks are free",
            self.consumer,
        )


@pytest.fixture
def pair() -> Iterator[StandalonePair]:
    made = StandalonePair()
    yield made
    for engine in (made.producer, made.consumer):
        check_ledgers(engine.leases, engine.loads)
        engine.close()


def test_tokens_that_both_prompts_begin_with_are_loaded_by_all_workers(
    pair: StandalonePair,
) -> None:
    prompt = Prompt(tokens=[*range(280), 7, 7])
    assert (
        pair.consumer.start_load("decode", pair.offer("prefill"), prompt, BLOCKS) == 256
    )
    step_until(
        lambda: "decode" in pair.consumer.step().loaded, "it is loaded", pair.producer
    )
    read = list(BLOCKS[0][: 256 // BLOCK])
    assert torch.equal(pair.caches["consumer"][read], pair.caches["producer"][read])
    assert not pair.caches["consumer"][BLOCKS[0][256 // BLOCK]].any()
    pair.until_sent("prefill")


def test_another_prompt_is_computed_and_its_lease_given_back(
    pair: StandalonePair,
) -> None:
    assert (
        pair.consumer.start_load(
            "decode", pair.offer("prefill"), Prompt(tokens=[1, 2, 3]), BLOCKS
        )
        == 0
    )
    pair.until_sent("prefill")
    assert pair.producer.counters.total("leases_released", "release") == 1


def test_params_that_cannot_be_used_are_refused_and_a_request_without_any_is_computed(
    pair: StandalonePair,
) -> None:
    with pytest.raises(InvalidParams):
        pair.consumer.start_load("decode", {"do_remote_prefill": True}, PROMPT, BLOCKS)
    assert pair.consumer.start_load("decode", None, PROMPT, BLOCKS) == 0
    assert pair.producer.offer("never opened", BLOCKS, PROMPT) is None


def test_a_step_that_raises_makes_no_prompt_readable(pair: StandalonePair) -> None:
    engine = pair.producer
    engine.leases.open("p")
    engine.step()
    engine.leases.complete("p")

    def compute() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        engine.step(compute)
    assert not any(slots_of(worker).words.any() for worker in engine.workers)


def test_a_worker_that_cannot_withdraw_keeps_the_pages_of_all(
    pair: StandalonePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise WithdrawalRefused("reads may still write: req=r")

    with monkeypatch.context() as patch:
        patch.setattr(pair.producer.workers[1], "drain", refuse)
        with pytest.raises(WithdrawalRefused, match="req=r"):
            pair.producer.withdraw()
    assert all(worker.registration.is_registered for worker in pair.producer.workers)
    # Both serve again, and consumers are answered.
    assert (
        pair.consumer.start_load("decode", pair.offer("again"), PROMPT, BLOCKS) == 300
    )
    step_until(
        lambda: "decode" in pair.consumer.step().loaded, "it is loaded", pair.producer
    )
    pair.until_sent("again")


def test_a_load_that_one_worker_cannot_read_has_failed(pair: StandalonePair) -> None:
    params = pair.offer("prefill")
    first = pair.producer.description.workers[0].agent
    pair.network.kill(first)
    assert pair.consumer.start_load("decode", params, PROMPT, BLOCKS) == 300
    step_until(
        lambda: pair.failed.update(pair.consumer.step().failed) or pair.failed,
        "it fails",
        pair.producer,
    )
    assert list(pair.failed) == ["decode"]
    step_until(
        lambda: not pair.consumer.writing,
        "none of its blocks is written",
        pair.consumer,
    )
    pair.until_sent("prefill")


def test_blocks_of_a_failed_load_are_named_as_long_as_they_may_be_written(
    pair: StandalonePair,
) -> None:
    agents = [worker.agent for worker in pair.producer.description.workers]
    reader = pair.fabrics[pair.consumer.description.workers[0].agent]

    def freeze() -> None:
        for agent in agents:
            pair.network.freeze(agent)

    reader.on_data_read = freeze
    pair.consumer.start_load("decode", pair.offer("prefill"), PROMPT, BLOCKS)
    step_until(
        lambda: reader.calls["post_data_read"], "it reads", pair.consumer, pair.producer
    )
    for worker in pair.consumer.workers:
        thread_of(worker).runner.timeout_s = 0.0
    step_until(
        lambda: pair.failed.update(pair.consumer.step().failed) or pair.failed,
        "it fails",
        pair.producer,
    )
    assert pair.consumer.writing == {"decode"}
    for agent in agents:
        pair.network.thaw(agent)
    step_until(lambda: not pair.consumer.writing, "its reads have ended", pair.consumer)
    pair.until_sent("prefill")


@pytest.mark.parametrize(
    "view", [torch.zeros(4, 2, 16), torch.zeros(4, 2, 16, 8).transpose(2, 3)]
)
def test_views_of_other_shapes_are_refused(view: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"layers\.0/k: expected"):
        KvCaches.from_views({("layers.0", "k"): view})


@pytest.mark.parametrize("at", [0, 1, 18], ids=["first", "second", "last"])
def test_block_0_stands_for_none_and_is_refused_on_both_ends(
    pair: StandalonePair, at: int
) -> None:
    """The plan leaves its tokens out, so a load into it would be reported as good without them."""
    with_null = (
        tuple(0 if index == at else block for index, block in enumerate(BLOCKS[0])),
    )
    params = pair.offer("prefill")
    with pytest.raises(InvalidBlocks, match=r"blocks\[0\] is 0; expected ids above 0"):
        pair.consumer.start_load("decode", params, PROMPT, with_null)
    assert pair.consumer.start_load("decode", params, PROMPT, BLOCKS) == 300
    step_until(
        lambda: "decode" in pair.consumer.step().loaded, "it is loaded", pair.producer
    )
    assert pair.producer.leases.open("again")
    with pytest.raises(InvalidBlocks, match=r"blocks\[0\] is 0; expected ids above 0"):
        pair.producer.offer("again", with_null, PROMPT)
    pair.producer.leases.abandon("again")


def test_block_0_beyond_the_tokens_that_are_loaded_does_not_matter(
    pair: StandalonePair,
) -> None:
    blocks = ((*BLOCKS[0][:16], 0, 0, 0),)
    assert (
        pair.consumer.start_load(
            "decode", pair.offer("prefill"), Prompt(tokens=[*range(256), 1]), blocks
        )
        == 256
    )
    step_until(
        lambda: "decode" in pair.consumer.step().loaded, "it is loaded", pair.producer
    )
    read = list(BLOCKS[0][:16])
    assert torch.equal(pair.caches["consumer"][read], pair.caches["producer"][read])


def test_blocks_of_other_cache_groups_are_refused(pair: StandalonePair) -> None:
    with pytest.raises(InvalidBlocks, match="those of 1"):
        pair.consumer.start_load(
            "decode", pair.offer("prefill"), PROMPT, (*BLOCKS, *BLOCKS)
        )


def test_an_engine_does_not_load_from_itself(pair: StandalonePair) -> None:
    """The blocks are its own."""
    assert (
        pair.producer.start_load("decode", pair.offer("prefill"), PROMPT, BLOCKS) == 0
    )
    assert pair.producer.counters.total("handshakes_served") == 0


def test_nothing_is_kept_of_what_is_over(pair: StandalonePair) -> None:
    """Neither measurements, which nobody takes here, nor loads, whose request ids may come again."""
    for number in range(3):
        assert (
            pair.consumer.start_load(
                "decode", pair.offer(f"prefill{number}"), PROMPT, BLOCKS
            )
            == 300
        )
        step_until(
            lambda: "decode" in pair.consumer.step().loaded,
            "it is loaded",
            pair.producer,
        )
        pair.until_sent(f"prefill{number}")
    pair.producer.step()
    assert len(pair.consumer.loads) == 0
    assert [
        engine.counters.take_samples() for engine in (pair.producer, pair.consumer)
    ] == [{}, {}]
