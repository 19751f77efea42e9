"""The local engine: its identity in params, its roles, and its description file."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from vllm import envs

from kvferry.connector.config import FerryConfig
from kvferry.connector.engine.adapters import Adapters
from kvferry.connector.engine.facts import can_stream, topology_of
from kvferry.connector.layout.discovery import groups_of
from kvferry.connector.vllm.core import RunningWeights
from kvferry.plan.blocks import reaches_back
from kvferry.protocol.description_json import encode_engine_json, to_engine_json
from kvferry.protocol.digests import Media, Prompt
from kvferry.protocol.errors import InvalidConfig
from kvferry.protocol.geometry import Topology
from kvferry.protocol.handshake import CacheGroup, EngineDescription
from kvferry.protocol.hosts import check_announced
from kvferry.protocol.ids import TEXT, BootId, new_boot_id
from kvferry.protocol.params import (
    NamedPrefill,
    RemotePrefill,
    announced_id,
    new_mac_key,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


logger = logging.getLogger(__name__)

_DESCRIPTION_MODE = 0o644
"""Readable for all: a file of `mkstemp` is readable for its owner only."""


def write_description(name: str, engine: EngineDescription) -> Path:
    """Write the description JSON of an engine, atomically: a reader sees the old file or the new one, never a part.

    Args:
        name: the path as configured; `{engine_id}` is replaced by the engine's id, with underscores for slashes.

    Raises:
        InvalidConfig: the file cannot be written; the text has the reason.
    """
    file_name = engine.engine_id.replace("/", "_")
    path = Path(name.replace("{engine_id}", file_name))
    try:
        _replace(path, encode_engine_json(to_engine_json(engine)))
    except (OSError, ValueError) as refused:
        raise InvalidConfig(
            "description_file", str(path), f"a file that can be written ({refused})"
        ) from None
    return path


def _replace(path: Path, content: bytes) -> None:
    """Replace a file's content at once. If that fails, the old file stays and no other one is left.

    Raises:
        OSError: from the file system.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:64]}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            os.fchmod(stream.fileno(), _DESCRIPTION_MODE)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@dataclass(slots=True)
class MemoryIdentity:
    """What this engine's registered memory is called in descriptions and tickets. Changed on the step thread.

    Attributes:
        boot: no other generation's, of this engine or any: peers drop what they know of another one.
        mac_key: of its tickets, so that none from before a sleep is ever valid after it.
        generation: how often the memory was registered again.
    """

    boot: BootId
    mac_key: bytes = field(default_factory=new_mac_key, repr=False)
    generation: int = 0

    def renew(self) -> None:
        """The memory was registered again."""
        self.boot = new_boot_id()
        self.mac_key = new_mac_key()
        self.generation += 1


