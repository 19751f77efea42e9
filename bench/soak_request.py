"""One request of a soak, from its prefill to its last free block, with the fault that its script has for it.

A life is a generator: a `yield` says that there is nothing to do before the engines have stepped.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TYPE_CHECKING

from bench.soak_engine import LEASE_S, LOAD_TIMEOUT_S, SoakEngine
from bench.soak_fabric import ERRORS, METHODS, SoakFabric
from bench.soak_schedule import Fault, Script
from kvferry.protocol.handshake import LeaseName
from kvferry.protocol.params import RemotePrefill, read_params
from tests.harness.gates import Hold
from tests.harness.prefills import Prefill

if TYPE_CHECKING:
    from bench.soak_fleet import Fleet

Life = Generator[None, None, str]
Wait = Generator[None, None, None]

STUCK_S = 60.0
FREE_WITHIN_S = LEASE_S + 30.0
"""A lease and one step; the rest is for machines with other things to do."""

DEAD_PRODUCER, DEAD_CONSUMER = "ended with its producer", "ended with its consumer"
_HELD_UP_S = {
    Fault.STALL: 0.2,
    Fault.REVOKED: 0.15,
    Fault.PREEMPTED: 0.1,
    Fault.DEADLINE: LOAD_TIMEOUT_S + 0.3,
}
_TAKEN_READS = 8
_FROZEN_S = (0.3, 1.0, LOAD_TIMEOUT_S + 0.5)
_NEVER_GOOD = {Fault.LATE, Fault.TAMPERED, Fault.MIXED}


def life(fleet: Fleet, script: Script) -> Life:
    """Returns what became of the request, in words."""
    name, fault = f"r{script.index}", script.fault
    while not fleet.producers[script.producer].leases.slots.free:
        yield
    producer = fleet.producers[script.producer]
    prefill = Prefill(producer, producer.memories, name, script.tokens, script.seed)
    making = _compute(fleet, script, producer, prefill)
    for _ in making:
        if prefill.params is not None:
            break
        yield
    if producer.is_dead:
        return DEAD_PRODUCER
    if prefill.params is None:
        return "aborted"
    outcome, offered = "params dropped", prefill.params
    if fault in (Fault.LATE, Fault.DROPPED_PARAMS):
        yield from making
    if fault is Fault.LATE:
        yield from _until_free(fleet, producer, name)
    if fault is not Fault.DROPPED_PARAMS:
        params = _on_the_way(fleet, script, offered)
        fleet.last_params = offered
        fleet.counts.streamed += script.is_streamed
        outcome = yield from _beside(
            making, _load(fleet, script, producer, script.consumer, params, name)
        )
        if outcome == "loaded" and (fault in _NEVER_GOOD or not prefill.is_complete):
            fleet.counts.violations[f"loaded with {fault}"] += 1
    yield from _until_free(fleet, producer, name)
    if fault is Fault.REPLAYED and not producer.is_dead:
        again = yield from _load(
            fleet,
            script,
            producer,
            script.choice % len(fleet.consumers),
            offered,
            f"{name}-again",
        )
        if again == "loaded":
            fleet.counts.violations["loaded a replay"] += 1
        return f"{outcome}; again: {again}"
    return outcome


def _compute(
    fleet: Fleet, script: Script, producer: SoakEngine, prefill: Prefill
) -> Wait:
    """The producer's half: part by part, in steps of its own, until the request has ended."""
    parts, fault, choice = script.parts, script.fault, script.choice
    aborted_at = choice % (len(parts) + 1) if fault is Fault.ABORTED_PREFILL else None
    last, number = len(parts) - 1, 0
    preempted_at = (
        script.asked + 1 + choice % (last - script.asked)
        if fault is Fault.PREEMPTED
        else None
    )
    while number < len(parts) and not producer.is_dead:
        if number == aborted_at:
            producer.give_back(prefill.abort())
            return
        count = -(-(prefill.done + parts[number]) // producer.block_tokens) - len(
            prefill.blocks
        )
        if number == preempted_at or (prefill.blocks and count > len(producer.free)):
            producer.give_away(prefill.preempt())
            preempted_at, number = None, 0
        elif count > len(producer.free):
            yield
            continue
        else:
            if number == script.asked < last and prefill.params is None:
                prefill.offer()
            prefill.compute(parts[number], producer.take(count))
            if prefill.is_held:
                producer.leased[prefill.request_id] = prefill.blocks
            number += 1
        for _ in range(1 + choice // 5 % 3):
            yield
        while prefill.computed < prefill.done and not producer.is_dead:
            yield  # it stands still
    if producer.is_dead:
        return
    if not prefill.is_held:  # its consumer has released it while it was computed
        producer.give_back(prefill.blocks)
    end = prefill.abort if number == aborted_at else prefill.end
    end()


def _beside(making: Wait, loading: Life) -> Life:
    """The load while the prompt is computed. Returns what became of the load when both are over."""
    outcome = None
    while outcome is None:
        next(making, None)
        try:
            next(loading)
        except StopIteration as over:
            outcome = over.value
        else:
            yield
    yield from making
    return str(outcome)


def _load(
    fleet: Fleet,
    script: Script,
    producer: SoakEngine,
    index: int,
    params: RemotePrefill,
    name: str,
) -> Life:
    """The consumer's half. Returns `loaded` only if every byte was right."""
    tokens, fault, counts = script.tokens, script.fault, fleet.counts
    while True:
        consumer = fleet.consumers[index]
        count = -(-tokens // consumer.block_tokens)
        if len(consumer.free) >= count:
            break
        yield
    blocks = consumer.take(count)
    hits = min(script.hit_blocks, (tokens - 1) // consumer.block_tokens)
    first = hits * consumer.block_tokens
    if hits:
        consumer.write(blocks[:hits], first, script.seed)
    declined = consumer.loads.offer(name, params, tokens, 0.0)
    if declined is not None or fault is Fault.ABORTED_OFFER:
        if declined is None:
            consumer.loads.finished(name)
        consumer.give_back(blocks)
        return "aborted" if declined is None else f"computed here: {declined}"
    _arm(fleet, script, producer, consumer)
    consumer.loads.allocated(
        name, consumer.loads.matched_tokens(name, first), (blocks,)
    )
    steps_left = 3 * (len(script.parts) - 1 - script.asked)
    struck_at = 1 + script.choice // 11 % (
        steps_left + (1 if fault is Fault.REVOKED else 3)
    )
    turns, aborted, start_s = 0, False, time.monotonic()
    while not consumer.has_ended(name):
        yield
        turns += 1
        if consumer.is_dead:
            counts.loads[DEAD_CONSUMER] += 1
            return DEAD_CONSUMER
        if turns == struck_at:
            aborted = _strike(fleet, script, producer, consumer, params, name)
        if time.monotonic() > start_s + STUCK_S:
            counts.violations["a load is never reported"] += 1
            counts.loads["stuck"] += 1
            return "stuck"
    if consumer.is_dead:  # its memory may be in use for other purposes
        counts.loads[DEAD_CONSUMER] += 1
        return DEAD_CONSUMER
    reason = consumer.take_outcome(name)
    outcome = "loaded" if reason is None else f"failed: {reason.value}"
    counts.loads[outcome] += 1
    if reason is None:
        wrong = consumer.wrong_bytes(blocks, tokens, script.seed)
        counts.checked_bytes += tokens * fleet.token_bytes
        if wrong:
            counts.violations[
                f"a load with wrong bytes was reported good ({fault})"
            ] += 1
            outcome = f"WRONG: {wrong} bytes"
    while name in consumer.seen.alive and not _has_died(consumer):
        if time.monotonic() > start_s + STUCK_S:
            counts.violations["blocks stay in quarantine"] += 1
            return "stuck"
        yield
    if _has_died(consumer):
        return DEAD_CONSUMER
    if not aborted:
        consumer.loads.finished(name)
    consumer.give_back(blocks)
    return f"aborted while loading, {outcome}" if aborted else outcome


def _has_died(engine: SoakEngine) -> bool:
    """Since it was last asked for."""
    return engine.is_dead


def _until_free(fleet: Fleet, producer: SoakEngine, name: str) -> Wait:
    end_s = time.monotonic() + FREE_WITHIN_S
    while name in producer.leased and not producer.is_dead:
        if time.monotonic() > end_s:
            fleet.counts.violations[
                "blocks of a producer are not free within their lease"
            ] += 1
            return
        yield


def _on_the_way(fleet: Fleet, script: Script, params: RemotePrefill) -> RemotePrefill:
    """The params as the consumer gets them: JSON, changed by some faults."""
    fields = params.to_json()
    if script.fault is Fault.TAMPERED:
        ours, ids = fields["kvferry"], fields["remote_block_ids"]
        change = script.choice % 5
        if change == 0:
            if ids[0]:
                ids[0][script.choice % len(ids[0])] ^= 1
            else:
                ours["stream_row"] ^= 1
        elif change == 1:
            fields["remote_num_tokens"] += 1
        elif change == 2:
            ours["lease_slot"] = (ours["lease_slot"] + 1) % 64
        elif change == 3:
            ours["lease_epoch"] = ours["lease_epoch"][::-1].replace("0", "7") + ""
        else:
            ours["mac"] = ours["mac"][1:] + ours["mac"][0]
    elif script.fault is Fault.MIXED:
        other = fleet.last_params
        if (
            other is None
            or other.remote_block_ids == params.remote_block_ids
            or other.kvferry.boot == params.kvferry.boot
        ):
            fields["kvferry"]["mac"] = "0" * 64
        elif script.choice % 2:
            fields["remote_block_ids"] = [
                list(group) for group in other.remote_block_ids
            ]
        else:
            fields["kvferry"] = other.to_json()["kvferry"]
    read = read_params(fields)
    if not isinstance(read, RemotePrefill):
        raise TypeError(f"params of a prefill were read as {type(read).__name__}")
    return read


def _some_fabric(engine: SoakEngine, script: Script) -> SoakFabric:
    return engine.soak_fabrics[script.choice // 7 % len(engine.workers)]


def _arm(
    fleet: Fleet, script: Script, producer: SoakEngine, consumer: SoakEngine
) -> None:
    """Prepare the fault before the load is ordered."""
    fault, fabric, now_s = (
        script.fault,
        _some_fabric(consumer, script),
        time.monotonic(),
    )
    at_once = (0.0, 0.5, 1.0)[script.choice % 3]
    if fault in _HELD_UP_S:
        length_s, taken = _HELD_UP_S[fault], fault in (Fault.REVOKED, Fault.PREEMPTED)
        hold = Hold(lambda: time.monotonic() > now_s + length_s, at_once)
        for victim in consumer.soak_fabrics if taken else [fabric]:
            # Other loads are about to read as well.
            victim.holds.extend([hold] * (_TAKEN_READS if taken else 1))
    elif fault in (Fault.LOST_DONE, Fault.DOUBLED_DONE, Fault.FORGED_DONE):
        kind = {
            Fault.LOST_DONE: "lost",
            Fault.DOUBLED_DONE: "doubled",
            Fault.FORGED_DONE: "forged",
        }[fault]
        fabric.done_faults.append(kind)
    elif fault is Fault.RAISES:
        victim = fabric if script.choice % 4 else _some_fabric(producer, script)
        victim.fail(
            METHODS[script.choice % len(METHODS)],
            ERRORS[script.choice // 3 % len(ERRORS)],
        )
    elif fault is Fault.PEER_LOST:
        fabric.lose_peer()
    elif fault is Fault.LOST_RENEWALS:
        fleet.deafen(producer, now_s + 1.2 * LEASE_S)


def _strike(
    fleet: Fleet,
    script: Script,
    producer: SoakEngine,
    consumer: SoakEngine,
    params: RemotePrefill,
    name: str,
) -> bool:
    """Apply the fault some turns after the load was ordered. Return whether the request is aborted."""
    fault = script.fault
    if fault is Fault.ABORTED_LOAD:
        consumer.loads.finished(name)
        return True
    if fault is Fault.REVOKED and not producer.is_dead:
        ticket = params.kvferry
        producer.leases.release(
            LeaseName(slot=ticket.lease_slot, epoch=ticket.lease_epoch), "revoked"
        )
    if fault in (Fault.FROZEN_PRODUCER, Fault.FROZEN_CONSUMER):
        until_s = time.monotonic() + _FROZEN_S[script.choice // 3 % len(_FROZEN_S)]
        fleet.freeze(producer if fault is Fault.FROZEN_PRODUCER else consumer, until_s)
    if fault is Fault.KILLED_PRODUCER:
        fleet.restart_producer(script.producer, script.choice)
    if fault is Fault.KILLED_CONSUMER:
        fleet.restart_consumer(script.consumer)
    return False
