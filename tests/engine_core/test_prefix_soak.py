"""Many engines read prefixes out of the small cache of one that computes for itself and for them, under a random life.

Whatever happens, every answer is right, what was rewritten before it was read is reported as failed, and in the end
every block of all engines is free.

    KVFERRY_ASKERS=16 KVFERRY_PREFIX_PROMPTS=20000 python -m pytest -s tests/engine_core/test_prefix_soak.py

A failure prints the command that runs that life again, by its seed; threads make it similar, not equal.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvferry.scheduler.consumer.pull_estimate import PullEstimate
from kvferry.scheduler.requests import LeaseState, LeaseUse
from tests.engine_core.prefixes import side_of
from tests.harness.core.integrity import check_scheduler_side
from tests.harness.core.node import Node
from tests.harness.core.scheduler import tokens
from tests.harness.core.toy_model import expected_tokens
from tests.waiting import deadline_s

ASKERS = int(os.environ.get("KVFERRY_ASKERS", "3"))
PROMPTS = int(os.environ.get("KVFERRY_PREFIX_PROMPTS", "60"))
"""Prompts that askers answer in one life."""
FAULTS = 0.05
"""Of the turns: a request is aborted, or a cache is reset."""
ATTACKS = 0.1
"""Of the turns in which leases of prefixes are held: they end, and other prompts are computed in their blocks."""
ANSWERER_BLOCKS = 480
ASKER_BLOCKS = 130
FAMILIES = 8
_AT_ONCE = 4
_LONGEST_S = 60.0

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _is_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy model computes a prompt sooner than an answer comes: requests wait as a large model's do."""
    monkeypatch.setattr(PullEstimate, "wait_s", lambda *_: 30.0)


class PrefixLife:
    """One random life of an answerer and its askers.

    Attributes:
        num_asked: prompts of askers so far.
        num_attacked: leases of prefixes that were ended and whose blocks were computed anew.
    """

    def __init__(self, seed: int, stack: ExitStack) -> None:
        self.random = random.Random(seed)
        self.num_asked = 0
        self.num_attacked = 0
        both = {"max_tokens": 2048, "max_step_tokens": 512}
        self.answerer = self._add(stack, num_blocks=ANSWERER_BLOCKS, **both)
        asks = {"allowed_hosts": ["127.0.0.1"], "prefix_pull_min_tokens": 1}
        self.askers = [
            self._add(stack, num_blocks=ASKER_BLOCKS, extra=asks, **both)
            for _ in range(ASKERS)
        ]
        self._prompts: dict[tuple[Node, str], tuple[list[int], int]] = {}
        self._num_requests = 0
        self._source = {
            "remote_kv_source": {
                "kv_request_id": "any",
                "remote_host": "127.0.0.1",
                "remote_port": self.answerer.port,
            }
        }

    @staticmethod
    def _add(stack: ExitStack, **config: Any) -> Node:
        node = Node("kv_both", **config)
        stack.callback(node.close)
        return node

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.answerer, *self.askers)

    def turn(self) -> None:
        """Requests, now and then a fault, and a step of every engine that has one to take."""
        self._compute()
        for asker in self.random.sample(self.askers, min(2, len(self.askers))):
            self._ask(asker)
        if self.random.random() < FAULTS:
            self.random.choice((self._abort, self._reset))()
        self._attack()
        for node in self.nodes:
            node.go_on()
        self._check_answers()

    def end(self) -> None:
        """Let everything end: requests, loads, leases."""
        self._until(lambda: not self._prompts)
        self._until(lambda: all(node.engine.is_whole for node in self.nodes))
        for node in self.nodes:
            side = side_of(node)
            check_scheduler_side(side)
            assert (len(side.leases), len(side.loads)) == (0, 0)

    def counts(self) -> Counter[str]:
        """Of all askers together."""
        found = Counter[str]()
        for name in ("prefix_queries", "prefix_loads", "failed_loads"):
            found[name] = sum(asker.engine.counted(name) for asker in self.askers)
        return found

    def _prompt(self) -> list[int]:
        """It begins as all of its family, and goes on by itself."""
        family = self.random.randrange(FAMILIES)
        beginning = tokens(256 * (1 + family % 3), seed=family)
        end = tokens(self.random.randrange(1, 40), seed=1000 + self._num_requests)
        return [*beginning, *end]

    def _compute(self) -> None:
        """The answerer has work of its own, more than its cache has room for."""
        if len(self.answerer.engine.scheduler.requests) < _AT_ONCE:
            self._request(self.answerer, None, self.random.randrange(1, 12))

    def _ask(self, asker: Node) -> None:
        if len(asker.engine.scheduler.requests) < _AT_ONCE:
            self._request(asker, self._source, self.random.randrange(1, 4))
            self.num_asked += 1

    def _request(self, node: Node, params: Any, count: int) -> None:
        name = str(self._num_requests)
        prompt = self._prompt()
        self._num_requests += 1
        self._prompts[node, name] = (prompt, count)
        node.engine.add(name, prompt, params, max_tokens=count)

    def _attack(self) -> None:
        """End leases that may be read at this moment; their blocks are the first that other prompts get."""
        leases = side_of(self.answerer).leases
        held = [
            lease
            for lease in leases.leases(LeaseState.HELD)
            if lease.use is LeaseUse.PREFIX
        ]
        if not held or self.random.random() >= ATTACKS:
            return
        for lease in held:
            leases.end(lease, "evicted")
        self.num_attacked += len(held)
        self.answerer.engine.scheduler.reset_prefix_cache()

    def _abort(self) -> None:
        if self._prompts:
            node, name = self.random.choice(list(self._prompts))
            del self._prompts[node, name]
            node.engine.abort(name)

    def _reset(self) -> None:
        # Not an asker's requests that run: vLLM resets what nobody uses.
        self.random.choice(self.nodes).engine.scheduler.reset_prefix_cache()

    def _check_answers(self) -> None:
        for (node, name), (prompt, count) in list(self._prompts.items()):
            answer = node.engine.answers[name]
            if answer.finish_reason is None:
                continue
            expected = expected_tokens(prompt, count, node.window)
            assert (answer.tokens, answer.finish_reason) == (expected, "length"), name
            del self._prompts[node, name]

    def _until(self, over: Any) -> None:
        end_s = deadline_s(_LONGEST_S)
        while not over():
            assert time.monotonic() < end_s, {
                name: node.engine.status(name)
                for node in self.nodes
                for name in node.engine.scheduler.requests
            }
            for node in self.nodes:
                if not node.go_on():
                    node.step()
            self._check_answers()


@pytest.fixture
def life(run_seed: int) -> Iterator[PrefixLife]:
    with ExitStack() as stack:
        yield PrefixLife(run_seed, stack)


def test_prefixes_out_of_a_busy_cache_are_right_or_reported(life: PrefixLife) -> None:
    while life.num_asked < PROMPTS or not life.counts()["prefix_loads"]:
        life.turn()
    life.end()
    print(dict(life.counts()), "attacked:", life.num_attacked)
