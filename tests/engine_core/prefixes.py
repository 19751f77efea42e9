"""An engine that others ask for the first tokens of their prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import zmq

from kvferry.protocol.digests import CHUNK_TOKENS, Prompt, digest_chain
from kvferry.protocol.handshake import encode
from kvferry.protocol.params import RemotePrefill, check_params_mac, decode_params
from kvferry.protocol.queries import (
    Answer,
    FindPrefixes,
    PrefixQuery,
    PromptProgress,
    Unsubscribe,
    chain_bytes,
    decode_answers,
)
from tests.harness.core.node import Node, ferry_of
from tests.link.channel import client

CLIENT = "asker"
LONG = {"num_blocks": 400, "max_tokens": 2048, "max_step_tokens": 512}
"""The configuration of an engine with room for prompts of several chunks."""


def side_of(node: Node) -> Any:
    return ferry_of(node.engine.connector).scheduler_side


def query_of(
    prompt: Sequence[int],
    number: int = 1,
    *,
    min_tokens: int = 1,
    make_prompt: Callable[..., Prompt] = Prompt,
) -> PrefixQuery:
    """A query of who has this prompt."""
    whole = len(prompt) // CHUNK_TOKENS * CHUNK_TOKENS
    digests = digest_chain(make_prompt(tokens=list(prompt)), whole)
    return PrefixQuery(number=number, chain=chain_bytes(digests), min_tokens=min_tokens)


class Asker:
    """A connection to the side channel of a node, which steps as long as an answer is waited for."""

    def __init__(self, node: Node, socket: zmq.Socket[bytes]) -> None:
        self._node = node
        self._socket = socket

    def send(self, *queries: PrefixQuery) -> None:
        self._socket.send_multipart(
            [b"", encode(FindPrefixes(client_id=CLIENT, queries=queries))]
        )

    def give_up(self, *numbers: int) -> None:
        self._socket.send_multipart(
            [b"", encode(Unsubscribe(client_id=CLIENT, numbers=numbers))]
        )

    def receive(self) -> Answer:
        """The next answer. The node takes no step meanwhile."""
        assert self._socket.poll(30_000), "no answer"
        (answer,) = decode_answers(self._socket.recv_multipart()[1]).answers
        return answer

    def has_answer(self) -> bool:
        return bool(self._socket.poll(0))

    def ask(self, query: PrefixQuery) -> Answer:
        """The last answer to a query."""
        self.send(query)
        answer = self.receive()
        if answer.progress is PromptProgress.QUEUED:
            self._node.until(self.has_answer)
            answer = self.receive()
        return answer

    def ticket(self, query: PrefixQuery) -> RemotePrefill:
        """The params by which the prefix can be read."""
        answer = self.ask(query)
        assert answer.progress is PromptProgress.TICKET, answer
        return params_of(self._node, answer)


def params_of(node: Node, answer: Answer) -> RemotePrefill:
    params = decode_params(answer.params)
    check_params_mac(params, side_of(node).channel.local.memory.mac_key)
    return params


@contextmanager
def asking(node: Node) -> Iterator[Asker]:
    """A client of a node."""
    with client(node.port) as socket:
        yield Asker(node, socket)


def compute(
    node: Node, name: str, prompt: Sequence[int], count: int = 1, **request: Any
) -> list[int]:
    """A request of the node's own, without params. Returns its tokens."""
    node.engine.add(name, prompt, max_tokens=count, **request)
    return node.answer(name).tokens
