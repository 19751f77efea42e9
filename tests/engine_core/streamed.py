"""A producer with a prompt that a consumer has asked for, in the middle of it."""

from __future__ import annotations

from typing import Any

from kvferry.protocol.digests import Prompt, digest_chain
from kvferry.protocol.handshake import encode
from kvferry.protocol.params import (
    RemotePrefill,
    check_params_mac,
    decode_params,
    request_key,
)
from kvferry.protocol.queries import (
    Answer,
    PromptProgress,
    PromptQuery,
    Subscribe,
    decode_answers,
)
from kvferry.scheduler.requests import ProducerLease
from tests.harness.core.integrity import check_scheduler_side
from tests.harness.core.node import Node, ferry_of
from tests.harness.core.scheduler import Scheduled, tokens
from tests.link.channel import client

PROMPT = tokens(200, seed=3)
REMOTE_DECODE = {"do_remote_decode": True}


def ask(
    node: Node,
    name: str,
    prompt: list[int] = PROMPT,
    *,
    number: int = 1,
    streams: bool = True,
) -> Answer:
    """The listener's answer to a consumer."""
    digest = digest_chain(Prompt(tokens=prompt))[-1]
    spans = (
        ferry_of(node.engine.connector).scheduler_side.channel.local.block_spans
        if streams
        else ()
    )
    query = PromptQuery(
        number=number,
        key=request_key(name),
        num_tokens=len(prompt),
        digest=digest,
        spans=spans,
    )
    return answer_to(node, query)


def answer_to(node: Node, query: PromptQuery) -> Answer:
    """The listener's answer to a consumer with other blocks."""
    with client(
        ferry_of(node.engine.connector).scheduler_side.channel.local.port
    ) as sock:
        sock.send_multipart(
            [b"", encode(Subscribe(client_id="consumer", queries=(query,)))]
        )
        return decode_answers(sock.recv_multipart()[1]).answers[0]


def asked_for(make: Any, **config: Any) -> Node:
    """A producer whose first step has computed a part of the prompt, and that is asked for it then."""
    producer: Node = make("kv_producer", **{"max_step_tokens": 64, **config})
    producer.engine.add("p", PROMPT, REMOTE_DECODE, max_tokens=1)
    first = producer.step()
    assert not first.orders.progress
    assert ask(producer, "p").progress is PromptProgress.QUEUED
    return producer


def ticket(
    node: Node, name: str = "p", prompt: list[int] = PROMPT, number: int = 1
) -> RemotePrefill:
    """The one that the consumer has got, or gets if it repeats its question."""
    answer = ask(node, name, prompt, number=number)
    assert answer.progress is PromptProgress.TICKET
    params = decode_params(answer.params, len(prompt))
    check_params_mac(
        params, node.engine.connector.scheduler_side.channel.local.memory.mac_key
    )
    return params


def lease_of(node: Node, name: str = "p") -> ProducerLease:
    """Its request runs, or has ended."""
    lease: ProducerLease | None = node.engine.connector.scheduler_side.leases.get(name)
    assert lease is not None
    return lease


def published(step: Scheduled) -> list[tuple[int, tuple[int, ...], int]]:
    """Tokens, first block, and number of blocks of every order of a step."""
    return [
        (order.tokens, order.first_blocks, len(order.blocks[0]))
        for order in step.orders.progress
    ]


def free_rows(node: Node) -> int:
    return len(node.engine.connector.scheduler_side.leases.streams.free_rows)


def is_over(node: Node) -> bool:
    """Whether nothing is leaked: no block, no request, no slot, no row."""
    side = node.engine.connector.scheduler_side
    check_scheduler_side(side)
    return node.engine.is_whole and not len(side.leases) and free_rows(node) == 64
