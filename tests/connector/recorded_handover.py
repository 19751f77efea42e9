"""A handover between two engines of a recorded model, on NIXL."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace

import torch

from kvferry.worker.fabric.nixl import NixlFabric
from tests.connector.caches import storage_of
from tests.connector.recorded_engine import RecordedEngine
from tests.geometry.requests import Request
from tests.harness.cache_engine import SETTINGS, CacheEngine
from tests.harness.handover import hand_over

_numbers = itertools.count(1)


def hand_over_recorded(
    source: RecordedEngine,
    target: RecordedEngine,
    num_tokens: int,
    seed: int,
    staging_pool_bytes: int,
) -> int:
    """A sequence is computed here and loaded there.

    Returns:
        The bytes that NIXL has moved.

    Raises:
        AssertionError: the load is not good, the consumer's layers read something else, or a byte beside the request's
            blocks has changed on either side.
    """
    theirs = source.place_sequence(num_tokens, range(1, 40))
    ours = target.place_sequence(num_tokens, range(39, 0, -1))
    request = Request(target.reported(ours), source.reported(theirs), 0, num_tokens, num_tokens)
    settings = replace(SETTINGS, staging_pool_bytes=staging_pool_bytes)
    with contextlib.ExitStack() as stack:
        engines = []
        for letter, recorded in (("P", source), ("C", target)):
            shards = [(one.place, one.caches) for one in recorded.workers]
            name = f"{letter}recorded{next(_numbers)}"
            engines.append(
                CacheEngine(
                    name, NixlFabric, shards, recorded.groups, recorded.topology, settings=settings
                )
            )
            stack.callback(engines[-1].close)
            stack.callback(engines[-1].wait_until_idle)
        before = _contents(target)
        producer, consumer = engines
        moved = hand_over(
            producer,
            consumer,
            request,
            lambda: source.write(theirs, seed),
            lambda: target.check(ours, seed),
        )
        for (one, loaded), old, now in zip(
            target.loaded_bytes(ours), before, _contents(target), strict=True
        ):
            assert torch.equal(now[~loaded], old[~loaded]), (
                f"{one.place}: bytes of other blocks have changed"
            )
        return sum(totals.transferred_bytes for totals in moved)


def _contents(engine: RecordedEngine) -> list[torch.Tensor]:
    return [storage_of(next(iter(one.views.values()))).clone() for one in engine.workers]
