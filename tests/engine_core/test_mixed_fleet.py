"""kvferry beside the stock NixlConnector, as in the middle of a rollout: vLLM's own scheduler side is the other one."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import pytest
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG

from tests.harness.core.scheduler import tokens
from tests.harness.core.toy_model import expected_tokens
from tests.promises import promise

PROMPT = tokens(40)


@pytest.fixture
def stock(make_engine: Any) -> Any:
    return functools.partial(make_engine, connector="NixlConnector", module=None)


@promise(8)
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_what_a_stock_producer_offers_is_computed_here_whatever_the_policy(
    stock: Any, make: Any, policy: str
) -> None:
    producer, consumer = stock("kv_producer"), make("kv_consumer", policy=policy)
    producer.add("p", PROMPT, {"do_remote_decode": True}, max_tokens=1)
    params = producer.run()["p"].params
    consumer.engine.add("d", PROMPT, params, max_tokens=5)
    answer = consumer.answer("d")
    assert (answer.tokens, answer.finish_reason) == (
        expected_tokens(PROMPT, 5),
        "length",
    )
    assert consumer.engine.counted("local_recomputes", "foreign_params") == 1
    assert consumer.engine.counted("loads") == 0
    assert consumer.engine.is_whole
    assert not producer.is_whole, (
        "a stock producer gets no notification: it holds the blocks until its own lease ends"
    )


@pytest.mark.parametrize(
    ("policy", "reason"), [("recompute", "length"), ("fail", "error")]
)
def test_a_stock_consumer_waits_for_our_blocks_and_goes_by_its_policy(
    stock: Any, make: Any, policy: str, reason: str
) -> None:
    producer, consumer = (
        make("kv_producer", extra={"kv_lease_duration": 0.2}),
        stock("kv_consumer", policy=policy),
    )
    consumer.add("d", PROMPT, producer.prefill("p", PROMPT))
    assert set(consumer.step().metadata.reqs_to_recv) == {"d"}
    consumer.step(failed={"d"})  # what its worker reports when the handshake fails
    assert consumer.run()["d"].finish_reason == reason
    assert consumer.is_whole
    producer.until(lambda: producer.engine.is_whole)
    assert producer.engine.counted("leases_released", "expired") == 1


def test_the_handshake_of_a_stock_consumer_is_refused_at_once_without_harm(
    make: Any,
) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer")
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 5000)  # the stock consumer's own timeout
        socket.connect(f"tcp://127.0.0.1:{producer.port}")
        socket.send(msgspec.msgpack.encode((GET_META_MSG, 0, 0)))
        answer = socket.recv_multipart()
    assert len(answer) == 1, (
        "a stock producer answers in two frames: its consumer knows at once that this is none"
    )
    consumer.decode("d", PROMPT, producer.prefill("p", PROMPT))
    producer.until(lambda: producer.engine.is_whole)
    assert producer.engine.counted("bad_frames") == 1
