"""What a response's usage counts as cached tokens: those of the producer, whether both legs came in turn or at once."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.stats import IterationStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.engine_core.streamed import ask
from tests.engine_core.test_both_legs import COUNT, check, ids, leg_params
from tests.harness.core.node import Node, until
from tests.harness.core.scheduler import tokens

PROMPT = tokens(144, seed=3)
REMOTE_DECODE = {"do_remote_decode": True}


class FrontEnd:
    """vLLM's front end of a node: it counts what it reports to a client, and what it exports."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._processor = OutputProcessor(None, log_stats=True)
        self._collect = node.engine._collect
        node.engine._collect = self._take  # type: ignore[method-assign]
        self.stats = IterationStats()

    def add(self, request_id: str, params: dict[str, Any], **request: Any) -> None:
        sampling = SamplingParams(max_tokens=COUNT, ignore_eos=True, detokenize=False)
        sampling.extra_args = {"kv_transfer_params": params}
        self._processor.add_request(
            EngineCoreRequest(
                request_id=request_id,
                external_req_id=request_id,
                prompt_token_ids=list(PROMPT),
                mm_features=None,
                sampling_params=sampling,
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            ),
            None,
        )
        self._node.engine.add(request_id, PROMPT, params, max_tokens=COUNT, **request)

    def usage(self, request_id: str) -> tuple[int, int]:
        """Cached tokens of a request's response, and those that it has put into the cache; while it runs."""
        state = self._processor.request_states[request_id]
        return state.num_cached_tokens, state.num_cache_creation_tokens

    def _take(self, result: EngineCoreOutputs) -> None:
        self._collect(result)
        sent: EngineCoreOutputs = MsgpackDecoder(EngineCoreOutputs).decode(
            MsgpackEncoder().encode(result)
        )
        for output in sent.outputs:
            output.finish_reason = None  # the state is looked at afterwards
        self._processor.process_outputs(sent.outputs, time.monotonic(), self.stats)


def in_turn(producer: Node, consumer: Node) -> tuple[FrontEnd, str]:
    front, (_, decode) = FrontEnd(consumer), ids("x")
    front.add(decode, producer.prefill("p", PROMPT))
    return front, decode


def at_once(producer: Node, consumer: Node) -> tuple[FrontEnd, str]:
    front, (prefill, decode) = FrontEnd(consumer), ids("x")
    producer.engine.add(prefill, PROMPT, REMOTE_DECODE, max_tokens=1)
    front.add(decode, leg_params(producer, "x"))
    return front, decode


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "in chunks": {"max_step_tokens": 64},
    "overlapping steps": {"overlap": True},
    "windows": {"window": 48, "num_blocks": 60},
}


@pytest.mark.parametrize("legs", [in_turn, at_once])
@pytest.mark.parametrize(
    ("producer_has", "consumer_has"), [(0, 0), (64, 0), (0, 64), (96, 32), (32, 144)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_cached_tokens_are_those_of_the_producer(
    make: Any, legs: Any, producer_has: int, consumer_has: int, kind: str
) -> None:
    producer, consumer = (
        make("kv_producer", **KINDS[kind]),
        make("kv_consumer", **KINDS[kind]),
    )
    for node, count in ((producer, producer_has), (consumer, consumer_has)):
        if count:
            node.engine.add("before", PROMPT[:count], max_tokens=1)
            node.answer("before")
    front, decode = legs(producer, consumer)
    until(
        (producer, consumer),
        lambda: consumer.engine.answers[decode].finish_reason is not None,
    )
    check(consumer, decode, PROMPT)
    cached, created = front.usage(decode)
    assert cached == producer_has
    assert created == 0, "what was loaded is not counted as new, as in turn"
    assert front.stats.prompt_token_stats.total == len(PROMPT)
    by_source = front.stats.prompt_token_stats
    assert (
        by_source.computed + by_source.local_cache_hit + by_source.external_kv_transfer
        == len(PROMPT)
    )


@pytest.mark.parametrize("streaming", ["auto", "off"])
def test_a_ticket_of_a_model_with_states_says_what_the_producer_had(
    make_engine: Any, streaming: str
) -> None:
    """It comes when the request has ended; vLLM's own count is gone by then."""
    engine = make_engine(states=1, extra={"streaming": streaming})
    node = cast("Node", SimpleNamespace(engine=engine))
    engine.add("p", PROMPT, REMOTE_DECODE, max_tokens=1)
    ask(node, "p", PROMPT)
    engine.run()
    assert engine.answers["p"].params["remote_prefill_cached_tokens"] == 0
    assert ask(node, "p", PROMPT).cached_tokens == 0


def test_a_producer_that_does_not_tell_leaves_the_count_to_vllm(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older one, or one whose vLLM does not tell."""
    monkeypatch.setattr(
        "kvferry.connector.scheduler_side.tickets.cached_tokens_of",
        lambda request: None,
    )
    producer, consumer = make("kv_producer"), make("kv_consumer")
    front, decode = at_once(producer, consumer)
    until(
        (producer, consumer),
        lambda: consumer.engine.answers[decode].finish_reason is not None,
    )
    check(consumer, decode, PROMPT)
    assert front.usage(decode)[0] == len(PROMPT)
