"""Prompts that are read while they are computed, between engines of any shards: every byte as in a plain load."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from kvferry.worker.worker import FerryWorker
from tests.geometry.effects import number_names
from tests.geometry.requests import span_of
from tests.rig.engine import SETTINGS
from tests.rig.handover import rig_of
from tests.rig.test_named_pairs import POOLS, SCENES
from tests.waiting import step_until

STREAMED = [name for name in SCENES if not name.startswith(("hybrid", "window"))]
REQUEST = "request"


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("name", STREAMED)
def test_every_byte_arrives_part_by_part(name: str, pool: str) -> None:
    pair, draw = SCENES[name].pair, random.Random(name)
    request = pair.request
    settings = replace(SETTINGS, staging_pool_bytes=POOLS[pool], row_blocks=tuple(200 for _ in pair.model.groups))
    with rig_of(pair, settings) as (producer, consumer):
        groups = producer.description.groups
        spans = [span_of(producer.side.shards, group.policy, group.block_tokens) for group in groups]
        before, numbers = consumer.snapshots(), number_names(consumer.description)
        assert producer.leases.open(REQUEST)
        producer.step()
        producer.compute(request, numbers)
        lease = producer.leases.running(REQUEST)
        assert lease is not None
        stream = producer.leases.streams.begin(lease)
        assert stream is not None
        params = producer.signed(lease, tuple(() for _ in groups), request.num_tokens, stream.row)
        consumer.order_load(REQUEST, params, request.first_token, request.stop_token, lambda _: request.local)
        consumer.step()
        done = read = 0
        step = math.lcm(*spans)

        def has_read(worker: FerryWorker) -> bool:
            loads = list(worker._thread.runner.alive())
            return any(chunk[0] >= read for load in loads for chunk in load.record.chunks)

        while done < request.num_tokens:
            done = min(done + draw.randint(1, 30), request.num_tokens)
            listed = tuple(ids[: -(-done // span)] for ids, span in zip(request.remote, spans, strict=True))
            producer.leases.streams.publish(lease, stream, done, listed)
            if done == request.num_tokens:
                producer.leases.complete(REQUEST)
            producer.step()
            whole = done // step * step
            if done < request.num_tokens and whole > read:
                read = whole
                step_until(lambda: all(map(has_read, consumer.workers)), f"{whole} tokens are read", consumer)
        producer.leases.request_ended(lease)
        step_until(lambda: consumer.seen.is_over(REQUEST), "the load is over", producer, consumer)
        assert REQUEST in consumer.seen.loaded, consumer.seen.failed
        for memory, snapshot in zip(consumer.memories, before, strict=True):
            memory.check_loaded(snapshot, consumer.description.groups, request, numbers)
        assert all(record.early_bytes for record in consumer.seen.load_records) == (read > 0)
        step_until(lambda: REQUEST in producer.seen.sent, "the blocks are free", producer, consumer)
