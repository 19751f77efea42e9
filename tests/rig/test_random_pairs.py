"""A sample of the planner's random pairs, moved by real NIXL and compared with the brute-force model."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, assume, event, given, seed, settings
from hypothesis import strategies as st

from kvferry.worker.device import HOST
from kvferry.worker.fabric.nixl import NixlFabric
from kvferry.worker.settings import MappedReadsOption, WorkerSettings
from kvferry.worker.worker import MakeFabric
from tests.fakes.memory_fabric import MemoryFabric, MemoryNetwork
from tests.geometry.caches import Side
from tests.geometry.drawn import Drawn
from tests.geometry.feasibility import feasible
from tests.geometry.pairs import Pair, pairs
from tests.rig.engine import SETTINGS
from tests.rig.handover import hand_over, rig_of
from tests.rig.memory import WorkerMemory

pytestmark = pytest.mark.slow

DRAWS = 30
CONVERTED_DRAWS = 15
MAPPED_DRAWS = int(os.environ.get("KVFERRY_MAPPED_PAIRS", "20"))
MAPPED = replace(SETTINGS, mapped_reads=MappedReadsOption.AUTO, staging_pool_bytes=0)
WAYS = st.sampled_from(
    (
        *(replace(SETTINGS, staging_pool_bytes=pool) for pool in (0, 1 << 11, 1 << 16)),
        MAPPED,
    )
)
"""Without a staging pool, with the smallest there is, with one that holds everything, and from mapped memory."""


CONVERSIONS = st.sampled_from(
    (
        ("bfloat16", "float8_e4m3"),
        ("float8_e4m3", "bfloat16"),
        ("float16", "float8_e4m3"),
        ("float8_e4m3", "float16"),
        ("float16", "bfloat16"),
        ("bfloat16", "float32"),
    )
)
SCALES = st.sampled_from(((1.0,), (0.5,), (0.5, 2.0, 1.0)))


def run(
    run_seed: int,
    capsys: pytest.CaptureFixture[str],
    draws: int,
    cases: st.SearchStrategy[tuple[Pair, WorkerSettings]],
    make_fabric: MakeFabric = NixlFabric,
) -> Counter[str]:
    """Hand over so many drawn requests; a failure names the seed that draws them again: `KVFERRY_SEED=N`."""
    seen: Counter[str] = Counter()

    @seed(run_seed)
    @settings(
        max_examples=draws,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(cases)
    def hold(case: tuple[Pair, WorkerSettings]) -> None:
        pair, way = case
        # What cannot work does not become workable by a conversion.
        plain = Drawn(
            replace(
                pair,
                producer=without_dtype(pair.producer),
                consumer=without_dtype(pair.consumer),
            )
        )
        assume(feasible(plain.consumer.description, plain.producer.description))
        with rig_of(pair, way, make_fabric=make_fabric) as (producer, consumer):
            moved = hand_over(pair, producer, consumer)
        event("moved")
        seen["pairs"] += 1
        seen["bytes"] += moved.num_bytes
        seen["descriptors"] += moved.descriptors
        seen["staged bytes"] += moved.staged_bytes
        seen["mapped bytes"] += moved.mapped_bytes
        seen["waves"] += moved.waves

    hold()
    with capsys.disabled():
        print(f"\n{dict(seen)} (KVFERRY_SEED={run_seed})")
    assert seen["pairs"] >= draws
    return seen


def without_dtype(side: Side) -> Side:
    """The side without a cache dtype of its own: the dtype of its model applies."""
    return replace(side, cache_dtype="")


@st.composite
def converted(
    draw: st.DrawFn, ways: st.SearchStrategy[WorkerSettings]
) -> tuple[Pair, WorkerSettings]:
    """A pair whose 16-bit caches are kept in two dtypes; only elements of their own size can be converted."""
    pair, (there, here) = draw(pairs()), draw(CONVERSIONS)
    orders = [
        tuple(replace(order, wide=frozenset()) for order in x.orders)
        for x in (pair.producer, pair.consumer)
    ]
    producer = replace(
        pair.producer, cache_dtype=there, scales=draw(SCALES), orders=orders[0]
    )
    consumer = replace(
        pair.consumer, cache_dtype=here, scales=draw(SCALES), orders=orders[1]
    )
    return replace(pair, producer=producer, consumer=consumer), draw(ways)


def is_mappable() -> bool:
    """Whether the caches of these tests are: those on a device are not (`--device cuda`)."""
    return WorkerMemory.device is HOST


def test_any_pair_that_can_work_is_byte_exact_through_nixl(
    run_seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = run(run_seed, capsys, DRAWS, st.tuples(pairs(), WAYS))
    assert 0 < seen["staged bytes"] < seen["bytes"], "some are staged, and some are not"
    assert bool(seen["mapped bytes"]) == is_mappable()


def test_any_pair_is_byte_exact_from_mapped_memory(
    run_seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """`KVFERRY_MAPPED_PAIRS=2000` draws as many; a third of them are converted, without a staging pool. NIXL would read
    the proofs and nothing else, and takes most of a pair's time, so the fabric is one in memory."""
    if not is_mappable():
        pytest.skip("caches on a device are not mapped")
    network = MemoryNetwork()
    plain = st.tuples(pairs(), st.just(MAPPED))
    cases = st.one_of(plain, plain, converted(st.just(MAPPED)))
    seen = run(
        run_seed, capsys, MAPPED_DRAWS, cases, lambda name: MemoryFabric(name, network)
    )
    assert seen["mapped bytes"]
    assert not seen["bytes"], "the fabric reads nothing"


def test_any_pair_of_two_cache_dtypes_arrives_converted(
    run_seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    # What is converted needs a pool, unless it is mapped.
    ways = (SETTINGS, MAPPED) if is_mappable() else (SETTINGS,)
    seen = run(run_seed, capsys, CONVERTED_DRAWS, converted(st.sampled_from(ways)))
    assert seen["staged bytes"], "what is converted goes through the pool"
    assert bool(seen["mapped bytes"]) == is_mappable(), "or comes from mapped memory"