@dataclass(frozen=True)
class LocalEngine:
    """The local engine, from one start to its end.

    Attributes:
        engine_id: as configured; another engine may have it too, see `is_named_by`.
        host, port: address of its side channel.
        block_spans: per cache group, the tokens that one scheduler block covers on all ranks together.
        left_out: number of a prompt's last tokens that the producer does not compute.
        takes_turns: whether its prefills read the last turn of a conversation from decoders.
        offers_turns: whether it offers its answers for the next turn.
        pulls_prefixes: whether it may read the first parts of prompts from engines that have them, see `asks_prefixes`.
        media_scope: see `_media_scope`.
        adapters: the contents of its LoRA adapters.
        weights: the version of its weights, if they were updated.
        boot: of this start. By it producers and its own workers know this engine, and routers name it.
        memory: what its tickets and its description are of; its first boot is `boot`.
    """

    engine_id: str
    host: str
    port: int
    topology: Topology
    groups: tuple[CacheGroup, ...]
    block_spans: tuple[int, ...]
    left_out: int
    is_producer: bool
    is_consumer: bool
    takes_turns: bool
    offers_turns: bool
    pulls_prefixes: bool = False
    media_scope: str = ""
    adapters: Adapters = field(default_factory=Adapters, repr=False, compare=False)
    weights: RunningWeights = field(
        default_factory=RunningWeights, repr=False, compare=False
    )
    boot: BootId = field(default_factory=new_boot_id)
    memory: MemoryIdentity = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory", MemoryIdentity(self.boot))

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        config: FerryConfig,
    ) -> LocalEngine:
        """Create it from the configuration, with a new boot id and MAC key.

        Raises:
            InvalidConfig: a cache cannot be described, no decoder could reach the side channel's host, or no engine
                would accept this one's id.
        """
        transfer = vllm_config.kv_transfer_config
        topology = topology_of(vllm_config)
        groups = groups_of(kv_cache_config)
        has_turns = config.bidirectional_kv_xfer
        can_offer = has_turns and _can_offer_turns(
            groups, transfer.kv_load_failure_policy
        )
        boot = new_boot_id()
        local = cls(
            engine_id=transfer.engine_id,
            host=envs.VLLM_NIXL_SIDE_CHANNEL_HOST,
            port=envs.VLLM_NIXL_SIDE_CHANNEL_PORT
            + vllm_config.parallel_config.data_parallel_index,
            topology=topology,
            groups=groups,
            block_spans=block_spans(kv_cache_config, topology.dcp),
            left_out=tokens_left_out(vllm_config, groups),
            is_producer=transfer.is_kv_producer,
            is_consumer=transfer.is_kv_consumer,
            takes_turns=has_turns and transfer.is_kv_producer,
            offers_turns=can_offer and transfer.is_kv_consumer,
            # With the policy `fail` a load that fails ends its request, and none may fail because of a prefix.
            pulls_prefixes=config.prefix_pulls == "auto"
            and transfer.kv_load_failure_policy == "recompute",
            media_scope=_media_scope(vllm_config, boot),
            adapters=Adapters.from_vllm_config(vllm_config),
            boot=boot,
        )
        if not local.engine_id or TEXT.fullmatch(local.announced_id) is None:
            # Other engines refuse every message and all params with such a name.
            raise InvalidConfig(
                "engine_id",
                local.engine_id,
                "1 to 470 characters, none of them a control character",
            )
        if local.is_read_from:
            check_announced(local.host)
        if config.prefix_sources and not local.asks_prefixes:
            logger.warning(
                "prefix_sources: no engine is asked for prefixes: %s",
                _why_none_is_asked(local, config),
            )
        return local

    def is_named_by(self, source: RemotePrefill | NamedPrefill) -> bool:
        """Whether params name this engine, in this life or an earlier one."""
        if source.boot in (self.boot, self.memory.boot):
            return True
        # Only the boot tells engines apart: ids are configured, and several engines may have the same one. In an
        # earlier life this engine had another boot, but the same id and address.
        is_here = source.remote_host == self.host and source.remote_port == self.port
        if not is_here or not self.is_read_from:
            return False
        # llm-d's sidecar names an address and no engine.
        return source.engine_id in (None, self.engine_id)

    @cached_property
    def announced_id(self) -> str:
        """As params and queries of this start name it, see `params.announced_id`."""
        return announced_id(self.boot, self.engine_id)

    @cached_property
    def is_read_from(self) -> bool:
        """Whether other engines read its blocks. Then it needs a side channel."""
        return self.is_producer or self.offers_turns

    @cached_property
    def reads(self) -> bool:
        """Whether it reads other engines' blocks."""
        return self.is_consumer or self.takes_turns

    @cached_property
    def asks_prefixes(self) -> bool:
        """Whether it asks other engines for the first parts of prompts; if so, it measures its steps and loads."""
        return self.pulls_prefixes and self.reads and not self.needs_whole_prompts

    @cached_property
    def is_all_or_nothing(self) -> bool:
        """Whether a part of a sequence's cache is useless: a window or a state belongs to the sequence's end."""
        return not all(group.holds_every_token for group in self.groups)

    @cached_property
    def needs_whole_prompts(self) -> bool:
        """Whether only the cache of a whole prompt can be used, and only for exactly this prompt: with a non-causal
        layer (prefix LM) every token's keys and values depend on all others."""
        return any(group.policy == "whole" for group in self.groups)

    @cached_property
    def has_states(self) -> bool:
        """Whether the model has recurrent states."""
        return any(group.policy == "state" for group in self.groups)

    def windows_reach(
        self,
        spans: Sequence[int],
        held_from: Sequence[int],
        num_tokens: int,
        prompt_tokens: int,
    ) -> bool:
        """Whether an engine of this model can continue a prompt; see `reaches_back`.

        Args:
            spans: per cache group the tokens of that engine's blocks.
            held_from: per cache group the first of `num_tokens` tokens that the producer holds.
        """
        # Not strict: params may list the blocks of fewer groups than this model has.
        held_by_group = zip(self.groups, spans, held_from, strict=False)
        for group, span, first_held in held_by_group:
            if not reaches_back(group, span, first_held, num_tokens, prompt_tokens):
                return False
        return True

    def without_scratch(
        self, block_ids: Sequence[Sequence[int]], num_tokens: int
    ) -> tuple[Sequence[int], ...]:
        """The blocks of a request per cache group; of a state, only those for the first `num_tokens` tokens, because
        vLLM's blocks after them are for the states of drafts."""
        kept = []
        for ids, group, span in zip(
            block_ids, self.groups, self.block_spans, strict=True
        ):
            if group.policy == "state":
                num_blocks = -(-num_tokens // span)
                ids = ids[:num_blocks]
            kept.append(ids)
        return tuple(kept)

    def prompt_of(self, request: Request, num_tokens: int) -> Prompt | None:
        """The tokens and everything else that determines the request's KV cache; None for a prompt of embeddings.

        The tokens are the request's own list, not a copy: they grow with it.

        Args:
            num_tokens: number of tokens that will be read.
        """
        prompt = request.prompt_token_ids
        if prompt is None or request.prompt_embeds is not None:
            return None
        # The prompt's list where it has as many tokens. To copy the beginning of all tokens would take a sixth of the
        # time of making digests.
        tokens = prompt if num_tokens <= len(prompt) else request.all_token_ids
        adapter: str | None = None
        if request.lora_request is not None:
            adapter = self.adapters.content_of(request.lora_request)
        weights = ""
        if self.weights.is_attached:
            weights = self.weights.version()
        media: list[Media] = []
        for feature in request.mm_features:
            position = feature.mm_position
            identifier = f"{self.media_scope}{feature.identifier}"
            media.append(Media(position.offset, position.length, identifier))
        return Prompt(
            tokens=tokens,
            lora=adapter,
            salt=request.cache_salt,
            media=tuple(media),
            weights=weights,
        )


def _why_none_is_asked(local: LocalEngine, config: FerryConfig) -> str:
    """Why an engine asks no other for prefixes, and what helps."""
    if config.prefix_pulls == "off":
        return "prefix_pulls is off"
    if not local.pulls_prefixes:
        return "with kv_load_failure_policy=fail a request would fail with its prefix; use recompute"
    if not local.reads:
        return (
            "a kv_producer reads from no engine; use kv_both, or bidirectional_kv_xfer"
        )
    return "this model's prompts are not causal, and are read whole or not at all"


def _can_offer_turns(groups: tuple[CacheGroup, ...], failure_policy: str) -> bool:
    """Whether this model's answers can be read for the next turn; logs why not."""
    if failure_policy != "recompute":
        logger.warning(
            "kv_load_failure_policy=%s: a request whose last turn's offer has expired will fail; use recompute",
            failure_policy,
        )
    if any(group.policy == "whole" for group in groups):
        logger.warning(
            "bidirectional_kv_xfer: answers are not offered, since this model's prompts are not causal"
        )
        return False
    if any(group.policy == "state" for group in groups):
        # A step in flight when a request stops has added one more token to the state, in place.
        logger.warning(
            "bidirectional_kv_xfer: answers are not offered, since this model keeps a recurrent state"
        )
        return False
    return True


def _media_scope(vllm_config: VllmConfig, boot: BootId) -> str:
    """A text that two engines share if vLLM's identifier of an image, audio or video means the same content on both."""
    multimodal = vllm_config.model_config.multimodal_config
    if multimodal is None:
        return ""
    # vLLM hashes contents if one of the two caches that need the hashes is on.
    if (
        multimodal.mm_processor_cache_gb > 0
        or vllm_config.cache_config.enable_prefix_caching
    ):
        return ""
    # Otherwise an identifier is the number of a request: equal on two engines for unequal images. With this boot as the
    # scope no other engine shares it.
    logger.warning(
        "prompts are computed here from their first image, audio or video on: vLLM hashes contents only with"
        " --enable-prefix-caching or with --mm-processor-cache-gb above 0"
    )
    return boot


def tokens_left_out(vllm_config: VllmConfig, groups: Iterable[CacheGroup]) -> int:
    """The number of a prompt's last tokens that a producer does not compute; the consumer does."""
    # The consumer computes the prompt's last token itself, for its logits. Keys and values of that token may be loaded
    # too. But a recurrent state must not include it, or the token would be applied twice.
    has_states = any(group.policy == "state" for group in groups)
    of_states = 1 if has_states else 0
    # Each module of a multi-token predictor looks one token further ahead. The entries that depend on tokens which are
    # not yet certain are left to the consumer too.
    of_predictors = int(vllm_config.num_prefill_lookahead_tokens) - 1
    return max(of_states, of_predictors)


def block_spans(kv_cache_config: KVCacheConfig, dcp: int) -> tuple[int, ...]:
    """Per transferred cache group, the tokens that a scheduler block covers.

    With `dcp` ranks, a block of `n` local slots covers `n · dcp` tokens of the groups that vLLM shards by tokens.
    """
    spans = []
    for group in kv_cache_config.transfer_groups:
        spec = group.kv_cache_spec
        ranks = dcp if spec.dcp_sharded else 1
        spans.append(spec.block_size * ranks)
    return tuple(spans)


def token_bytes(kv_cache_config: KVCacheConfig) -> float:
    """The bytes of one more token in a worker's cache, of all transferred groups. A window counts as if it grew."""
    total = 0.0
    for group in kv_cache_config.transfer_groups:
        spec = group.kv_cache_spec
        total += len(group.layer_names) * spec.page_size_bytes / spec.block_size
    return total


def row_blocks(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: FerryConfig
) -> tuple[int, ...]:
    """Per transferred cache group, the most blocks of one prompt that its row lists.

    Empty if no prompt can be read while it is computed.
    """
    if not can_stream(vllm_config, kv_cache_config, config):
        return ()
    groups = groups_of(kv_cache_config)
    spans = block_spans(kv_cache_config, topology_of(vllm_config).dcp)
    longest = vllm_config.model_config.max_model_len
    return tuple(
        _most_listed_blocks(group, span, longest)
        for group, span in zip(groups, spans, strict=True)
    )


def _most_listed_blocks(group: CacheGroup, span: int, longest: int) -> int:
    """The most blocks of one prompt that a row lists for a group: all, or those that overlap the window or chunk.

    Args:
        span: the tokens that a block covers.
        longest: the tokens of the longest prompt.
    """
    if group.policy == "state":
        return 1
    all_blocks = -(-longest // span)
    window_tokens = group.window_tokens or longest
    # A window begins and ends anywhere in a block.
    window_blocks = -(-window_tokens // span) + 2
    return min(all_blocks, window_blocks)
