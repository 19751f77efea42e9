"""Sliding windows between engines whose blocks differ: the loaded blocks, and those that the prefix cache keeps."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.core import configs, node
from tests.harness.core import scheduler as driver
from tests.harness.core.node import Node
from tests.harness.core.scheduler import tokens

WINDOW = 48
LENGTHS = (47, 63, 64, 70, 95, 100, 128)
SHARED = (32, 64, 96)


@pytest.mark.parametrize(("theirs", "ours", "loaded"), [(16, 32, 1), (32, 16, 5), (16, 16, 5)])
def test_neither_the_prompt_nor_another_that_begins_alike_is_answered_from_what_was_given_back(
    make: Any, theirs: int, ours: int, loaded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_blocks_of(block_tokens: int, role: str) -> Node:
        with monkeypatch.context() as changed:
            for module in (configs, driver, node):
                changed.setattr(module, "BLOCK_TOKENS", block_tokens)
            made: Node = make(role, window=WINDOW, num_blocks=80)
            return made

    producer, consumer = with_blocks_of(theirs, "kv_producer"), with_blocks_of(ours, "kv_consumer")
    for length in LENGTHS:
        prompt = tokens(length, seed=length)
        prompts = {f"d{length}": prompt}
        prompts |= {f"b{length}-{n}": [*prompt[:n], *tokens(20, seed=n + 7)] for n in SHARED if n <= length}
        params = producer.prefill(f"p{length}", prompt)
        for name, asked in prompts.items():
            consumer.decode(name, asked, params if asked is prompt else None)
        producer.until(lambda: producer.engine.is_whole)
    assert consumer.engine.counted("loads") == loaded
    assert consumer.engine.counted("local_recomputes", "window_edge") == len(LENGTHS) - loaded
    # What was not wanted was given back at once, not after its lease.
    assert producer.engine.counted("leases_released", "release") == len(LENGTHS) - loaded
