"""Tokens that a producer leaves out of a prompt, compared with a request that never had them."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvferry.connector.engine.local_engine import LocalEngine, tokens_left_out
from kvferry.connector.scheduler_side import intake
from kvferry.connector.scheduler_side.intake import (
    RemotePromptIntake,
    RequestIntake,
    leave_out,
)
from kvferry.connector.scheduler_side.prefixes import PrefixIntake
from kvferry.connector.scheduler_side.prompt_queries import PromptQueries
from kvferry.connector.scheduler_side.requests import EngineRequests, SchedulerContext
from kvferry.connector.vllm.core import EngineLoop
from kvferry.connector.vllm.scheduler import EngineBlocks
from kvferry.link.allowed_hosts import AllowedHosts, TrustedHosts
from kvferry.link.counters import Counters
from kvferry.protocol.digests import digest_chain
from kvferry.protocol.geometry import Topology
from kvferry.protocol.handshake import CacheGroup
from kvferry.protocol.rate_limited_log import RateLimitedLog
from kvferry.scheduler.consumer.ledger import ConsumerLedger
from kvferry.scheduler.consumer.pull_estimate import PullEstimate
from kvferry.scheduler.producer.ledger import ProducerLedger
from kvferry.scheduler.producer.prompt_directory import PromptDirectory
from kvferry.scheduler.requests import RequestTable
from tests.connector.test_local_engine import local_engine

FULL, STATE = (
    CacheGroup(policy="full", block_tokens=16),
    CacheGroup(policy="state", block_tokens=512),
)
TRUSTED = TrustedHosts(AllowedHosts.without_list(()), has_list=False)


def request_of(
    num_tokens: int, *, images: tuple[tuple[int, int], ...] = (), **sampling: Any
) -> Any:
    init_none_hash(sha256)
    return Request(
        request_id="request",
        prompt_token_ids=list(range(100, 100 + num_tokens)),
        sampling_params=SamplingParams(**{"max_tokens": 20, **sampling}),
        pooling_params=None,
        block_hasher=get_request_block_hasher(4, sha256),
        mm_features=[
            MultiModalFeatureSpec(
                data=None,
                modality="image",
                identifier=f"image-{start}",
                mm_position=PlaceholderRange(start, length),
            )
            for start, length in images
        ],
    )


def digests_of(request: Any, scope: str = "") -> tuple[str, ...]:
    local = local_engine(media_scope=scope)
    prompt = local.prompt_of(request, request.num_prompt_tokens)
    assert prompt is not None
    return digest_chain(prompt, request.num_prompt_tokens)


@pytest.mark.parametrize(
    ("groups", "lookahead", "expected"),
    [
        ([FULL], 0, 0),
        ([FULL], 1, 0),
        ([FULL, STATE], 0, 1),
        ([STATE], 1, 1),
        ([FULL], 3, 2),
        ([FULL, STATE], 3, 2),
    ],
)
def test_a_model_with_states_or_several_predictors_leaves_tokens_to_the_consumer(
    groups: list[CacheGroup], lookahead: int, expected: int
) -> None:
    config: Any = SimpleNamespace(num_prefill_lookahead_tokens=lookahead)
    assert tokens_left_out(config, groups) == expected


def test_identifiers_of_another_scope_are_other_images_and_text_is_the_same_in_all() -> (
    None
):
    text, image = request_of(300), request_of(300, images=((270, 8),))
    assert digests_of(text, "boot") == digests_of(text)
    assert digests_of(image, "boot") == digests_of(image, "boot")
    assert digests_of(image, "boot")[0] == digests_of(image)[0], (
        "of the tokens before it"
    )
    assert digests_of(image, "boot")[1] != digests_of(image)[1]


@pytest.mark.parametrize("images", [(), ((2, 3), (9, 2))], ids=["text", "images"])
@pytest.mark.parametrize("num_tokens", [14, 15, 16, 17, 20])
@pytest.mark.parametrize("left_out", [1, 2, 3])
def test_the_request_is_like_one_that_never_had_the_last_tokens(
    num_tokens: int, left_out: int, images: tuple[tuple[int, int], ...]
) -> None:
    request = request_of(num_tokens, images=images)
    expected = request_of(num_tokens - left_out, images=images, max_tokens=1)
    assert leave_out(request, left_out)
    for name in (
        "num_prompt_tokens",
        "num_tokens",
        "prompt_token_ids",
        "block_hashes",
        "max_tokens",
    ):
        assert getattr(request, name) == getattr(expected, name), name
    assert digests_of(request) == digests_of(expected)
    request.append_output_token_ids(7)
    expected.append_output_token_ids(7)
    assert request.block_hashes == expected.block_hashes, (
        "what follows is hashed behind the same blocks"
    )


@pytest.mark.parametrize(
    "request_",
    [
        request_of(1),
        request_of(16, min_tokens=2),
        request_of(16, prompt_logprobs=1),
        request_of(16, images=((12, 4),)),
    ],
    ids=[
        "a single token",
        "more answers wanted",
        "log-probabilities of the prompt",
        "ends within an image",
    ],
)
def test_a_prompt_whose_cache_would_be_unusable_is_not_changed(request_: Any) -> None:
    before = (
        request_.num_prompt_tokens,
        list(request_.all_token_ids),
        request_.max_tokens,
        list(request_.block_hashes),
    )
    assert not leave_out(request_, 1)
    after = (
        request_.num_prompt_tokens,
        list(request_.all_token_ids),
        request_.max_tokens,
        list(request_.block_hashes),
    )
    assert before == after


def intake_of(
    *groups: CacheGroup, **changed: Any
) -> tuple[RequestIntake, ProducerLedger, Counters]:
    """The intake of an engine whose cache has these groups, in both roles."""
    counters = Counters()
    requests = EngineRequests(RequestTable())
    loads = ConsumerLedger(counters, requests=requests.table)
    local = LocalEngine(
        engine_id="here",
        host="127.0.0.1",
        port=5600,
        topology=Topology(),
        groups=groups,
        block_spans=tuple(group.block_tokens for group in groups),
        left_out=tokens_left_out(
            SimpleNamespace(num_prefill_lookahead_tokens=0), groups
        ),
        is_producer=True,
        is_consumer=True,
        takes_turns=False,
        offers_turns=False,
        **changed,
    )
    leases, asking = (
        ProducerLedger(4, 30.0, counters, requests=requests.table),
        PromptQueries(requests, EngineLoop(), recomputes=True),
    )
    context = SchedulerContext(
        local=local,
        requests=requests,
        leases=leases,
        loads=loads,
        blocks=EngineBlocks(),
        counters=counters,
        tracing=None,
    )
    pulls = PrefixIntake(context, TRUSTED, asking, PullEstimate(1.0), ())
    received = RequestIntake(
        context,
        TRUSTED,
        RemotePromptIntake(context, TRUSTED),
        asking,
        PromptDirectory(),
        pulls,
    )
    return received, leases, counters


def test_a_producer_of_states_takes_a_prefill_without_its_last_token_and_nothing_that_cannot_be_used() -> (
    None
):
    received, leases, counters = intake_of(STATE, FULL)
    for tokens, taken, left in ((16, True, 15), (1, False, 1)):
        request = request_of(tokens)
        request.request_id = f"of {tokens}"
        request.kv_transfer_params = {"do_remote_decode": True}
        received.receive(EngineRequests(RequestTable()).add(request))
        assert (
            leases.running(request.request_id) is not None,
            request.num_prompt_tokens,
        ) == (
            taken,
            left,
        )
        assert dict(counters.take()) == ({} if taken else {("prefills_kept", ""): 1})


def test_requests_whose_params_cause_an_internal_error_fill_the_log_with_no_tracebacks(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(intake, "read_params", fail)
    received, _, counters = intake_of(FULL)
    log = logging.getLogger("of the test")
    monkeypatch.setattr(received, "_bugs", RateLimitedLog(log, 3600.0))
    for number in range(3):
        request = request_of(16)
        request.request_id = f"r{number}"
        received.receive(EngineRequests(RequestTable()).add(request))
    (message,) = (each.getMessage() for each in caplog.records if each.name == log.name)
    assert message == "req=r0: an internal error in its params"
    assert counters.take() == {("local_recomputes", "invalid_params"): 3}
