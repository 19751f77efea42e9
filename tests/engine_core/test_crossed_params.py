"""A router sends one producer's params with another producer's prompt: the digests show it.

Params of another prompt are not given back, since the prompt that they belong to may have come in the same batch: such
a lease runs out by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.core.node import Node
from tests.harness.core.scheduler import tokens
from tests.harness.core.toy_model import expected_tokens
from tests.promises import promise

COMMON = tokens(256, seed=1)
"""One whole digest."""
PROMPTS = {
    "nothing in common": (tokens(40, seed=2), tokens(40, seed=3)),
    "one is the beginning of the other": (COMMON, [*COMMON, *tokens(40, seed=3)]),
    "the same beginning": (
        [*COMMON, *tokens(40, seed=2)],
        [*COMMON, *tokens(40, seed=3)],
    ),
    "equal but for the last token": (
        [*tokens(40, seed=2), 5],
        [*tokens(40, seed=2), 6],
    ),
}
COUNT = 4
LEASE_S = 2


@pytest.fixture(scope="module")
def producers() -> Iterator[tuple[Node, Node]]:
    extra = {"kv_lease_duration": LEASE_S}
    nodes = (
        Node("kv_producer", num_blocks=128, extra=extra),
        Node("kv_producer", num_blocks=128, extra=extra),
    )
    yield nodes
    for node in nodes:
        node.close()


@pytest.fixture(scope="module")
def consumer() -> Iterator[Node]:
    node = Node("kv_consumer", policy="recompute", num_blocks=128)
    yield node
    node.close()


def both_whole(producers: tuple[Node, Node], consumer: Node) -> None:
    """Every block of all three is free again, at the latest when the leases have run out (a node waits for 20 s)."""
    for node in (consumer, *producers):
        node.until(lambda: node.engine.is_whole)  # noqa: B023 - used at once


@promise(1, 3)
@pytest.mark.parametrize("kind", PROMPTS)
def test_params_of_two_producers_that_are_crossed_give_right_answers_and_cost_at_most_a_lease(
    producers: tuple[Node, Node], consumer: Node, kind: str
) -> None:
    consumer.engine.scheduler.reset_prefix_cache()
    prompts = PROMPTS[kind]
    params = [
        node.prefill(f"{kind}/{i}", prompt)
        for i, (node, prompt) in enumerate(zip(producers, prompts, strict=True))
    ]
    names = [f"{kind}/crossed/{i}" for i in range(2)]
    for name, prompt, crossed in zip(names, prompts, reversed(params), strict=True):
        consumer.engine.add(name, prompt, crossed, max_tokens=COUNT)
    for name, prompt in zip(names, prompts, strict=True):
        assert consumer.answer(name).tokens == expected_tokens(prompt, COUNT)
    both_whole(producers, consumer)
    for i, prompt in enumerate(prompts):  # no block was poisoned
        consumer.engine.add(f"{kind}/plain/{i}", prompt, max_tokens=COUNT)
        assert consumer.answer(f"{kind}/plain/{i}").tokens == expected_tokens(
            prompt, COUNT
        )
