"""Aborts and preemptions in every state of a remote prompt and a lease: answers are right, every block is freed, no
lease stays, and the integrity of both engines holds after every step."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvferry.scheduler.requests import LeaseState, RemotePromptState
from kvferry.worker.fabric.nixl import NixlFabric
from kvferry.worker.fabric.port import Transfer, TransferState
from tests.harness.core.node import Node, until
from tests.harness.core.scheduler import tokens
from tests.harness.core.toy_model import expected_tokens
from tests.promises import promise

pytestmark = pytest.mark.slow

COUNT = 12
"""Tokens of an answer."""
REMOTE_DECODE = {"do_remote_decode": True}
SEEDS = itertools.count(20)


@dataclass
class OnePrompt:
    """A producer and a consumer, and one prompt that goes from one to the other."""

    producer: Node
    consumer: Node
    hangs: threading.Event
    seed: int = field(default_factory=lambda: next(SEEDS))

    @property
    def prefill(self) -> str:
        return f"p{self.seed}"

    @property
    def decode(self) -> str:
        return f"d{self.seed}"

    @property
    def prompt(self) -> list[int]:
        return tokens(140, seed=self.seed)

    def load_state(self) -> RemotePromptState | None:
        state: RemotePromptState | None = (
            self.consumer.engine.connector.scheduler_side.loads.state(self.decode)
        )
        return state

    def lease_state(self) -> LeaseState | None:
        state: LeaseState | None = (
            self.producer.engine.connector.scheduler_side.leases.state(self.prefill)
        )
        return state

    def step(self) -> None:
        self.producer.step()
        self.consumer.step()

    def until(self, over: Callable[[], bool]) -> None:
        until((self.producer, self.consumer), over)

    def offer(self) -> None:
        params = self.producer.prefill(self.prefill, self.prompt)
        self.consumer.engine.add(self.decode, self.prompt, params, max_tokens=COUNT)

    def is_decoding(self) -> bool:
        return len(self.consumer.engine.answers[self.decode].tokens) > 1

    def check_answer(self, node: Node, name: str, count: int) -> None:
        assert node.engine.answers[name].tokens == expected_tokens(self.prompt, count)

    def end(self) -> None:
        """Check that all is over on both engines, without errors."""
        self.until(
            lambda: self.producer.engine.is_whole and self.consumer.engine.is_whole
        )
        self.step()
        for node in (self.producer, self.consumer):
            side = node.engine.connector.scheduler_side
            assert (len(side.leases), len(side.loads)) == (0, 0)


# How a prompt gets into each state.


def offered(scene: OnePrompt) -> None:
    scene.offer()


def loading(scene: OnePrompt) -> None:
    scene.hangs.set()
    scene.offer()
    scene.consumer.step()


def loaded(scene: OnePrompt) -> None:
    scene.offer()
    scene.until(scene.is_decoding)


def failed(scene: OnePrompt) -> None:
    scene.offer()
    scene.producer.engine.connector.scheduler_side.leases.release_all("reset")
    scene.producer.until(lambda: scene.producer.engine.is_whole)
    scene.until(scene.is_decoding)


def declined(scene: OnePrompt) -> None:
    """The consumer has all of the prompt that the producer offers."""
    longer = [*scene.prompt, *tokens(20, seed=7)]
    scene.consumer.engine.add(f"before-{scene.seed}", longer, max_tokens=1)
    scene.consumer.answer(f"before-{scene.seed}")
    params = scene.producer.prefill(scene.prefill, scene.prompt[:128])
    scene.consumer.engine.add(scene.decode, scene.prompt, params, max_tokens=COUNT)
    scene.until(scene.is_decoding)


def aborted(scene: OnePrompt) -> None:
    loading(scene)
    scene.consumer.engine.abort(scene.decode)


LOADS: dict[RemotePromptState, tuple[Callable[[OnePrompt], None], bool]] = {
    RemotePromptState.OFFERED: (offered, False),
    RemotePromptState.LOADING: (loading, False),
    RemotePromptState.LOADED: (loaded, True),
    RemotePromptState.FAILED: (failed, True),
    RemotePromptState.DECLINED: (declined, True),
    RemotePromptState.ABORTED: (aborted, False),
}
"""How to reach the state, and whether vLLM can preempt the request in it: only a running one."""


def intended(scene: OnePrompt) -> None:
    scene.producer.engine.add(scene.prefill, scene.prompt, REMOTE_DECODE, max_tokens=1)


def computing(scene: OnePrompt) -> None:
    intended(scene)
    scene.producer.step()


def held(scene: OnePrompt) -> None:
    scene.producer.prefill(scene.prefill, scene.prompt)


def ending(scene: OnePrompt) -> None:
    held(scene)
    scene.producer.engine.connector.scheduler_side.leases.release_all("reset")


LEASES: dict[LeaseState, tuple[Callable[[OnePrompt], None], bool]] = {
    LeaseState.INTENDED: (intended, False),
    LeaseState.COMPUTING: (computing, True),
    LeaseState.HELD: (held, False),
    LeaseState.ENDING: (ending, False),
}


@pytest.fixture(
    scope="module",
    params=[{}, {"overlap": True}, {"tp": 2}],
    ids=["plain", "overlapping", "two ranks"],
)
def nodes(request: pytest.FixtureRequest) -> Iterator[tuple[Node, Node]]:
    config: dict[str, Any] = {
        "num_blocks": 60,
        "max_step_tokens": 100,
        "checks_steps": True,
        **request.param,
    }
    producer, consumer = Node("kv_producer", **config), Node("kv_consumer", **config)
    yield producer, consumer
    producer.close()
    consumer.close()


@pytest.fixture
def scene(
    nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> Iterator[OnePrompt]:
    """While `hangs` is set no read ever seems to end."""
    hangs, poll = threading.Event(), NixlFabric.poll

    def poll_late(fabric: NixlFabric, transfer: Transfer) -> TransferState:
        return TransferState.IN_FLIGHT if hangs.is_set() else poll(fabric, transfer)

    monkeypatch.setattr(NixlFabric, "poll", poll_late)
    yield OnePrompt(*nodes, hangs)
    hangs.clear()


@promise(2, 3)
@pytest.mark.parametrize("state", RemotePromptState, ids=lambda state: state.value)
def test_a_remote_prompt_that_is_aborted_leaves_nothing_behind(
    scene: OnePrompt, state: RemotePromptState
) -> None:
    bring, _ = LOADS[state]
    bring(scene)
    assert scene.load_state() is state
    scene.consumer.engine.abort(scene.decode)
    for _ in range(3):
        scene.step()
    scene.hangs.clear()
    scene.end()
    got = scene.consumer.engine.answers[scene.decode].tokens
    assert got == expected_tokens(scene.prompt, COUNT)[: len(got)]
    assert len(got) < COUNT
    again = f"again-{scene.seed}"
    scene.consumer.engine.add(again, scene.prompt, max_tokens=COUNT)
    scene.consumer.answer(again)
    scene.check_answer(scene.consumer, again, COUNT)
    scene.end()


@promise(1)
@pytest.mark.parametrize(
    "state",
    [x for x, (_, runs) in LOADS.items() if runs],
    ids=lambda state: state.value,
)
def test_a_remote_prompt_that_is_preempted_is_answered_right_and_not_loaded_again(
    scene: OnePrompt, state: RemotePromptState
) -> None:
    bring, _ = LOADS[state]
    before = scene.consumer.engine.counted("loads")
    bring(scene)
    assert scene.load_state() is state
    loads = scene.consumer.engine.counted("loads") - before
    scene.consumer.engine.preempt(scene.decode)
    assert scene.load_state() is state
    scene.until(
        lambda: scene.consumer.engine.answers[scene.decode].finish_reason is not None
    )
    scene.check_answer(scene.consumer, scene.decode, COUNT)
    assert scene.consumer.engine.counted("loads") - before == loads
    scene.end()


@pytest.mark.parametrize("state", LEASES, ids=lambda state: state.value)
def test_a_prefill_that_is_aborted_holds_nothing_and_one_that_was_answered_is_still_handed_over(
    scene: OnePrompt, state: LeaseState
) -> None:
    bring, _ = LEASES[state]
    bring(scene)
    assert scene.lease_state() is state
    scene.producer.engine.abort(scene.prefill)
    params = scene.producer.engine.answers[scene.prefill].params
    assert (params is None) == (state in (LeaseState.INTENDED, LeaseState.COMPUTING))
    scene.consumer.engine.add(scene.decode, scene.prompt, params, max_tokens=COUNT)
    scene.until(
        lambda: scene.consumer.engine.answers[scene.decode].finish_reason is not None
    )
    scene.check_answer(scene.consumer, scene.decode, COUNT)
    scene.end()


@promise(1)
def test_a_prefill_that_is_preempted_offers_what_it_computed_anew(
    scene: OnePrompt,
) -> None:
    assert [state for state, (_, runs) in LEASES.items() if runs] == [
        LeaseState.COMPUTING
    ]
    computing(scene)
    assert scene.lease_state() is LeaseState.COMPUTING
    scene.producer.engine.preempt(scene.prefill)
    assert scene.lease_state() is LeaseState.COMPUTING
    before = scene.consumer.engine.counted("loads")
    params = scene.producer.answer(scene.prefill).params
    for _ in range(2):
        scene.producer.step()
    scene.consumer.engine.add(scene.decode, scene.prompt, params, max_tokens=COUNT)
    scene.until(
        lambda: scene.consumer.engine.answers[scene.decode].finish_reason is not None
    )
    scene.check_answer(scene.consumer, scene.decode, COUNT)
    assert scene.consumer.engine.counted("loads") == before + 1
    scene.end()
