"""The tokens that a scheduler block covers, and the blocks that are offered."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus

from kvferry.connector.config import FerryConfig
from kvferry.connector.engine.local_engine import LocalEngine, block_spans, row_blocks
from kvferry.connector.scheduler_side.tickets import ParamsBuilder
from kvferry.protocol.errors import InvalidConfig
from kvferry.protocol.geometry import Topology
from kvferry.protocol.handshake import CacheGroup, LeaseName
from kvferry.protocol.ids import TEXT
from kvferry.protocol.params import RemotePrefill, engine_of
from kvferry.scheduler.requests import LeaseUse, ProducerLease
from tests.connector.caches import config_of, full, group
from tests.harness.core.configs import vllm_config

LATENT = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}


def latent(**changed: Any) -> Any:
    return group(MLAAttentionSpec(**{**LATENT, **changed}), "layers.0")


def window() -> Any:
    spec = SlidingWindowSpec(**LATENT, sliding_window=40)
    return group(replace(spec, dcp_sharded=False), "layers.1")


def cache(*groups: Any) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=50,
        kv_cache_tensors=[],
        kv_cache_groups=list(groups),
        kv_cache_layout="LBHNC",
    )


def local_engine(**changed: Any) -> LocalEngine:
    usual: dict[str, Any] = {
        "engine_id": "e",
        "host": "127.0.0.1",
        "port": 5600,
        "topology": Topology(tp=2, dcp=2),
        "groups": (CacheGroup(policy="full", block_tokens=16),),
        "block_spans": (32,),
        "left_out": 0,
        "is_producer": True,
        "is_consumer": True,
        "takes_turns": True,
        "offers_turns": True,
    }
    return LocalEngine(**{**usual, **changed})


LEASE = ProducerLease("r", slot=3, name=LeaseName(slot=3, epoch="5" * 15))


def finished(tokens: int) -> Request:
    """A request that has sampled one token after `tokens` computed ones."""
    request = Request("r", list(range(tokens)), SamplingParams(max_tokens=1), None)
    request.append_output_token_ids(7)
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    request.num_computed_tokens = tokens
    return request


def built(
    builder: ParamsBuilder,
    request: Request,
    block_ids: tuple[list[int], ...],
    lease: ProducerLease,
) -> RemotePrefill | None:
    """The params of all complete tokens of a request."""
    num_tokens = builder.num_complete_tokens(request, lease.use)
    return builder.build(request, block_ids, num_tokens, lease)


@pytest.mark.parametrize(
    ("dcp", "spans"), [(1, (16, 16)), (2, (32, 16)), (4, (64, 16))]
)
def test_ranks_that_share_tokens_out_widen_the_blocks_of_sharded_groups_only(
    dcp: int, spans: tuple[int, int]
) -> None:
    assert block_spans(cache(latent(), window()), dcp) == spans


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(1, 1), (32, 1), (33, 2), (100, 4), (128, 4), (129, 5)]
)
def test_the_blocks_of_shared_out_tokens_are_clipped_by_what_they_cover(
    tokens: int, blocks: int
) -> None:
    """vLLM clips by the local size, so the step in flight's block is still in its list."""
    params_builder = ParamsBuilder(local_engine(), cache(latent()), 30.0)
    ids = list(range(10, 20))
    params = built(params_builder, finished(tokens), (ids,), LEASE)
    assert params is not None
    assert params.remote_block_ids == (tuple(ids[:blocks]),)
    assert (params.kvferry.held_from, params.dcp_size) == ((0,), 2)


def test_a_window_of_whole_tokens_beside_shared_out_ones_keeps_its_own_count() -> None:
    groups = (
        CacheGroup(policy="full", block_tokens=16),
        CacheGroup(policy="window", block_tokens=16, window_tokens=40),
    )
    params_builder = ParamsBuilder(
        local_engine(groups=groups, block_spans=(32, 16)),
        cache(latent(), window()),
        30.0,
    )
    params = built(
        params_builder,
        finished(100),
        ([1, 2, 3, 4, 5], [0, 0, 0, 8, 9, 10, 11, 12]),
        LEASE,
    )
    assert params is not None
    assert params.remote_block_ids == ((1, 2, 3, 4), (8, 9, 10, 11))
    assert params.kvferry.held_from == (0, 48)


@pytest.mark.parametrize(
    ("use", "tokens"), [(LeaseUse.PROMPT, 100), (LeaseUse.TURN, 98)]
)
def test_an_answer_is_offered_without_what_a_predictor_wrote_from_drafts(
    use: LeaseUse, tokens: int
) -> None:
    builder, lease = (
        ParamsBuilder(local_engine(left_out=2), cache(latent()), 30.0),
        replace(LEASE, use=use),
    )
    params = built(builder, finished(100), ([1, 2, 3, 4],), lease)
    assert params is not None
    assert (params.remote_num_tokens, len(params.kvferry.digests)) == (tokens, 1)


