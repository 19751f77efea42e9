"""Prompts that are read while they are computed, between engines of any shards: every byte as in a plain load."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st

from kvferry.protocol.params import sign_params
from kvferry.worker.loads.load import Load
from kvferry.worker.loads.state import LoadState
from kvferry.worker.loads.streamed_read import StreamedRead
from kvferry.worker.settings import WorkerSettings
from tests.draws import usual_cases
from tests.geometry.cells import NULL_BLOCK
from tests.geometry.drawn import Drawn
from tests.geometry.effects import number_names
from tests.geometry.feasibility import feasible
from tests.geometry.pairs import Pair, cache_groups, pairs
from tests.geometry.requests import Request, span_of
from tests.harness.inside import thread_of
from tests.rig.engine import RigEngine
from tests.rig.handover import rig_of
from tests.rig.test_named_pairs import NAMED_PAIRS, WAYS
from tests.rig.test_random_pairs import without_dtype
from tests.waiting import step_until

STREAMED = [
    name
    for name in NAMED_PAIRS
    if any(group.policy == "full" for group in NAMED_PAIRS[name].pair.model.groups)
]
REQUEST = "request"
DRAWS = 20


@usual_cases(30)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", STREAMED)
def test_every_byte_arrives_part_by_part(name: str, way: str) -> None:
    early, read = check_stream(NAMED_PAIRS[name].pair, WAYS[way], random.Random(name))
    assert all(early) == (read > 0)


def loads_of(engine: RigEngine) -> list[Load]:
    """Those that have begun. One whose state changes at this moment may be missing: compare their number."""
    found: dict[Load, None] = {}
    for worker in engine.workers:
        loads = thread_of(worker).runner.loads
        for state in LoadState:
            # Copied at once: the workers' threads go on meanwhile.
            if state not in (LoadState.WAITING, LoadState.OVER):
                found |= dict.fromkeys(list(loads.in_state(state)))
    return list(found)


def has_read(load: Load, tokens: int) -> bool:
    """Whether what a worker can read of so many tokens has been read."""
    assert isinstance(load.reading, StreamedRead)
    peer, blocks, stop = (
        load.peer,
        load.reading.listed,
        min(tokens, load.order.stop_token),
    )
    if peer is None or (peer.routes and blocks is None):
        return False
    grows = blocks is not None and blocks.grows
    return (
        not grows
        or stop <= load.order.first_token
        or any(chunk[0] >= stop for chunk in load.record.chunks)
    )


def listed_blocks(
    request: Request, spans: Sequence[int], grows: Sequence[bool], draw: random.Random
) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """Per cache group the blocks that the row lists in the end, and the first token of them: of windows and states any
    that are not held may be left out."""
    lists, held_from = [], []
    for ids, span, grown in zip(request.remote, spans, grows, strict=True):
        count = -(-request.num_tokens // span)
        whole = (NULL_BLOCK,) * (count - len(ids)) + ids[-count:]
        first = (
            0
            if grown
            else draw.randint(
                0, next(index for index, block in enumerate(whole) if block)
            )
        )
        lists.append(whole[first:])
        held_from.append(first * span)
    return lists, tuple(held_from)


def early_step(pair: Pair) -> int:
    """Of so many tokens a multiple can be read early: they fill blocks of all groups that hold every token."""
    groups = cache_groups(pair.model, pair.producer)
    shards = pair.producer.shards
    return math.lcm(
        *(
            span_of(shards, x.policy, x.block_tokens)
            for x in groups
            if x.holds_every_token
        )
    )


def have_read(consumer: RigEngine, tokens: int) -> bool:
    loads = loads_of(consumer)
    num_known = len(loads) + len(consumer.seen.load_records)
    is_whole = num_known == len(consumer.workers)
    return is_whole and all(has_read(load, tokens) for load in loads)


def check_stream(
    pair: Pair, settings_of_both: WorkerSettings, draw: random.Random
) -> tuple[list[int], int]:
    """Compute a request in parts of 1 to 30 tokens, and load it meanwhile: windows and states are listed when the
    prompt is complete, states, as in vLLM, when the request has ended.

    Returns:
        By worker the bytes that were read before the prompt was complete, and the tokens that could be.

    Raises:
        AssertionError: a byte is wrong, or nothing was read although it could be.
    """
    request, num_groups = pair.request, len(pair.model.groups)
    worker_settings = replace(settings_of_both, row_blocks=(200,) * num_groups)
    with rig_of(pair, worker_settings) as (producer, consumer):
        groups, shards = producer.description.groups, producer.side.shards
        spans = [span_of(shards, group.policy, group.block_tokens) for group in groups]
        grows, step = [group.holds_every_token for group in groups], early_step(pair)
        before, numbers = consumer.snapshots(), number_names(consumer.description)
        assert producer.leases.open(REQUEST)
        producer.step()
        producer.compute(request, numbers)
        lease = producer.leases.running(REQUEST)
        assert lease is not None
        stream = producer.leases.streams.begin(lease)
        assert stream is not None
        lists, held_from = listed_blocks(request, spans, grows, draw)
        params = producer.signed(
            lease, ((),) * num_groups, request.num_tokens, stream.row
        )
        ticket = msgspec.structs.replace(params.kvferry, held_from=held_from)
        params = sign_params(
            msgspec.structs.replace(params, kvferry=ticket), producer.mac_key
        )
        consumer.order_load(
            REQUEST,
            params,
            request.first_token,
            request.stop_token,
            lambda _: request.local,
        )
        consumer.step()
        loads, records = partial(loads_of, consumer), consumer.seen.load_records
        step_until(
            lambda: len(loads()) + len(records) == len(consumer.workers),
            "all have begun",
            consumer,
        )
        has_states = any(group.policy == "state" for group in groups)
        done = read = 0

        def listed(tokens: int, *, is_last: bool) -> tuple[tuple[int, ...], ...]:
            sides = zip(lists, spans, grows, strict=True)
            return tuple(
                ids[: -(-tokens // span)] if grown else ids * is_last
                for ids, span, grown in sides
            )

        while done < request.num_tokens:
            done = min(done + draw.randint(1, 30), request.num_tokens)
            is_last = done == request.num_tokens and not has_states
            producer.leases.streams.publish(
                lease, stream, done, listed(done, is_last=is_last)
            )
            if is_last:
                producer.leases.complete(REQUEST)
            producer.step()
            whole = done // step * step
            if done < request.num_tokens and whole > read:
                read = whole
                all_have_read = partial(have_read, consumer, read)
                step_until(all_have_read, f"{read} tokens are read", consumer)
        if has_states:
            producer.leases.streams.publish(
                lease, stream, done, listed(done, is_last=True)
            )
            producer.leases.finish(REQUEST)
            producer.step()
        else:
            producer.leases.request_ended(lease)
        step_until(
            lambda: consumer.seen.is_over(REQUEST),
            "the load is over",
            producer,
            consumer,
        )
        assert REQUEST in consumer.seen.loaded, consumer.seen.failed
        for memory, snapshot in zip(consumer.memories, before, strict=True):
            memory.check_loaded(snapshot, consumer.description.groups, request, numbers)
        step_until(
            lambda: REQUEST in producer.seen.sent,
            "the blocks are free",
            producer,
            consumer,
        )
        early = [record.early_bytes for record in records]
        assert any(early) or read <= request.first_token
        return early, read


@pytest.mark.slow
def test_any_pair_is_byte_exact_part_by_part(
    run_seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pairs with a cache that grows with the prompt, windows and states beside it too. `KVFERRY_SEED=N` draws them
    again."""
    seen: Counter[str] = Counter()

    @seed(run_seed)
    @settings(
        max_examples=DRAWS,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(pairs(), st.sampled_from(list(WAYS.values())), st.integers(0, 1 << 16))
    def hold(pair: Pair, way: WorkerSettings, number: int) -> None:
        policies = {group.policy for group in pair.model.groups}
        pair = replace(
            pair,
            producer=without_dtype(pair.producer),
            consumer=without_dtype(pair.consumer),
        )
        request = pair.request
        assume(
            "full" in policies
            and (request.num_tokens - 1) // early_step(pair) * early_step(pair)
            > request.first_token
        )
        drawn = Drawn(pair)
        assume(feasible(drawn.consumer.description, drawn.producer.description))
        seen["early bytes"] += sum(check_stream(pair, way, random.Random(number))[0])
        seen["hybrids" if policies != {"full"} else "full"] += 1

    hold()
    with capsys.disabled():
        print(f"\n{dict(seen)} (KVFERRY_SEED={run_seed})")
    assert seen["hybrids"]
    assert seen["early bytes"] > DRAWS
