"""Pairs that people run, through real NIXL: every byte in place, every worker notified, every block free again."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from kvferry.protocol.handshake import WorkerDescription
from kvferry.worker.device import HOST
from kvferry.worker.peer_memory.mapping import WorkerMapping
from kvferry.worker.peer_memory.port import NotMappable, PeerMemory
from kvferry.worker.peers import peer
from kvferry.worker.settings import MappedReadsOption
from tests.draws import usual_cases
from tests.fakes.memory_fabric import MemoryFabric, MemoryNetwork
from tests.geometry.handmade import attention, hybrid, latent, pair, side
from tests.geometry.models import Model
from tests.geometry.pairs import Pair
from tests.rig.engine import SETTINGS
from tests.rig.handover import hand_over, rig_of
from tests.rig.memory import WorkerMemory

WAYS = {
    "direct": replace(SETTINGS, staging_pool_bytes=0),
    "staged": SETTINGS,
    "mapped": replace(
        SETTINGS, staging_pool_bytes=0, mapped_reads=MappedReadsOption.AUTO
    ),
}
"""Of every pair: by the settings of both engines."""


@dataclass(frozen=True)
class NamedPair:
    """A pair, and the amounts to be read.

    Attributes:
        read_tokens: tokens in the units that are read.
        copies: how often they are read: replicas among the consumer's workers.
        other_bytes: bytes read of groups that do not hold every token.
    """

    pair: Pair
    read_tokens: int
    copies: int = 1
    other_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        tokens = [
            kind.heads * kind.elements * kind.element_bytes * len(group.layers)
            for group in self.pair.model.groups
            if group.policy == "full"
            for kind in group.kinds
        ]
        return sum(tokens) * self.read_tokens * self.copies + self.other_bytes


def pipeline(producer: int, consumer: int) -> NamedPair:
    model = attention(layers=3)
    return NamedPair(
        pair(model, side(model, pp=producer), side(model, pp=consumer), tokens=45), 48
    )


def tensor(heads: int, producer: int, consumer: int, copies: int = 1) -> NamedPair:
    model = attention(heads=heads)
    return NamedPair(
        pair(model, side(model, tp=producer), side(model, tp=consumer), tokens=45),
        48,
        copies,
    )


def context(model: Model, producer: int, consumer: int) -> NamedPair:
    there, here = (
        side(model, tp=producer, dcp=producer, run=4),
        side(model, tp=consumer, dcp=consumer, run=2),
    )
    return NamedPair(pair(model, there, here, tokens=45), 46 if consumer > 1 else 48)


def blocks(
    producer: int, consumer: int, read_tokens: int, layout: str = "HND"
) -> NamedPair:
    model = attention(heads=2)
    there, here = (
        side(model, block=producer, layout=layout),
        side(model, block=consumer, layout=layout),
    )
    return NamedPair(pair(model, there, here, tokens=99), read_tokens)


def layouts(producer: str, consumer: str, size: int = 8) -> NamedPair:
    model = attention(size=size)
    return NamedPair(
        pair(
            model, side(model, layout=producer), side(model, layout=consumer), tokens=45
        ),
        48,
    )


def replicas(producer: int, consumer: int) -> NamedPair:
    model = attention()
    return NamedPair(
        pair(
            model, side(model, pcp=producer), side(model, pcp=consumer, tp=2), tokens=45
        ),
        48,
        consumer,
    )


def states(producer: int, consumer: int, *, overlaid: bool) -> NamedPair:
    """Of a window of 20 tokens of 45, the blocks of the tokens 16 to 47; a state of (6 + 2 + 2)·6 + 4·20 bytes."""
    model = hybrid()
    made = pair(
        model,
        side(model, tp=producer, overlaid=overlaid),
        side(model, tp=consumer, overlaid=overlaid),
        tokens=45,
    )
    return NamedPair(made, 48, other_bytes=(6 + 2 + 2) * 6 + 4 * 20 + 32 * 2 * 16)


def windows(producer: int, consumer: int, held_from: int) -> NamedPair:
    """A window of 20 tokens of 45: the tokens before the held ones in a block become zero."""
    model = attention(window=20)
    there, here = side(model, block=producer), side(model, block=consumer, tp=2)
    return NamedPair(
        pair(model, there, here, tokens=45),
        0,
        other_bytes=(48 - held_from) * 4 * 2 * 32,
    )


NAMED_PAIRS = {
    "tp 2 to 3": tensor(6, 2, 3),
    "tp 3 to 2": tensor(6, 3, 2),
    "tp 6 to 4": tensor(6, 6, 4),
    "5 heads, tp 2 to 3": tensor(5, 2, 3),
    "2 heads, tp 4 to 2": tensor(2, 4, 2),
    "2 heads, tp 4 to 1": tensor(2, 4, 1),
    "2 heads, tp 2 to 4": tensor(2, 2, 4, copies=2),
    "pp 2 to 1": pipeline(2, 1),
    "pp 1 to 2": pipeline(1, 2),
    "pp 2 to 3": pipeline(2, 3),
    "dcp 2 to 1": context(attention(), 2, 1),
    "dcp 1 to 2": context(attention(), 1, 2),
    "mla, dcp 3 to 2": context(latent(), 3, 2),
    "mla, tp 4 to 2": NamedPair(
        pair(latent(), side(latent(), tp=4), side(latent(), tp=2), tokens=45),
        48,
        copies=2,
    ),
    "blocks of 32 to 64, cpu": blocks(32, 64, 128, "cpu"),
    "blocks of 128 to 32, cpu": blocks(128, 32, 128, "cpu"),
    "blocks of 16 to 24": blocks(16, 24, 104),
    "blocks of 24 to 16, cpu": blocks(24, 16, 104, "cpu"),
    "HND to NHD": layouts("HND", "NHD"),
    "NHD to cpu": layouts("NHD", "cpu"),
    "cross-layer to K and V apart": layouts("cross-layer", "K and V apart"),
    "runs of 2 bytes": layouts("K and V apart", "NHD", size=1),
    "hybrid, tp 2 to 1": states(2, 1, overlaid=False),
    "hybrid, tp 1 to 2, groups over the same bytes": states(1, 2, overlaid=True),
    "window, blocks of 16 to 64": windows(16, 64, held_from=16),
    "window, blocks of 8 to 48": windows(8, 48, held_from=24),
    "pcp 2 to 1": replicas(2, 1),
    "pcp 1 to 2": replicas(1, 2),
}


@pytest.mark.parametrize("is_mapped", [True, False])
def test_without_a_pool_two_cache_dtypes_need_mapped_memory(is_mapped: bool) -> None:
    if WorkerMemory.device is not HOST:
        pytest.skip("caches on a device are not mapped")
    model = attention()
    here = replace(side(model), cache_dtype="float8_e4m3", scales=(0.5,))
    made = pair(model, replace(side(model), cache_dtype="bfloat16"), here, tokens=45)
    mapped_reads = MappedReadsOption.AUTO if is_mapped else MappedReadsOption.OFF
    no_pool = replace(SETTINGS, staging_pool_bytes=0, mapped_reads=mapped_reads)
    with rig_of(made, no_pool) as (producer, consumer):
        if is_mapped:
            assert hand_over(made, producer, consumer).mapped_bytes
            return
        with pytest.raises(AssertionError, match="plan"):
            hand_over(made, producer, consumer)


@usual_cases(45)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMED_PAIRS)
def test_every_byte_arrives(name: str, way: str) -> None:
    scene = NAMED_PAIRS[name]
    if way == "mapped" and WorkerMemory.device is not HOST:
        pytest.skip("caches on a device are not mapped")
    with rig_of(scene.pair, WAYS[way]) as (producer, consumer):
        moved = hand_over(scene.pair, producer, consumer)
    if way == "mapped":
        assert (moved.mapped_bytes, moved.num_bytes) == (scene.num_bytes, 0), (
            "NIXL reads nothing"
        )
        return
    assert not moved.mapped_bytes
    if way == "direct":
        assert moved.num_bytes == scene.num_bytes
        assert not moved.staged_bytes
    else:
        assert moved.num_bytes >= scene.num_bytes, (
            "what is staged may bring more of a block than is needed"
        )
        in_place = moved.num_bytes - moved.staged_bytes
        assert not moved.staged_bytes or in_place < scene.num_bytes, (
            "what is staged is not read in place as well"
        )


def test_one_request_after_the_other_between_the_same_engines() -> None:
    """The second one finds its peers connected, and other tokens in the same blocks."""
    made = NAMED_PAIRS["tp 2 to 3"].pair
    shorter = replace(made.request, num_tokens=42, stop_token=42)
    with rig_of(made) as (producer, consumer):
        hand_over(made, producer, consumer, "first")
        hand_over(replace(made, request=shorter), producer, consumer, "second")


@pytest.mark.parametrize(
    "name",
    [
        "tp 2 to 3",
        "tp 6 to 4",
        "pp 2 to 1",
        "dcp 2 to 1",
        "mla, dcp 3 to 2",
        "hybrid, tp 2 to 1",
        "pcp 2 to 1",
    ],
)
def test_every_byte_arrives_where_only_every_second_worker_is_mapped(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if WorkerMemory.device is not HOST:
        pytest.skip("caches on a device are not mapped")
    scene = NAMED_PAIRS[name]
    network = MemoryNetwork()
    agents: list[str] = []

    def some_mapped(
        peer_memory: PeerMemory, worker: WorkerDescription
    ) -> WorkerMapping:
        if worker.agent not in agents:
            agents.append(worker.agent)
        if agents.index(worker.agent) % 2:
            raise NotMappable("it is the second")
        return WorkerMapping(peer_memory, worker)

    monkeypatch.setattr(peer, "WorkerMapping", some_mapped)
    settings = replace(SETTINGS, mapped_reads=MappedReadsOption.AUTO)
    with rig_of(
        scene.pair, settings, make_fabric=lambda agent: MemoryFabric(agent, network)
    ) as (
        producer,
        consumer,
    ):
        moved = hand_over(scene.pair, producer, consumer)
    assert moved.mapped_bytes
    assert moved.num_bytes, "those of the others are read"
    in_place = moved.num_bytes - moved.staged_bytes
    assert moved.mapped_bytes + in_place <= scene.num_bytes, "no byte is brought twice"
