"""What a producer answers about a prompt that no lease leads to: at once, and so that the consumer computes it."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.protocol.handshake import LeaseName
from kvferry.protocol.queries import Answer, PromptProgress
from kvferry.scheduler.producer import prompt_directory
from kvferry.scheduler.producer.prompt_directory import PromptDirectory
from tests.engine_core.streamed import PROMPT, REMOTE_DECODE, ask, asked_for, is_over
from tests.harness.core.node import Node
from tests.harness.inside import thread_of
from tests.waiting import wait_until


def said(answer: Answer) -> tuple[PromptProgress, str]:
    return answer.progress, answer.reason


def prompts_of(node: Node) -> PromptDirectory:
    found: PromptDirectory = node.engine.connector.scheduler_side.tickets.directory
    return found


def test_a_worker_takes_notifications_before_the_engines_first_step(make: Any) -> None:
    """Peers know of it from then on, and NIXL keeps what they send until it is taken."""
    producer: Node = make("kv_producer")
    assert producer.ferry_workers
    for worker in producer.ferry_workers:
        assert thread_of(worker).is_running


def test_a_prompt_that_cannot_be_decoded_elsewhere_is_not_waited_for(make: Any) -> None:
    producer: Node = make("kv_producer")
    producer.engine.add("p", PROMPT, REMOTE_DECODE, max_tokens=1, resumable=True)
    assert said(ask(producer, "p")) == (PromptProgress.OVER, "no_lease")
    producer.engine.abort("p")


def test_a_prompt_at_an_engine_that_is_no_producer_is_not_waited_for(
    make_both: Any,
) -> None:
    decoder: Node = make_both(role="kv_consumer")
    decoder.engine.add("p", PROMPT, REMOTE_DECODE, max_tokens=1)
    assert said(ask(decoder, "p")) == (PromptProgress.OVER, "no_lease")
    decoder.answer("p")


def test_a_prompt_whose_id_has_a_lease_is_not_waited_for(make: Any) -> None:
    producer: Node = make("kv_producer")
    params = producer.prefill("p", PROMPT)
    again = PROMPT[:100]
    producer.engine.add("p", again, REMOTE_DECODE, max_tokens=1)
    assert said(ask(producer, "p", again)) == (PromptProgress.OVER, "no_lease")
    assert producer.answer("p").params is None
    leases, ticket = producer.engine.connector.scheduler_side.leases, params["kvferry"]
    leases.release(LeaseName(slot=ticket["lease_slot"], epoch=ticket["lease_epoch"]))
    producer.until(lambda: is_over(producer))


def test_a_prefill_that_succeeds_without_its_lease_is_not_taken_for_one_that_failed(
    make: Any,
) -> None:
    """Under the policy `fail` the consumer's request would fail, although its prompt can be computed."""
    producer = asked_for(make)
    producer.engine.connector.scheduler_side.life.reset()
    assert producer.answer("p").params is None
    assert said(ask(producer, "p")) == (PromptProgress.OVER, "no_lease")


@pytest.mark.parametrize(
    "streams", [False, True], ids=["when it is complete", "while it is computed"]
)
def test_a_ticket_is_not_given_any_more_when_its_lease_has_ended(
    make: Any, streams: bool
) -> None:
    producer: Node = make("kv_producer", max_step_tokens=64)
    producer.engine.add("p", PROMPT, REMOTE_DECODE, max_tokens=1)
    ask(producer, "p", streams=streams)
    assert producer.answer("p").params is not None
    assert ask(producer, "p", streams=streams).progress is PromptProgress.TICKET
    (lease,) = (
        producer.engine.connector.scheduler_side.leases.block_references.held.values()
    )
    assert producer.engine.connector.scheduler_side.leases.release(lease.origin)
    assert said(ask(producer, "p", streams=streams)) == (
        PromptProgress.OVER,
        "no_lease",
    )
    producer.until(lambda: is_over(producer))
    assert said(ask(producer, "p", streams=streams)) == (
        PromptProgress.OVER,
        "no_lease",
    )


def test_a_reset_takes_the_ticket_of_a_prompt_that_is_computed_back_at_once(
    make: Any,
) -> None:
    producer = asked_for(make)
    producer.step()
    assert ask(producer, "p").progress is PromptProgress.TICKET
    producer.engine.connector.scheduler_side.life.reset()
    assert said(ask(producer, "p")) == (PromptProgress.OVER, "no_lease")
    producer.answer("p")


def test_prompts_are_forgotten_although_one_that_came_before_them_goes_on(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each keeps the tokens of its prompt."""
    monkeypatch.setattr(prompt_directory, "KEPT_S", 0.0)
    producer: Node = make("kv_producer")
    producer.engine.add("long", PROMPT[:64], REMOTE_DECODE, max_tokens=60)
    for n in range(3):
        producer.engine.add(f"p{n}", PROMPT[:64], REMOTE_DECODE, max_tokens=1)
        producer.answer(f"p{n}")
    assert not producer.engine.answers["long"].finish_reason
    # Without a step: the listener's thread forgets, and the long one would end meanwhile.
    prompts = prompts_of(producer)
    wait_until(
        lambda: set(prompts.snapshot().prompts) in ({"long"}, {"long", "p2"}),
        "those that have ended are forgotten",
    )
    producer.engine.abort("long")
    producer.engine.connector.scheduler_side.leases.release_all("reset")
    producer.until(lambda: is_over(producer))
