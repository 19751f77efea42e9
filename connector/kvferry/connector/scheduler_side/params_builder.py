"""The prompts of requests, and the params by which another engine reads the blocks of one that has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.connector.engine.local_engine import LocalEngine
from kvferry.connector.vllm.requests import cut_prompt, has_ended_well
from kvferry.plan.blocks import NULL_BLOCK
from kvferry.plan.tokens import first_needed, held_from
from kvferry.protocol.digests import Media, Prompt, digest_chain
from kvferry.protocol.params import PARAMS_VERSION, Blocks, RemotePrefill, Ticket
from kvferry.protocol.params_mac import sign_early, sign_params
from kvferry.protocol.prompt_queries import announced_id
from kvferry.scheduler.producer.lease import LeaseUse, ProducerLease
from kvferry.scheduler.producer.prefix_directory import CachedPrefix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_NO_MAC = "0" * 64

OPENS_WITHIN_S = 10.0
"""The workers get the orders of a step when the one before it has run, if steps overlap; a ticket is given earlier."""


def leave_out(request: Request, num_tokens: int) -> bool:
    """Remove the last tokens of a prompt that will be decoded elsewhere, and limit its answer to one token.

    Must be called before the request is scheduled.

    Returns:
        Whether its cache will be usable. If not, the request is unchanged and is served without a transfer: it is too
        short, requests log-probabilities of its prompt or at least two tokens, or ends within an image.
    """
    if not num_tokens:
        return True
    params = request.sampling_params
    num_left = request.num_prompt_tokens - num_tokens
    if num_left <= 0 or request.prompt_token_ids is None:
        return False
    if params is None or params.min_tokens > 1:
        return False
    if request.get_skip_reading_prefix_cache():
        return False
    for feature in request.mm_features:
        if feature.mm_position.offset + feature.mm_position.length > num_left:
            return False
    cut_prompt(request, num_left)
    request.max_tokens = 1
    return True


def has_tokens(request: Request) -> bool:
    """True if the prompt consists of tokens, not of embeddings."""
    return request.prompt_token_ids is not None and request.prompt_embeds is None


def prompt_of(request: Request, num_tokens: int, local: LocalEngine) -> Prompt | None:
    """The tokens and everything else that determines the request's KV cache; None for a prompt of embeddings.

    The tokens are the request's own list, not a copy: they grow with it.

    Args:
        num_tokens: number of tokens that will be read.
        local: this engine, which knows its adapters and its weights.
    """
    prompt = request.prompt_token_ids
    if prompt is None or not has_tokens(request):
        return None
    # The prompt's list where it has as many tokens. To copy the beginning of all tokens would take a sixth of the time
    # of making digests.
    tokens = prompt if num_tokens <= len(prompt) else request.all_token_ids
    return Prompt(
        tokens=tokens,
        lora=local.adapters.content_of(request.lora_request),
        salt=request.cache_salt,
        media=_media_of(request, local.media_scope),
        weights=local.weights.version(),
    )


def _media_of(request: Request, scope: str) -> tuple[Media, ...]:
    if not request.mm_features:
        return ()
    return tuple(
        Media(
            feature.mm_position.offset,
            feature.mm_position.length,
            f"{scope}{feature.identifier}",
        )
        for feature in request.mm_features
    )


class ParamsBuilder:
    """Builds the params of one engine's requests.

    Args:
        lease_s: lifetime of a held lease without a renewal.
        copies_blocks: whether workers copy blocks before they are read, and so must know them.
    """

    def __init__(
        self,
        local: LocalEngine,
        kv_cache_config: KVCacheConfig,
        lease_s: float,
        *,
        copies_blocks: bool = False,
    ) -> None:
        self._local = local
        self._lease_s = lease_s
        self._copies_blocks = copies_blocks
        self._kv_cache_config = kv_cache_config

    def worker_blocks(self, params: RemotePrefill) -> Blocks:
        """The blocks in the order to the workers to hold a lease: those of its params, where workers copy them."""
        return params.remote_block_ids if self._copies_blocks else ()

    def load_blocks(
        self, block_ids: tuple[list[int], ...], shared_tokens: int
    ) -> tuple[Sequence[int], ...]:
        """The blocks into which the first `shared_tokens` tokens of a request are loaded, per transferred group."""
        return self._local.without_scratch(
            self._kv_cache_config.select_transfer_block_ids(block_ids), shared_tokens
        )

    def num_complete_tokens(self, request: Request, use: LeaseUse) -> int:
        """The tokens of an ended request whose cache is complete; 0 if it failed.

        The token that was sampled last has no cache, and tokens of a step in flight may have none.
        """
        if not has_ended_well(request):
            return 0
        num_computed: int = request.num_computed_tokens - request.num_in_flight_tokens
        num_complete = min(num_computed, len(request.all_token_ids) - 1)
        if use is LeaseUse.TURN:
            # An answer's last tokens were computed from drafts by the modules of a multi-token predictor. A prompt's
            # were left out at its intake.
            num_complete -= self._local.left_out
        return max(0, num_complete)

    def build(
        self,
        request: Request,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int,
        lease: ProducerLease,
        digests: tuple[str, ...] = (),
    ) -> RemotePrefill | None:
        """The signed params of a request's first `num_tokens` tokens; None if it has no blocks for them.

        Args:
            digests: of these tokens, if they are known.
        """
        if not num_tokens:
            return None
        prompt = prompt_of(request, num_tokens, self._local)
        blocks = self._transferable(block_ids, num_tokens)
        if prompt is None or not any(blocks):
            return None
        digests = digests or digest_chain(prompt, num_tokens)
        ticket = self._ticket_of(blocks, num_tokens, lease, digests)
        return self._signed(request.request_id, blocks, num_tokens, ticket)

    def build_prefix(
        self, cached: CachedPrefix, digests: tuple[str, ...], lease: ProducerLease
    ) -> RemotePrefill:
        """The signed params of a prefix in this engine's cache. May be called on any thread.

        Args:
            digests: of its tokens.
        """
        blocks = self._transferable(cached.blocks, cached.num_tokens)
        ticket = self._ticket_of(blocks, cached.num_tokens, lease, digests)
        params = self._signed(lease.request_id, blocks, cached.num_tokens, ticket)
        return sign_early(params, self._local.memory.mac_key, OPENS_WITHIN_S)

    def worker_prefix_blocks(self, cached: CachedPrefix) -> Blocks:
        """As `worker_blocks`, of a prefix in this engine's cache."""
        if not self._copies_blocks:
            return ()
        return self._transferable(cached.blocks, cached.num_tokens)

    def _ticket_of(
        self,
        blocks: Blocks,
        num_tokens: int,
        lease: ProducerLease,
        digests: tuple[str, ...],
    ) -> Ticket:
        groups = zip(self._local.block_spans, blocks, strict=True)
        return Ticket(
            version=PARAMS_VERSION,
            boot=self._local.memory.boot,
            lease_slot=lease.slot,
            lease_epoch=lease.name.epoch,
            lease_s=self._lease_s,
            digests=digests,
            mac=_NO_MAC,
            held_from=tuple(
                held_from(span, len(ids), num_tokens) for span, ids in groups
            ),
        )

    def build_stream(
        self,
        request: Request,
        lease: ProducerLease,
        row: int,
        digests: tuple[str, ...],
    ) -> RemotePrefill:
        """The signed params of a prompt that is being computed, whose blocks the workers list in a row.

        Args:
            digests: of the whole prompt.
        """
        ticket = Ticket(
            version=PARAMS_VERSION,
            boot=self._local.memory.boot,
            lease_slot=lease.slot,
            lease_epoch=lease.origin.epoch,
            lease_s=self._lease_s,
            digests=digests,
            mac=_NO_MAC,
            held_from=self._held_at_the_end(request.num_prompt_tokens),
            stream_row=row,
        )
        # The workers list the blocks in the row, where the consumer reads them.
        no_blocks = ((),) * len(self._local.groups)
        return self._signed(
            request.request_id, no_blocks, request.num_prompt_tokens, ticket
        )

    def windows_reach(
        self, num_tokens: int, prompt_tokens: int, spans: tuple[int, ...]
    ) -> bool:
        """True if an engine with blocks of these spans can surely go on from a prefill of a prompt.

        Args:
            num_tokens: of the prompt, without those that are left out here.
            prompt_tokens: with them.
        """
        # When the first `num_tokens` are complete, more may be held than this.
        first_held = self._held_at_the_end(num_tokens)
        if len(spans) != len(first_held):
            return False
        return self._local.windows_reach(spans, first_held, num_tokens, prompt_tokens)

    def blocks_of(
        self, block_ids: Sequence[Sequence[int]], num_tokens: int
    ) -> tuple[Sequence[int], ...]:
        """The blocks of the first `num_tokens` tokens of a request, per transferred group."""
        # vLLM may have one more block, for the token of a step that was in flight when the request stopped.
        transferred = self._kv_cache_config.select_transfer_block_ids(block_ids)
        groups = zip(transferred, self._local.block_spans, strict=True)
        return tuple(ids[: -(-num_tokens // span)] for ids, span in groups)

    def listed_blocks(
        self, block_ids: Sequence[Sequence[int]], num_tokens: int, *, is_last: bool
    ) -> tuple[Sequence[int], ...]:
        """The blocks of the first `num_tokens` tokens of a request that a row lists, per transferred group.

        Args:
            is_last: whether the prompt is complete.
        """
        listed: list[Sequence[int]] = []
        groups = zip(
            self._local.groups,
            self._local.block_spans,
            self._held_at_the_end(num_tokens),
            self.blocks_of(block_ids, num_tokens),
            strict=True,
        )
        for group, span, first_held, ids in groups:
            if group.holds_every_token:
                listed.append(ids)
            elif not is_last:
                # Which blocks these are changes until the prompt is complete.
                listed.append([])
            elif group.policy == "state":
                listed.append([_last_not_null(ids)])
            else:
                listed.append(ids[first_held // span :])
        return tuple(listed)

    def _held_at_the_end(self, num_tokens: int) -> tuple[int, ...]:
        """Per transferred group the first token that is surely held when a prompt is complete."""
        # Before the last part vLLM frees what no token of that part needs, and it has one token at least. Where there
        # are states, the blocks are held when the request has ended: by then vLLM has freed what the next token does
        # not need.
        next_token = num_tokens if self._local.has_states else num_tokens - 1
        first_held: list[int] = []
        for group, span in zip(
            self._local.groups, self._local.block_spans, strict=True
        ):
            if group.policy == "state":
                first = num_tokens - 1
            else:
                first = first_needed(group, next_token)
            first_held.append(first // span * span)
        return tuple(first_held)

    def _signed(
        self, request_id: str, blocks: Blocks, num_tokens: int, ticket: Ticket
    ) -> RemotePrefill:
        unsigned = RemotePrefill(
            remote_engine_id=announced_id(self._local.boot, self._local.engine_id),
            remote_request_id=request_id,
            remote_block_ids=blocks,
            remote_host=self._local.host,
            remote_port=self._local.port,
            tp_size=self._local.topology.tp,
            pp_size=self._local.topology.pp,
            dcp_size=self._local.topology.dcp,
            remote_num_tokens=num_tokens,
            kvferry=ticket,
        )
        return sign_params(unsigned, self._local.memory.mac_key)

    def _transferable(
        self, block_ids: Sequence[Sequence[int]], num_tokens: int
    ) -> Blocks:
        """The blocks of the first `num_tokens` tokens, without the null blocks of those that left their window."""
        return tuple(
            _without_leading_nulls(ids) for ids in self.blocks_of(block_ids, num_tokens)
        )


def _without_leading_nulls(ids: Sequence[int]) -> tuple[int, ...]:
    for index, block in enumerate(ids):
        if block != NULL_BLOCK:
            return tuple(ids[index:])
    return ()


def _last_not_null(ids: Sequence[int]) -> int:
    for block in reversed(ids):
        if block != NULL_BLOCK:
            return block
    return NULL_BLOCK
