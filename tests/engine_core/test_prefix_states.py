"""Recurrent states of prefixes: which of them are given, and that their bytes are those of the prefix.

vLLM gives a block its hash when it schedules the step that writes the state into it, and goes on *in* a block whose
hash is of a part of it (`prefix_match_unit`). The toy model keeps states as vLLM's model runner does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from kvferry.connector.engine.facts import writes_states_late
from kvferry.connector.scheduler_side import side
from kvferry.protocol.params import RemotePrefill
from kvferry.protocol.queries import PromptProgress
from kvferry.protocol.slots import (
    SlotState,
    slot_word,
)
from tests.engine_core.prefixes import (
    LONG,
    Asker,
    asking,
    compute,
    params_of,
    query_of,
)
from tests.engine_core.test_prefix_leases import hit_of
from tests.engine_core.test_prefix_pulls import (
    ASKS,
    PREFIX,
    PROMPT,
    ask,
    everything_is_over,
)
from tests.harness.core import configs, node, scheduler
from tests.harness.core.configs import vllm_config
from tests.harness.core.node import Node
from tests.harness.core.scheduler import tokens
from tests.harness.core.toy_model import recurrent_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("is_patient")]

STATES = {**LONG, "states": 1}
STATE_GROUP = 1


def held(engine: Node, params: RemotePrefill) -> set[float]:
    """The numbers in the state of a ticket."""
    (block,) = params.remote_block_ids[STATE_GROUP]
    (page,) = engine.model.recurrent_pages(block)
    return set(page.tolist())


def test_the_state_is_that_of_the_prefix(make: Any) -> None:
    source = make("kv_both", **STATES)
    compute(source, "own", PROMPT)
    with asking(source) as asker:
        params = asker.ticket(query_of(PROMPT))
    assert params.remote_num_tokens == 1024
    assert held(source, params) == {recurrent_of(PREFIX)}


def test_a_state_that_a_forward_pass_keeps_is_that_of_the_prefix(make: Any) -> None:
    """Mamba-2's kernel exports the state at the last block's end within a pass into a block of its own."""
    source = make(
        "kv_both", **{**STATES, "max_step_tokens": 2048}, keeps_checkpoints=True
    )
    prompt = PREFIX[:520]
    source.engine.add("own", prompt, max_tokens=2)
    assert source.step().computed == {"own": 520}, "in one pass"
    with asking(source) as asker:
        params = asker.ticket(query_of(prompt))
    assert params.remote_num_tokens == 512
    assert held(source, params) == {recurrent_of(prompt[:512])}
    source.answer("own")
    assert held(source, params) == {recurrent_of(prompt[:512])}


def test_a_hit_ends_where_a_state_is_cached(make: Any) -> None:
    """Of the attention blocks after it nothing is given, as vLLM itself would not use them."""
    source = make("kv_both", **STATES)
    compute(source, "own", PROMPT)
    manager = source.engine.scheduler.kv_cache_manager
    with asking(source) as asker:
        longest = asker.ticket(query_of(PROMPT))
        manager.evict_blocks(set(longest.remote_block_ids[STATE_GROUP]))
        params = asker.ticket(query_of(PROMPT, 2))
    assert params.remote_num_tokens == 512, "the end of the step before"
    assert len(params.remote_block_ids[0]) == 512 // configs.BLOCK_TOKENS
    assert held(source, params) == {recurrent_of(PREFIX[:512])}


def test_the_last_token_of_a_prompt_is_not_in_a_state_that_is_read(make: Any) -> None:
    """vLLM computes that token in any case, and a state takes each token once."""
    answerer, asker = make("kv_both", **STATES), make("kv_both", **STATES, **ASKS)
    compute(answerer, "before", PROMPT, 2)
    assert ask(asker, answerer, PREFIX) == 1024 - 512
    everything_is_over(answerer, asker)


def test_the_answer_of_a_decode_has_states_too(make: Any) -> None:
    answerer, asker = make("kv_both", **STATES), make("kv_both", **STATES, **ASKS)
    first = tokens(500, seed=6)
    answer = compute(answerer, "turn", first, 30)
    prompt = [*first, *answer, *tokens(40, seed=7)]
    assert ask(asker, answerer, prompt) == len(prompt) - 512
    everything_is_over(answerer, asker)


def test_only_the_state_is_read_where_the_attention_is_cached(make: Any) -> None:
    """The own hit ends where all groups have one; the load brings one first token for all."""
    answerer, asker = make("kv_both", **STATES), make("kv_both", **STATES, **ASKS)
    compute(answerer, "before", PROMPT, 2)
    compute(asker, "own", PREFIX[:600], 2)
    assert ask(asker, answerer) == len(PROMPT) - 1024
    assert asker.engine.counted("prefix_tokens_loaded") == 1024 - 592
    everything_is_over(answerer, asker)


def test_a_state_is_ready_when_the_step_that_writes_it_is_over(make: Any) -> None:
    """Its block has its hash from the schedule on, and the workers know of the lease before the forward pass."""
    source = make("kv_both", **STATES)
    right = {recurrent_of(PREFIX[:512])}
    forward = source.model.forward
    with asking(source) as asker, found_while_scheduled(source, asker, 512) as found:

        def checked(output: Any) -> None:
            (ticket,) = found
            assert held(source, ticket) != right, "control: this step writes it"
            epoch = int(ticket.kvferry.lease_epoch, 16)
            computing = slot_word(epoch, SlotState.COMPUTING)  # type: ignore[arg-type]
            assert word(source, ticket) == computing
            forward(output)

        source.engine.add("own", PROMPT, max_tokens=1)
        with mock.patch.object(source.model, "forward", checked):
            source.step()
        (ticket,) = found
        assert held(source, ticket) == right
        source.answer("own")
        assert held(source, ticket) == right, "its request goes on in another block"


PART_TOKENS = 16
LARGE_BLOCK = 96


@pytest.fixture
def make_partial(make: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Node]:
    """Makes engines whose prompts may be hit within a block (`prefix_match_unit`)."""

    def build(**config: Any) -> Node:
        with monkeypatch.context() as changed:
            for module in (configs, scheduler, node):
                changed.setattr(module, "BLOCK_TOKENS", LARGE_BLOCK)
            made: Node = make("kv_both", **STATES, match_tokens=PART_TOKENS, **config)
            return made

    return build


def test_a_state_within_a_block_is_not_given(make_partial: Any) -> None:
    """Its request goes on in that very block, when vLLM has made a copy for its own hits."""
    source = make_partial()
    prompt = PREFIX[:513]
    with asking(source) as asker, found_while_scheduled(source, asker, 512) as found:
        source.engine.add("own", prompt, max_tokens=1)
        source.answer("own")
        again = asker.ticket(query_of(prompt, 2))
    assert hit_of(source, prompt) == 512, "vLLM itself hits the copy"
    for ticket in (*found, again):
        assert ticket.remote_num_tokens == 480
        assert held(source, ticket) == {recurrent_of(PREFIX[:480])}
    assert len(found) == 1


def test_prefixes_of_large_blocks_are_read_up_to_their_last_whole_one(
    make_partial: Any,
) -> None:
    answerer, asker = make_partial(), make_partial(**ASKS)
    compute(answerer, "before", PREFIX[:513], 2)
    prompt = [*PREFIX[:513], *tokens(30, seed=8)]
    assert ask(asker, answerer, prompt) == len(prompt) - 480
    everything_is_over(answerer, asker)


@pytest.mark.parametrize(
    ("shape", "late"),
    [
        ({"states": 1, "pp": 2}, True),
        ({"states": 1}, False),
        ({"pp": 2}, False),
    ],
    ids=str,
)
def test_states_that_stages_learn_of_late_are_given_to_nobody(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any], late: bool
) -> None:
    """Where drafts are verified, a stage before the last one copies a state when it has heard what was accepted."""
    drafted = vllm_config("NixlConnector", **shape)
    assert not writes_states_late(drafted)
    drafted.speculative_config = object()
    assert writes_states_late(drafted) == ("pp" in shape)
    monkeypatch.setattr(
        side, "writes_states_late", lambda config: writes_states_late(drafted)
    )
    engine = make_engine("kv_both", **shape)
    assert (engine.connector.scheduler_side.prefix_cache.hash_tokens == 0) == late


def word(source: Node, ticket: RemotePrefill) -> int:
    """The slot's word when the transfer thread has carried out all orders so far."""
    (worker,) = source.ferry_workers
    worker.snapshot(30.0)
    # Of a turn after the one that has taken them: by then it is READY if it may be.
    snapshot = worker.snapshot(30.0)
    assert snapshot is not None
    return int(snapshot.leases.words.get(ticket.kvferry.lease_slot, 0))


@contextmanager
def found_while_scheduled(
    source: Node, asker: Asker, stop: int
) -> Iterator[list[RemotePrefill]]:
    """Have a query find what a step is to write, the one that computes the request `own` up to here, as soon as vLLM
    has scheduled that step: the listener's thread looks the cache through at any time. So its lease is opened with
    this step."""
    connector = source.engine.connector
    build: Callable[[Any], Any] = connector.build_connector_meta
    found: list[RemotePrefill] = []

    def build_with_lease(output: Any) -> Any:
        num_tokens = output.num_scheduled_tokens.get("own", 0)
        if not num_tokens or found:
            return build(output)
        request = source.engine.scheduler.requests["own"]
        if request.num_computed_tokens + num_tokens != stop:
            return build(output)
        asker.send(query_of(PREFIX[:stop]))
        assert asker.receive().progress is PromptProgress.QUEUED
        metadata = build(output)
        found.append(params_of(source, asker.receive()))
        return metadata

    with mock.patch.object(connector, "build_connector_meta", build_with_lease):
        yield found
