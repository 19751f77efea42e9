"""A router that carries the params of one turn's answer to the next turn's prefill, over two whole engines."""

from __future__ import annotations

import json
from typing import Any

from tests.harness.core.node import Node
from tests.harness.core.scheduler import tokens
from tests.harness.core.toy_model import expected_tokens

TURNS = {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 1}
FIRST = tokens(100)
MORE = tokens(50, seed=5)
COUNT = 40
"""Tokens of an answer."""


class Conversation:
    """A client and its router: every turn is prefilled on one engine and decoded on the other."""

    def __init__(self, prefiller: Node, decoder: Node) -> None:
        self.prefiller, self.decoder = prefiller, decoder
        self.text: list[int] = []
        self.offer: dict[str, Any] | None = None
        self.turns = 0

    def say(self, more: list[int], count: int = COUNT) -> None:
        """One turn; every token of the answer is checked."""
        self.text = [*self.text, *more]
        self.turns += 1
        params = self.prefill(f"p{self.turns}")
        self.decode(f"d{self.turns}", params, count)

    def prefill(self, name: str) -> dict[str, Any]:
        asked = (
            json.loads(json.dumps(self.offer))
            if self.offer
            else {"do_remote_decode": True}
        )
        self.prefiller.engine.add(name, self.text, asked, max_tokens=1)
        params = self.prefiller.answer(name).params
        assert params is not None
        settle(self.prefiller)
        return params

    def decode(self, name: str, params: dict[str, Any], count: int = COUNT) -> None:
        self.decoder.engine.add(
            name, self.text, json.loads(json.dumps(params)), max_tokens=count
        )
        answer = self.decoder.answer(name)
        assert answer.tokens == expected_tokens(self.text, count, self.decoder.window)
        self.text += answer.tokens
        self.offer = answer.params
        settle(self.decoder)


def settle(node: Node) -> None:
    """Step until the workers know the held leases, whatever steps are in flight."""
    for _ in range(3):
        node.step()


def blocks(node: Node, before: float = 0) -> float:
    """Blocks that a node has loaded."""
    return (
        node.engine.counted("planned_bytes")
        / (node.engine.block_bytes * len(node.workers))
        - before
    )
