"""The prompts of requests, and the params by which another engine reads the blocks of one that has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.connector.engine.local_engine import LocalEngine
from kvferry.connector.vllm.requests import cut_prompt, has_ended_well
from kvferry.plan.blocks import NULL_BLOCK
from kvferry.plan.tokens import first_needed, held_from
from kvferry.protocol.digests import Media, Prompt, digest_chain
from kvferry.protocol.params import PARAMS_VERSION, Blocks, RemotePrefill, Ticket
from kvferry.protocol.params_mac import sign_params
from kvferry.protocol.prompt_queries import announced_id
from kvferry.scheduler.producer.lease import LeaseUse, ProducerLease

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_NO_MAC = "0" * 64


def leave_out(request: Request, num_tokens: int) -> bool:
    """Remove the last tokens of a prompt that will be decoded elsewhere, and limit its answer to one token.

    Must be called before the request is scheduled.

    Returns:
        Whether its cache will be usable. If not, the request is unchanged and is served without a transfer: it is too
        short, requests log-probabilities of its prompt or at least two tokens, or ends within an image.
    """
    if not num_tokens:
        return True
    rest, params = request.num_prompt_tokens - num_tokens, request.sampling_params
    if rest <= 0 or request.prompt_token_ids is None or params is None or params.min_tokens > 1:
        return False
    if request.get_skip_reading_prefix_cache():
        return False
    if any(
        feature.mm_position.offset + feature.mm_position.length > rest
        for feature in request.mm_features
    ):
        return False
    cut_prompt(request, rest)
    request.max_tokens = 1
    return True


def has_tokens(request: Request) -> bool:
    """Whether the prompt consists of tokens, not of embeddings."""
    return request.prompt_token_ids is not None and request.prompt_embeds is None


def prompt_of(request: Request, num_tokens: int, local: LocalEngine) -> Prompt | None:
    """The tokens and everything else that determines the request's KV cache; None for a prompt of embeddings.

    The tokens are the request's own list, not a copy: they grow with it.

    Args:
        num_tokens: number of tokens that will be read. If the prompt has as many, its list is used: copying the
            beginning of all tokens would take a sixth of the time of making digests.
        local: this engine, which knows its adapters and its weights.
    """
    prompt = request.prompt_token_ids
    if prompt is None or not has_tokens(request):
        return None
    return Prompt(
        tokens=prompt if num_tokens <= len(prompt) else request.all_token_ids,
        lora=local.adapters.content_of(request.lora_request),
        salt=request.cache_salt,
        media=_media_of(request, local.media_scope) if request.mm_features else (),
        weights=local.weights.version(),
    )


def _media_of(request: Request, scope: str) -> tuple[Media, ...]:
    return tuple(
        Media(
            feature.mm_position.offset, feature.mm_position.length, f"{scope}{feature.identifier}"
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

        The token that was sampled last has no cache, and tokens of a step in flight may have none. An answer's last
        tokens were computed from drafts by the modules of a multi-token predictor, so they are left out.
        """
        if not has_ended_well(request):
            return 0
        computed: int = request.num_computed_tokens - request.num_in_flight_tokens
        left_out = (
            self._local.left_out if use is LeaseUse.TURN else 0
        )  # a prompt's were left out at its intake
        return max(0, min(computed, len(request.all_token_ids) - 1) - left_out)

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
        prompt = prompt_of(request, num_tokens, self._local) if num_tokens else None
        blocks = self._transferable(block_ids, num_tokens)
        if prompt is None or not any(blocks):
            return None
        sides = zip(self._local.block_spans, blocks, strict=True)
        ticket = Ticket(
            version=PARAMS_VERSION,
            boot=self._local.boot,
            lease_slot=lease.slot,
            lease_epoch=lease.name.epoch,
            lease_s=self._lease_s,
            digests=digests or digest_chain(prompt, num_tokens),
            mac=_NO_MAC,
            held_from=tuple(held_from(span, len(ids), num_tokens) for span, ids in sides),
        )
        return self._signed(request, blocks, num_tokens, ticket)

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
            boot=self._local.boot,
            lease_slot=lease.slot,
            lease_epoch=lease.origin.epoch,
            lease_s=self._lease_s,
            digests=digests,
            mac=_NO_MAC,
            held_from=self._held_at_the_end(request.num_prompt_tokens),
            stream_row=row,
        )
        return self._signed(
            request, ((),) * len(self._local.groups), request.num_prompt_tokens, ticket
        )

    def windows_reach(self, num_tokens: int, prompt_tokens: int, spans: tuple[int, ...]) -> bool:
        """Whether an engine with blocks of these spans can surely go on from what is held when the first `num_tokens`
        tokens of a prompt are complete. More may be held then."""
        firsts = self._held_at_the_end(num_tokens)
        return len(spans) == len(firsts) and self._local.windows_reach(
            spans, firsts, num_tokens, prompt_tokens
        )

    def blocks_of(
        self, block_ids: Sequence[Sequence[int]], num_tokens: int
    ) -> tuple[Sequence[int], ...]:
        """The blocks of the first `num_tokens` tokens of a request, per transferred group."""
        chosen = self._kv_cache_config.select_transfer_block_ids(block_ids)
        return tuple(
            ids[: -(-num_tokens // span)]
            for ids, span in zip(chosen, self._local.block_spans, strict=True)
        )

    def listed_blocks(
        self, block_ids: Sequence[Sequence[int]], num_tokens: int, *, is_last: bool
    ) -> tuple[Sequence[int], ...]:
        """The blocks of the first `num_tokens` tokens of a request that a row lists, per transferred group: of windows,
        chunks and states none before the prompt is complete, and then those from `held_from` on.

        Args:
            is_last: whether the prompt is complete.
        """
        found: list[Sequence[int]] = []
        groups, firsts = self._local.groups, self._held_at_the_end(num_tokens)
        sides = zip(
            groups,
            self._local.block_spans,
            firsts,
            self.blocks_of(block_ids, num_tokens),
            strict=True,
        )
        for group, span, first, ids in sides:
            if group.holds_every_token:
                found.append(ids)
            elif not is_last:
                found.append([])
            elif group.policy == "state":
                found.append([next(filter(None, reversed(ids)), NULL_BLOCK)])
            else:
                found.append(ids[first // span :])
        return tuple(found)

    def _held_at_the_end(self, num_tokens: int) -> tuple[int, ...]:
        """Per transferred group the first token that is surely held when a prompt is complete.

        Before the last part vLLM frees what no token of that part needs, and it has one token at least. Where there are
        states, the blocks are held when the request has ended: by then vLLM has freed what the next token does not
        need.
        """
        groups, spans = self._local.groups, self._local.block_spans
        next_token = num_tokens if self._local.has_states else num_tokens - 1
        return tuple(
            (num_tokens - 1 if group.policy == "state" else first_needed(group, next_token))
            // span
            * span
            for group, span in zip(groups, spans, strict=True)
        )

    def _signed(
        self, request: Request, blocks: Blocks, num_tokens: int, ticket: Ticket
    ) -> RemotePrefill:
        unsigned = RemotePrefill(
            remote_engine_id=announced_id(self._local.boot, self._local.engine_id),
            remote_request_id=request.request_id,
            remote_block_ids=blocks,
            remote_host=self._local.host,
            remote_port=self._local.port,
            tp_size=self._local.topology.tp,
            pp_size=self._local.topology.pp,
            dcp_size=self._local.topology.dcp,
            remote_num_tokens=num_tokens,
            kvferry=ticket,
        )
        return sign_params(unsigned, self._local.mac_key)

    def _transferable(self, block_ids: Sequence[Sequence[int]], num_tokens: int) -> Blocks:
        """The blocks of the first `num_tokens` tokens, without the null blocks of those that left their window.

        vLLM may have one more block, for the token of a step that was in flight when the request stopped.
        """
        return tuple(
            tuple(ids[_leading_nulls(ids) :]) for ids in self.blocks_of(block_ids, num_tokens)
        )


def _leading_nulls(ids: Sequence[int]) -> int:
    return next((index for index, block in enumerate(ids) if block), len(ids))
