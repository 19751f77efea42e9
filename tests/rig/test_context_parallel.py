"""A prompt whose tokens are divided among ranks, read through NIXL from the replicas that the plan chose.

The ranks are processes of a real group. The bytes of a token in the caches follow from its position alone, so a token
that no rank computed, at another position or written to another slot is a wrong byte at the consumer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from kvferry.plan.planner import plan_engine
from tests.geometry.handmade import attention, latent, pair, side
from tests.geometry.models import Model
from tests.geometry.pairs import Pair
from tests.rig.context_parallel import ContextParallelEngine, Read, read_by
from tests.rig.context_parallel_rank import compute_steps
from tests.rig.engine import RigEngine
from tests.rig.handover import hand_over, rig_of
from tests.worker.context_parallel.ranks import RankPool, rank_pool

TOKENS = 45


@dataclass(frozen=True)
class ReadPair:
    """A pair, and from which producer workers each consumer worker must read.

    Attributes:
        readers: per consumer worker the (pcp, tp) ranks of the producer that it reads.
    """

    pair: Pair
    readers: tuple[tuple[tuple[int, int], ...], ...]


def scene(
    model: Model,
    pcp: int,
    *readers: tuple[tuple[int, int], ...],
    tp: int = 1,
    here: int = 16,
) -> ReadPair:
    """The consumer has a tensor parallel rank for every one of `readers`, blocks of `here` tokens, and NHD caches."""
    there = side(model, pcp=pcp, tp=tp)
    return ReadPair(
        pair(
            model,
            there,
            side(model, tp=len(readers), block=here, layout="NHD"),
            tokens=TOKENS,
        ),
        readers,
    )


CASES = {
    "pcp 2 to tp 1": scene(attention(), 2, ((0, 0),)),
    "pcp 2 to tp 2": scene(attention(), 2, ((0, 0),), ((1, 0),)),
    "pcp 4 to tp 4, other blocks": scene(
        attention(), 4, ((0, 0),), ((1, 0),), ((2, 0),), ((3, 0),), here=24
    ),
    "pcp 2 and tp 2 to tp 4": scene(
        attention(), 2, ((0, 0),), ((1, 0),), ((0, 1),), ((1, 1),), tp=2
    ),
    "mla, pcp 2 to tp 2": scene(latent(), 2, ((0, 0),), ((1, 0),)),
    "mla, pcp 4 to tp 2": scene(latent(), 4, ((0, 0),), ((1, 0),)),
}

ROWS = {2: (15, 13, 2), 4: (9, 7, 2)}
"""Rows of every rank: of 20, 24 and 1 tokens of the request, of a decode, and of 7 tokens in the first step."""


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with rank_pool(4, compute_steps.__module__) as made:
        yield made


def planned(producer: RigEngine, consumer: RigEngine) -> Read:
    return read_by(plan_engine(consumer.description, producer.description))


@pytest.mark.parametrize("name", CASES)
def test_every_byte_comes_from_the_replicas_that_the_plan_spreads_readers_over(
    pool: RankPool, name: str
) -> None:
    """All heads that no route reads are made wrong, so only the heads of the plan can have been read."""
    made = CASES[name].pair
    with rig_of(made, make_producer=functools.partial(ContextParallelEngine, pool)) as (
        producer,
        consumer,
    ):
        assert isinstance(producer, ContextParallelEngine)
        read = planned(producer, consumer)
        producer.spoil = {
            index: heads - read[index] for index, heads in producer.everything().items()
        }
        hand_over(made, producer, consumer)
        plans = plan_engine(consumer.description, producer.description)
    readers = tuple(
        tuple(
            (route.place.pcp, route.place.tp) for route in plan.routes if route.slices
        )
        for plan in plans
    )
    assert readers == CASES[name].readers
    assert not producer.unequal, (
        "every replica holds all tokens of all requests, and nothing else has changed"
    )
    ranks = made.producer.shards.topology.pcp
    assert producer.computed_rows == [(rows,) * ranks for rows in ROWS[ranks]]
