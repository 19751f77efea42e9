"""A producer's answer to the handshake comes late, damaged, in parts, or describes another engine.

A proxy answers handshakes in the producer's place and forwards everything else, so that the lease is released.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from kvferry.protocol.handshake import CHANNEL_VERSION, EngineDescription, Refused, encode
from tests.faults.checks import check_survivor, transfer, until_idle, until_over, warmed_up
from tests.faults.impostors import zmq_impostor
from tests.harness.cache_engine import HOST, free_port
from tests.harness.handshake import fetch_description
from tests.harness.process import SLACK_S, Fleet

HANDSHAKE_S = 3.0
Tamper = Callable[[EngineDescription], list[bytes]]


def with_fields(**fields: object) -> Tamper:
    return lambda description: [encode(msgspec.structs.replace(description, **fields))]


def cut(share: float) -> Tamper:
    def tamper(description: EngineDescription) -> list[bytes]:
        frame = encode(description)
        return [frame[: int(len(frame) * share)]]

    return tamper


def late(by_s: float) -> Tamper:
    def tamper(description: EngineDescription) -> list[bytes]:
        time.sleep(by_s)
        return [encode(description)]

    return tamper


def without_metadata(description: EngineDescription) -> list[bytes]:
    workers = [msgspec.structs.replace(one, agent_metadata=b"absent") for one in description.workers]
    return [encode(msgspec.structs.replace(description, workers=tuple(workers)))]


TAMPERED: dict[str, tuple[Tamper, str | None]] = {
    "in time, not soon": (late(HANDSHAKE_S / 3), None),
    "too late": (late(HANDSHAKE_S * 1.5), "handshake"),
    "in two frames": (lambda description: [encode(description), b""], "handshake"),
    "split over two frames": (lambda d: [encode(d)[:100], encode(d)[100:]], "handshake"),
    "half of it": (cut(0.5), "refused"),
    "all but the end": (cut(0.99), "refused"),
    "garbage": (lambda _: [b"\xc1" * 64], "refused"),
    "twice in one frame": (lambda description: [encode(description) * 2], "refused"),
    "of tomorrow's version": (with_fields(version=CHANNEL_VERSION + 1), "refused"),
    "another engine": (with_fields(engine_id="another"), "refused"),
    "another boot": (with_fields(boot="0" * 32), "refused"),
    "a refusal": (lambda _: [encode(Refused(field="engine", value="starting", expected="ready"))], "refused"),
    "metadata of no agent": (without_metadata, "handshake"),
    "another key": (with_fields(mac_key=bytes(32)), "mac"),
}


def test_a_bad_answer_fails_the_load_in_time_and_costs_nothing(fleet: Fleet) -> None:
    producer, consumer = fleet.pair(handshake_timeout_s=HANDSHAKE_S)
    before = warmed_up(producer, consumer)
    description = fetch_description(HOST, producer.port, "P", "test", SLACK_S)
    for name, (tamper, expected) in TAMPERED.items():
        port = free_port()
        params = producer.prefill(13, 5, remote_port=port)
        with zmq_impostor(port, lambda: tamper(description), forward_to=producer.port):  # noqa: B023 - used at once
            began_s = time.monotonic()
            reason = until_over(consumer, consumer.load(params, 5), HANDSHAKE_S + SLACK_S)
            assert reason == expected, name
            assert time.monotonic() - began_s < HANDSHAKE_S + SLACK_S, name
            until_idle(producer, SLACK_S)  # the lease was given back, or the load was good
        transfer(producer, consumer)
    check_survivor(consumer, before)