@pytest.mark.parametrize(
    ("span", "blocks"), [(512, (3,)), (20, (3, 5)), (16, (3, 5, 7))]
)
def test_scratch_blocks_behind_a_state_are_not_loaded_into(
    span: int, blocks: tuple[int, ...]
) -> None:
    """For drafts vLLM gives a request more blocks than its tokens have, and the last of them are not the state's."""
    groups = (
        CacheGroup(policy="state", block_tokens=span),
        CacheGroup(policy="full", block_tokens=16),
    )
    engine = local_engine(groups=groups, block_spans=(span, 16))
    assert engine.without_scratch(((3, 5, 7, 8), (1, 2, 4, 6)), 40) == (
        blocks,
        (1, 2, 4, 6),
    )


def both_roles(**config: Any) -> LocalEngine:
    made = vllm_config(
        "NixlConnector", module="kvferry.connector", role="kv_both", **config
    )
    return LocalEngine.from_vllm_config(
        made, config_of(group(full())), FerryConfig(bidirectional_kv_xfer=True)
    )


def test_a_model_with_a_recurrent_state_takes_turns_and_offers_none(
    monkeypatch: pytest.MonkeyPatch, ferry_log: pytest.LogCaptureFixture
) -> None:
    groups = (
        CacheGroup(policy="full", block_tokens=16),
        CacheGroup(policy="state", block_tokens=16),
    )
    monkeypatch.setattr(
        "kvferry.connector.engine.local_engine.groups_of", lambda config: groups
    )
    made = both_roles()
    assert (made.offers_turns, made.takes_turns) == (False, True)
    assert "recurrent state" in ferry_log.records[-1].getMessage()


@pytest.mark.parametrize(
    ("role", "policy", "option", "says"),
    [
        ("kv_both", "recompute", {"prefix_pulls": "off"}, "prefix_pulls is off"),
        ("kv_both", "fail", {}, "use recompute"),
        ("kv_producer", "recompute", {}, "use kv_both"),
        ("kv_both", "recompute", {}, None),
    ],
)
def test_an_engine_says_at_its_start_why_it_asks_none_of_its_prefix_sources(
    ferry_log: pytest.LogCaptureFixture,
    role: str,
    policy: str,
    option: dict[str, Any],
    says: str | None,
) -> None:
    made = vllm_config(
        "NixlConnector", module="kvferry.connector", role=role, policy=policy
    )
    config = FerryConfig(prefix_sources=("10.1.2.3:5600",), **option)
    LocalEngine.from_vllm_config(made, config_of(group(full())), config)
    said = [record.getMessage() for record in ferry_log.records]
    said = [line for line in said if line.startswith("prefix_sources")]
    assert len(said) == (says is not None)
    assert all(says is not None and says in line for line in said)


@pytest.mark.parametrize(
    ("cache_gib", "prefixes", "is_hashed"),
    [(0, False, False), (0, True, True), (4, False, True)],
)
def test_two_engines_share_identifiers_of_images_only_where_vllm_hashes_what_is_in_them(
    monkeypatch: pytest.MonkeyPatch, cache_gib: float, prefixes: bool, is_hashed: bool
) -> None:
    """`renderer0-mm-5-image-0` is the fifth request's image on each of them."""
    made = vllm_config("NixlConnector", module="kvferry.connector", role="kv_both")
    monkeypatch.setattr(made.cache_config, "enable_prefix_caching", prefixes)
    images = SimpleNamespace(mm_processor_cache_gb=cache_gib)
    monkeypatch.setattr(made.model_config, "multimodal_config", images, raising=False)
    one, other = (
        LocalEngine.from_vllm_config(made, config_of(group(full())), FerryConfig())
        for _ in range(2)
    )
    assert (one.media_scope == other.media_scope) is is_hashed


def test_a_row_has_room_for_the_longest_prompt_of_every_group() -> None:
    made = vllm_config("NixlConnector", module="kvferry.connector", max_tokens=500)
    narrow = group(MLAAttentionSpec(**{**LATENT, "block_size": 64}), "layers.1")
    assert row_blocks(made, cache(latent(), narrow), FerryConfig()) == (32, 8)
    made.parallel_config.decode_context_parallel_size = 4
    assert row_blocks(made, cache(latent(), narrow), FerryConfig()) == (8, 2)
    assert row_blocks(made, cache(latent(), narrow), FerryConfig(streaming="off")) == ()


@pytest.mark.parametrize("engine_id", ["", "two\nlines", "e" * 471])
def test_an_engine_id_that_no_other_engine_would_take_stops_the_start(
    engine_id: str,
) -> None:
    """All engines would refuse its params and messages, and every prompt would be computed twice."""
    made = vllm_config("NixlConnector", module="kvferry.connector", engine_id=engine_id)
    with pytest.raises(InvalidConfig, match=r"engine_id is .*1 to 470 characters"):
        LocalEngine.from_vllm_config(made, config_of(group(full())), FerryConfig())


def test_the_longest_engine_id_is_announced_as_a_name() -> None:
    made = vllm_config("NixlConnector", module="kvferry.connector", engine_id="e" * 470)
    engine = LocalEngine.from_vllm_config(made, config_of(group(full())), FerryConfig())
    assert TEXT.fullmatch(engine.announced_id)
    assert engine_of(engine.announced_id) == "e" * 470
