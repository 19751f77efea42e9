"""Prefixes out of the caches of engines that differ, through real NIXL: every byte in place, every block free again.

A lease of a prefix differs from a prompt's by who opens it and when, and not in how it is read. So a few pairs of each
kind do: layouts above all, since a prefix is mostly asked for between engines that were configured apart.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.worker.device import HOST
from tests.harness.handover import lease_prefix
from tests.rig.handover import hand_over, rig_of
from tests.rig.memory import WorkerMemory
from tests.rig.test_named_pairs import NAMED_PAIRS, WAYS, layouts

PAIRS = {
    "HND to NHD": layouts("HND", "NHD").pair,
    "NHD to HND": layouts("NHD", "HND").pair,
    "NHD to cpu": layouts("NHD", "cpu").pair,
    "cpu to HND": layouts("cpu", "HND").pair,
    **{
        name: NAMED_PAIRS[name].pair
        for name in (
            "cross-layer to K and V apart",
            "blocks of 16 to 24",
            "tp 2 to 3",
            "hybrid, tp 2 to 1",
        )
    },
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PAIRS)
def test_every_byte_of_a_prefix_arrives(name: str, way: str) -> None:
    """The step that opens the lease writes the blocks: nothing may be read before it is over."""
    pair = PAIRS[name]
    if way == "mapped" and WorkerMemory.device is not HOST:
        pytest.skip("caches on a device are not mapped")
    with rig_of(pair, WAYS[way]) as (producer, consumer):
        hand_over(pair, producer, consumer, "prefix-1", lease_prefix)
        assert producer.counters.total("prefixes_released", "done") == 1


def test_the_part_beyond_the_own_hit_is_read_of_another_layout() -> None:
    pair = PAIRS["NHD to HND"]
    beyond = replace(pair, request=replace(pair.request, first_token=16))
    with rig_of(beyond) as (producer, consumer):
        hand_over(beyond, producer, consumer, "prefix-1", lease_prefix)
