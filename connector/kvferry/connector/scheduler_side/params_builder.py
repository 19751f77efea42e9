"""Builds the params by which another engine reads the blocks of a request that has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from kvferry.connector.engine.local_engine import LocalEngine
from kvferry.connector.engine.prompt import prompt_of
from kvferry.plan.tokens import held_from
from kvferry.protocol.digests import digest_chain
from kvferry.protocol.params import PARAMS_VERSION, Blocks, RemotePrefill, Ticket
from kvferry.protocol.params_mac import ParamsSigner
from kvferry.scheduler.producer.lease import Lease, LeaseUse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_NO_MAC = "0" * 64
_ENDED_WELL = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class ParamsBuilder:
    """Builds the params of one engine's requests.

    Args:
        copies_blocks: whether workers copy blocks before they are read, and so must know them.
    """

    def __init__(self, local: LocalEngine, kv_cache_config: KVCacheConfig, *, copies_blocks: bool = False) -> None:
        self._local = local
        self._copies_blocks = copies_blocks
        self._kv_cache_config = kv_cache_config
        self._signer = ParamsSigner(local.mac_key)

    def worker_blocks(self, params: RemotePrefill) -> Blocks:
        """The blocks in the order to the workers to hold a lease: those of its params, where workers copy them."""
        return params.remote_block_ids if self._copies_blocks else ()

    def load_blocks(self, block_ids: tuple[list[int], ...], shared_tokens: int) -> tuple[Sequence[int], ...]:
        """The blocks into which the first `shared_tokens` tokens of a request are loaded, per transferred group."""
        return self._local.without_scratch(self._kv_cache_config.select_transfer_block_ids(block_ids), shared_tokens)

    def build(
        self, request: Request, block_ids: tuple[list[int], ...], lease: Lease, lease_s: float
    ) -> RemotePrefill | None:
        """The signed params of an ended request; None if it failed or has no tokens whose cache is complete.

        The token that was sampled last has no cache, and tokens of a step in flight may have none. An answer's last
        tokens were computed from drafts by the modules of a multi-token predictor, so they are left out.
        """
        if request.status not in _ENDED_WELL:
            return None
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        left_out = self._local.left_out if lease.use is LeaseUse.TURN else 0  # a prompt's were left out at its intake
        num_tokens = max(0, min(computed, len(request.all_token_ids) - 1) - left_out)
        prompt = prompt_of(request, num_tokens)
        blocks = self._transferable(block_ids, num_tokens)
        if prompt is None or not any(blocks):
            return None
        ticket = Ticket(
            version=PARAMS_VERSION,
            boot=self._local.boot,
            lease_slot=lease.slot,
            lease_epoch=lease.name.epoch,
            lease_s=lease_s,
            digests=digest_chain(prompt, num_tokens),
            mac=_NO_MAC,
            held_from=tuple(
                held_from(span, len(ids), num_tokens) for span, ids in zip(self._local.block_spans, blocks, strict=True)
            ),
        )
        unsigned = RemotePrefill(
            remote_engine_id=self._local.engine_id,
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
        return self._signer.sign(unsigned)

    def _transferable(self, block_ids: tuple[list[int], ...], num_tokens: int) -> Blocks:
        """The blocks of the first `num_tokens` tokens, without the null blocks of those that left their window.

        vLLM may have one more block, for the token of a step that was in flight when the request stopped.
        """
        chosen = self._kv_cache_config.select_transfer_block_ids(block_ids)
        clipped = [ids[: -(-num_tokens // span)] for ids, span in zip(chosen, self._local.block_spans, strict=True)]
        return tuple(tuple(ids[_leading_nulls(ids) :]) for ids in clipped)


def _leading_nulls(ids: list[int]) -> int:
    return next((index for index, block in enumerate(ids) if block), len(ids))
