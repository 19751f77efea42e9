"""vLLM takes tokens back that a step has computed, since another connector's load within the step has failed: nobody
may have read them. The other connector is a store beside kvferry, under MultiConnector (`tests/harness/core/store.py`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest

from kvferry.connector.scheduler_side.requests import EngineRequests
from kvferry.connector.scheduler_side.taken_back import TakeBacks
from kvferry.connector.vllm.scheduler import EngineBlocks
from kvferry.protocol.params import announced_id
from kvferry.scheduler.requests import LeaseState, RequestTable
from tests.engine_core.believed import Believed, check_believed
from tests.engine_core.streamed import REMOTE_DECODE, ask
from tests.engine_core.test_both_legs import COUNT, check, ids
from tests.harness.core.node import Node, ferry_of, until
from tests.harness.core.scheduler import tokens
from tests.harness.core.store import Shelf, beside_a_store
from tests.promises import promise

PROMPT = tokens(140, seed=3)
STORED = 64
"""Tokens of the prompt that the store has, or says it has."""
POLICIES = pytest.mark.parametrize("policy", ["recompute", "fail"])
OVERLAP = pytest.mark.parametrize(
    "overlap", [False, True], ids=["in turn", "overlapping"]
)
STEPS = pytest.mark.parametrize(
    "max_step_tokens", [64, 256], ids=["in parts", "in one step"]
)


class StoreProducer:
    """A producer with a store whose caches hold rubbish, and what is checked of it after every step.

    Attributes:
        before_answer: called when a step has run, before vLLM has its output.
        seen: all that could be believed then.
    """

    def __init__(self, make: Any, policy: str = "recompute", **config: Any) -> None:
        self.shelf = Shelf()
        self.node: Node = make(
            "kv_producer", **beside_a_store(self.shelf, policy=policy), **config
        )
        self.shelf.serve(self.node)
        self.node.model.poison()
        self.prompts: dict[str, list[int]] = {}
        self.seen: list[Believed] = []
        self.before_answer: Callable[[], None] = lambda: None
        answer = self.node.answer_oldest

        def checked() -> None:
            self.seen += check_believed(self.node, self.prompts)
            self.before_answer()
            answer()

        self.node.answer_oldest = checked

    @property
    def side(self) -> Any:
        return ferry_of(self.node.engine.connector).scheduler_side

    @property
    def params(self) -> dict[str, Any]:
        """What a router sends with the decode leg of a request."""
        local = self.side.channel.local
        return {
            "do_remote_prefill": True,
            "remote_engine_id": announced_id(local.boot, local.engine_id),
            "remote_host": "127.0.0.1",
            "remote_port": self.node.port,
            "remote_request_id": "x",
        }

    def add(
        self,
        name: str,
        prompt: list[int] = PROMPT,
        *,
        stored: int = 0,
        fails: bool = False,
        max_tokens: int = 1,
    ) -> None:
        self.prompts[name] = prompt
        self.shelf.tokens[name] = stored
        if fails:
            self.shelf.broken.add(name)
        self.node.engine.add(name, prompt, REMOTE_DECODE, max_tokens=max_tokens)

    def states(self) -> dict[str, LeaseState | None]:
        return {name: self.side.leases.state(name) for name in self.prompts}

    def is_over(self) -> bool:
        return bool(self.node.engine.is_whole)


def is_answered(node: Node, name: str) -> bool:
    return node.engine.answers[name].finish_reason is not None


@promise(1)
@POLICIES
@OVERLAP
@STEPS
def test_a_decoder_that_reads_at_once_never_gets_what_a_failed_load_left(
    make: Any,
    policy: str,
    overlap: bool,
    max_step_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A lease that has ended before its ticket was used is waited for so long.
    monkeypatch.setattr("kvferry.connector.scheduler_side.tickets.OPENS_WITHIN_S", 1.0)
    scene = StoreProducer(
        make, policy, overlap=overlap, max_step_tokens=max_step_tokens
    )
    consumer: Node = make("kv_consumer")
    prefill, decode = ids("x")
    consumer.engine.add(decode, PROMPT, scene.params, max_tokens=COUNT)
    scene.add(prefill, stored=STORED, fails=True)
    queries = consumer.engine.connector.scheduler_side.queries.queries
    until((consumer,), lambda: queries.snapshot().known)

    def read_at_once() -> None:
        if (
            any(one.is_ready for one in scene.seen)
            and consumer.engine.answers[decode].finish_reason is None
        ):
            until((consumer,), lambda: consumer.engine.counted("peer_loads") == 1)

    scene.before_answer = read_at_once
    until(
        (scene.node, consumer),
        lambda: consumer.engine.answers[decode].finish_reason is not None,
    )
    assert scene.shelf.loads == [prefill]
    check(consumer, decode)
    until((scene.node, consumer), lambda: scene.is_over() and consumer.engine.is_whole)


@OVERLAP
@STEPS
def test_what_the_store_has_loaded_is_handed_over(
    make: Any, overlap: bool, max_step_tokens: int
) -> None:
    scene = StoreProducer(make, overlap=overlap, max_step_tokens=max_step_tokens)
    consumer: Node = make("kv_consumer")
    for name in ("x", "y"):
        prefill, decode = f"cmpl-{name}-0-0123abcd", f"cmpl-{name}-0-89efcdab"
        prompt = tokens(140, seed=ord(name))
        params = {**scene.params, "remote_request_id": name}
        consumer.engine.add(decode, prompt, params, max_tokens=COUNT)
        scene.add(prefill, prompt, stored=STORED)
        until((scene.node, consumer), partial(is_answered, consumer, decode))
        check(consumer, decode, prompt)
    assert len(scene.shelf.loads) == 2
    assert (
        consumer.engine.counted("peer_loads"),
        consumer.engine.counted("local_recomputes"),
    ) == (
        2,
        0,
    )
    assert any(one.is_ready for one in scene.seen)
    until((scene.node, consumer), lambda: scene.is_over() and consumer.engine.is_whole)


@pytest.mark.parametrize("fails", [False, True], ids=["loaded", "failed"])
@OVERLAP
def test_so_it_is_in_sequence(make: Any, overlap: bool, fails: bool) -> None:
    scene = StoreProducer(make, overlap=overlap, max_step_tokens=256)
    consumer: Node = make("kv_consumer")
    scene.add("p", stored=STORED, fails=fails)
    params = scene.node.answer("p").params
    assert params is not None or (
        overlap and fails
    )  # vLLM lets the answer of an overlapping step end such a request
    consumer.decode("d", PROMPT, params, scene.node)
    assert consumer.engine.counted("peer_loads") == (params is not None)
    scene.node.until(scene.is_over)


@pytest.mark.parametrize("length", [136, 140])
def test_a_window_is_handed_over_although_its_blocks_are_held_from_the_requests_end(
    make: Any, length: int
) -> None:
    scene = StoreProducer(make, window=40, max_step_tokens=256)
    consumer: Node = make("kv_consumer", window=40)
    prompt = PROMPT[:length]
    scene.add("p", prompt, stored=STORED)
    consumer.decode("d", prompt, scene.node.answer("p").params, scene.node)
    assert (
        consumer.engine.counted("peer_loads"),
        consumer.engine.counted("local_recomputes"),
    ) == (
        1,
        0,
    )


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_a_prefill_that_goes_on_is_offered_from_its_next_step_on(
    make: Any, max_tokens: int
) -> None:
    scene = StoreProducer(make, max_step_tokens=256)
    scene.add("p", stored=STORED, max_tokens=max_tokens)
    scene.node.step()
    assert not scene.seen
    scene.node.step()
    assert [(one.request_id, one.num_tokens) for one in scene.seen] == [
        ("p", len(PROMPT))
    ]


@promise(1)
@POLICIES
@OVERLAP
@pytest.mark.parametrize("max_step_tokens", [96, 256])
def test_prompts_that_share_what_was_to_be_loaded_are_not_read_before_it_is_computed(
    make: Any, policy: str, overlap: bool, max_step_tokens: int
) -> None:
    """vLLM puts the blocks into its prefix cache when it schedules the load, so others hit them in the same step, in
    the one that overlaps with it, and, under `recompute`, ever after."""
    scene = StoreProducer(
        make, policy, overlap=overlap, max_step_tokens=max_step_tokens, num_blocks=60
    )
    prompts = [[*PROMPT[:STORED], *tokens(20 + 16 * n, seed=10 + n)] for n in range(4)]
    scene.add("a", prompts[0], stored=STORED, fails=True)
    scene.add("b", prompts[1])
    ask(scene.node, "b", prompts[1])
    scene.node.step()
    scene.add("c", prompts[2])
    scene.node.step()
    scene.add("d", prompts[3])
    consumer: Node = make("kv_consumer", num_blocks=60)
    for index, name in enumerate("abcd"):
        consumer.decode(
            f"{name}'", prompts[index], scene.node.answer(name).params, scene.node
        )
    assert scene.node.answer("d").params is not None
    scene.node.until(scene.is_over)


@promise(1)
@OVERLAP
def test_a_prompt_is_not_hit_whose_load_failed_and_that_nobody_computes_again(
    make: Any, overlap: bool
) -> None:
    """vLLM leaves its blocks in the prefix cache, for the request that is to compute them: it is aborted."""
    scene = StoreProducer(make, overlap=overlap, max_step_tokens=256)
    scene.add("a", stored=STORED, fails=True)
    for _ in range(2 if overlap else 1):
        scene.node.step()
    scene.node.engine.abort("a")
    scene.add("b")
    consumer: Node = make("kv_consumer")
    consumer.decode("d", PROMPT, scene.node.answer("b").params, scene.node)
    assert consumer.engine.counted("peer_loads") == 1
    scene.node.until(scene.is_over)


def test_a_prompt_that_is_preempted_before_the_answer_is_computed_again(
    make: Any,
) -> None:
    """vLLM does not look for it then: it has no blocks any more. Its answer is delivered all the same."""
    scene = StoreProducer(make, overlap=True, max_step_tokens=64)
    scene.add("p", stored=STORED, fails=True)
    scene.node.step()
    scene.node.engine.preempt("p", drops_output=True)
    consumer: Node = make("kv_consumer")
    consumer.decode("d", PROMPT, scene.node.answer("p").params, scene.node)
    scene.node.until(scene.is_over)


@promise(3)
@pytest.mark.parametrize("max_step_tokens", [64, 256])
def test_a_report_that_comes_too_late_ends_the_lease(
    make: Any, max_step_tokens: int
) -> None:
    """vLLM's contract wants it with the step's output. What was read meanwhile is lost, but nothing more is read."""
    shelf = Shelf(tokens={"p": STORED}, broken={"p"}, late=True)
    producer: Node = make(
        "kv_producer", **beside_a_store(shelf), max_step_tokens=max_step_tokens
    )
    shelf.serve(producer)
    producer.model.poison()
    producer.engine.add("p", PROMPT, REMOTE_DECODE, max_tokens=4)
    assert producer.answer("p").params is None
    producer.until(lambda: producer.engine.is_whole)


def test_a_request_is_settled_when_every_load_that_it_may_have_hit_is_answered() -> (
    None
):
    """Compared with a model: a step is answered at the latest when so many more have been scheduled."""
    rng = random.Random(5)
    for max_steps in (1, 2, 4):
        take_backs = TakeBacks(
            EngineRequests(RequestTable()), EngineBlocks(), (16,), max_steps
        )
        loads: list[int] = []
        admitted: dict[str, int] = {}
        entries: dict[str, Any] = {}
        for step in range(300):
            new: list[Any] = []
            for n in range(rng.randrange(3)):
                name = (
                    f"{step}-{n}"
                    if rng.random() < 0.8 or not admitted
                    else rng.choice(list(admitted))
                )
                admitted[name] = step
                new.append(entries.setdefault(name, Mock(settled_by_step=0)))
            has_loads = rng.random() < 0.2
            if has_loads:
                loads.append(step)
            if has_loads or take_backs.are_possible:
                take_backs.begin_step(new, {}, loads=has_loads)
            for name, since in admitted.items():
                open_loads = [
                    load for load in loads if load <= since and step < load + max_steps
                ]
                is_unsettled = take_backs.is_unsettled(entries[name])
                assert is_unsettled == bool(open_loads), (max_steps, step, name)
                assert take_backs.are_possible or not is_unsettled


class Draw:
    """A random life of one producer, which is checked after every step."""

    def __init__(self, make: Any, seed: int, policy: str, **config: Any) -> None:
        self.rng = random.Random(seed)
        max_step_tokens = self.rng.choice([32, 48, 64, 96])
        self.scene = StoreProducer(
            make, policy, num_blocks=60, max_step_tokens=max_step_tokens, **config
        )
        self.scheduler = self.scene.node.engine.scheduler

    def add(self) -> None:
        rng, prompts = self.rng, self.scene.prompts
        number = len(prompts)
        name = f"r{number}"
        shared = tokens(rng.choice([0, 32, 64, 100]), seed=rng.randrange(1, 3))
        prompt = [*shared, *tokens(rng.randrange(20, 140), seed=100 + number)]
        if prompts and rng.random() < 0.2:
            prompt = list(rng.choice(list(prompts.values())))
        stored = rng.choice([0, 0, 16, 32, 64, 96, len(prompt)])
        max_tokens = rng.choice([1, 1, 1, 1, 3])
        self.scene.add(
            name, prompt, stored=stored, fails=rng.random() < 0.5, max_tokens=max_tokens
        )
        if rng.random() < 0.7:
            ask(self.scene.node, name, prompt, number=number + 1)

    def disturb(self) -> None:
        rng, leases = self.rng, self.scene.side.leases
        running = [request.request_id for request in self.scheduler.running]
        if running and rng.random() < 0.1:
            self.scene.node.engine.abort(running.pop(rng.randrange(len(running))))
        if running and rng.random() < 0.06:
            self.scene.node.engine.preempt(rng.choice(running), drops_output=True)
        for lease in leases.leases(LeaseState.HELD):
            if not lease.is_running and rng.random() < 0.3:
                leases.release(lease.name)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if len(self.scheduler.requests) < 6 and self.rng.random() < 0.6:
                self.add()
            self.disturb()
            self.scene.node.step()


@promise(1)
@POLICIES
@pytest.mark.parametrize("config", [{}, {"overlap": True}, {"pp": 2}], ids=str)
def test_no_byte_is_ever_believed_that_was_not_computed(
    make: Any, policy: str, config: dict[str, Any], run_seed: int
) -> None:
    """Whatever is loaded, fails, is shared, aborted, preempted, asked for or held: after every step, all that any
    consumer may take for good is compared with what the model writes for these tokens."""
    drawn = Draw(make, run_seed, policy, **config)
    drawn.run(70)
    assert drawn.scene.seen
    assert drawn.scene.shelf.loads


@promise(1)
@pytest.mark.parametrize("seed", [3481989823, 1, 2])
def test_a_block_that_is_filled_after_the_report_is_not_hit(
    make: Any, seed: int
) -> None:
    """In the first of these lives a request goes on from a wrong beginning and fills a block that was half full when
    vLLM was told; another one, with the same prompt, arrives after that."""
    drawn = Draw(make, seed, "recompute", overlap=True)
    drawn.run(70)
    assert drawn.scene.seen
