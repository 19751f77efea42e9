"""Two engines under a random life: short leases, small caches, aborts, replays, siblings, preemptions. Whatever
happens, every answer is right, and in the end every block of both is free.

A failure prints the command that runs that life again, by its seed; threads make it similar, not equal.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.harness.core.integrity import check_scheduler_side
from tests.harness.core.node import Node
from tests.harness.core.runners import SecondRunner
from tests.harness.core.scheduler import tokens
from tests.harness.core.toy_model import expected_tokens

pytestmark = pytest.mark.slow

LIVES: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlapping steps": {"overlap": True, "runner": SecondRunner},
    "two ranks": {"tp": 2},
    "two stages": {"pp": 2},
    "both roles": {"role": "kv_both", "overlap": True},
    "sliding window": {"window": 48},
    "turns": {"role": "kv_both", "overlap": True, "turns": True},
    "turns with a window": {"role": "kv_both", "window": 48, "turns": True},
}
_SECONDS = float(os.environ.get("KVFERRY_SOAK_S", "1.5"))
_LONGEST_S = _SECONDS + 20.0
"""For machines with other things to do."""


class Life:
    """One random life of two engines."""

    def __init__(self, seed: int, **config: Any) -> None:
        self.random = random.Random(seed)
        role, self.turns = config.pop("role", None), config.pop("turns", False)
        both: dict[str, Any] = {}
        if self.turns:
            both = {
                "bidirectional_kv_xfer": True,
                "kv_recompute_threshold": 20,
                "decoder_kv_blocks_ttl": 0.8,
            }
        short = {"kv_lease_duration": 0.15, **both}
        self.producer = Node(
            role or "kv_producer", num_blocks=60, extra=short, **config
        )
        self.consumer = Node(role or "kv_consumer", num_blocks=40, extra=both, **config)
        self.prompts: dict[str, tuple[list[int], int]] = {}
        self.offers: list[tuple[list[int], dict[str, Any]]] = []
        self.answered: list[tuple[list[int], dict[str, Any]]] = []
        self.wanted: set[str] = set()
        self.aborted: set[str] = set()

    def turn(self) -> None:
        """Carry out a random event, and let the engines step at random."""
        what = self.random.choices(
            (self.prefill, self.decode, self.decode_plain, self.abort, self.rest),
            (4, 6, 1, 2, 1),
            k=1,
        )
        what[0]()
        for node in (self.producer, self.consumer):
            for _ in range(self.random.randrange(4)):
                node.go_on()  # if it does not rest, with whatever it holds
        self.collect()

    def prefill(self) -> None:
        """Of a new prompt, or of a next turn with an offer that is as good as those of `decode`."""
        if len(self.producer.engine.scheduler.requests) >= 8:
            return
        prompt, params = self.prompt(), {"do_remote_decode": True}
        if self.answered and self.random.random() < 0.7:
            text, params = self.random.choice(self.answered[-3:])
            if self.random.random() < 0.9:
                prompt = [
                    *text,
                    *tokens(
                        self.random.randrange(1, 40), seed=self.random.randrange(99)
                    ),
                ]
        if len(prompt) < 450:
            self.add(self.producer, prompt, params, self.random.choice((1, 1, 1, 5)))

    def decode(self) -> None:
        """With an offer that may be fresh, expired, used, in use, or for another prompt."""
        if self.offers and len(self.consumer.engine.scheduler.requests) < 8:
            prompt, params = self.random.choice(self.offers[-6:])
            if self.random.random() < 0.15:
                prompt = self.prompt()
            if self.random.random() < 0.15:
                prompt = [*prompt, *tokens(20, seed=self.random.randrange(99))]
            for _ in range(self.random.choice((1, 1, 1, 3))):
                self.add(self.consumer, prompt, params, self.random.randrange(1, 30))

    def decode_plain(self) -> None:
        if len(self.consumer.engine.scheduler.requests) < 8:
            self.add(self.consumer, self.prompt(), None, self.random.randrange(1, 60))

    def abort(self) -> None:
        node = self.random.choice((self.producer, self.consumer))
        running = [
            name
            for name in node.engine.scheduler.requests
            if node.engine.answers[name].finish_reason is None
        ]
        if running:
            name = self.random.choice(running)
            self.aborted.add(name)
            node.engine.abort(name)

    def rest(self) -> None:
        time.sleep(self.random.choice((0.001, 0.02, 0.2)))

    def prompt(self) -> list[int]:
        """A prompt out of a few, so that local caches hit."""
        return tokens(
            self.random.choice((1, 16, 17, 40, 64, 130, 270)),
            seed=self.random.randrange(6),
        )

    def add(self, node: Node, prompt: list[int], params: Any, max_tokens: int) -> None:
        name = f"{len(self.prompts)}"
        self.prompts[name] = (prompt, max_tokens)
        self.wanted.add(name)
        node.engine.add(name, prompt, params, max_tokens=max_tokens)

    def collect(self) -> None:
        """Check every new answer, and keep the offered params."""
        for node in (self.producer, self.consumer):
            for name, answer in node.engine.answers.items():
                if name not in self.wanted or answer.finish_reason is None:
                    continue
                prompt, max_tokens = self.prompts[name]
                assert (answer.tokens, answer.finish_reason) == (
                    expected_tokens(prompt, max_tokens, node.window),
                    "length",
                ), name
                self.wanted.discard(name)
                if answer.params is not None:
                    offers = (
                        self.answered
                        if answer.params["do_remote_decode"]
                        else self.offers
                    )
                    offers.append(([*prompt, *answer.tokens[:-1]], answer.params))

    def has_loaded(self) -> bool:
        """Whether there was a handover, and one of a turn if turns are on."""
        turns = self.producer.engine.counted("turn_loads") > 0
        return self.consumer.engine.counted("loads") > 0 and (turns or not self.turns)

    def end(self) -> None:
        """Let everything end: requests, loads, leases."""
        self.wanted -= self.aborted
        self.until(lambda node: node.engine.is_idle())
        self.collect()
        assert not self.wanted
        self.until(lambda node: node.engine.is_whole)
        for node in (self.producer, self.consumer):
            side = node.engine.connector.scheduler_side
            check_scheduler_side(side)
            assert (len(side.leases), len(side.loads)) == (0, 0)

    def until(self, over: Callable[[Node], bool]) -> None:
        """Step both engines until it is so of each: one may wait for what the other's next step tells its workers."""
        for node, other in (
            (self.producer, self.consumer),
            (self.consumer, self.producer),
        ):

            def is_over(node: Node = node, other: Node = other) -> bool:
                other.step()
                return over(node)

            node.until(is_over)

    def close(self) -> None:
        self.producer.close()
        self.consumer.close()


@pytest.mark.parametrize("kind", LIVES)
def test_whatever_happens_answers_are_right_and_every_block_comes_back(
    kind: str, run_seed: int
) -> None:
    life = Life(run_seed, **LIVES[kind])
    try:
        start_s = time.monotonic()
        while time.monotonic() < start_s + (
            _SECONDS if life.has_loaded() else _LONGEST_S
        ):
            life.turn()
        life.end()
        print(life.consumer.engine.total_counts())
        assert life.has_loaded()
    finally:
        life.close()
