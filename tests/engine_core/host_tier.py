"""A connector that offloads, used beside kvferry under a MultiConnector; vLLM's own needs a GPU.

Of a request that has ended it copies the full blocks to host memory, later than that, and vLLM holds them until then.
Of one that arrives it loads the blocks whose tokens it knows, and says so steps later. Stores are kept by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)

from tests.harness.core.configs import BLOCK_TOKENS

Prefix = tuple[int, ...]


@dataclass
class Store:
    """The offloaded blocks, by the tokens up to a block's end.

    Attributes:
        may_save: whether saves go on; a slow disk where it is False.
        loaded: requests that were loaded from here.
    """

    blocks: dict[Prefix, list[torch.Tensor]] = field(default_factory=dict)
    may_save: bool = True
    loaded: list[str] = field(default_factory=list)


STORES: dict[str, Store] = {}


@dataclass
class Moves(KVConnectorMetadata):  # type: ignore[misc]
    """By request, tokens and the blocks that hold them."""

    loads: dict[str, tuple[Prefix, list[int]]] = field(default_factory=dict)
    saves: dict[str, tuple[Prefix, list[int]]] = field(default_factory=dict)


class HostTier(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Both halves."""

    requires_kv_delivery = False

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._store = STORES[vllm_config.kv_transfer_config.kv_connector_extra_config["store"]]
        self._next = Moves()
        self._saving: dict[str, tuple[Prefix, list[int]]] = {}
        self._loading: dict[str, tuple[Prefix, list[int]]] = {}
        self._caches: Mapping[str, torch.Tensor] = {}

    # The scheduler.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        known, prompt = 0, tuple(request.prompt_token_ids)
        while known + BLOCK_TOKENS < len(prompt) and prompt[: known + BLOCK_TOKENS] in self._store.blocks:
            known += BLOCK_TOKENS
        more = max(0, known - num_computed_tokens)
        return more, more > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            ids = blocks.get_block_ids()[0]
            self._next.loads[request.request_id] = (tuple(request.prompt_token_ids), list(ids))

    def build_connector_meta(self, scheduler_output: Any) -> Moves:
        moves, self._next = self._next, Moves()
        return moves

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        full = request.num_computed_tokens // BLOCK_TOKENS
        if not full:
            return False, None
        self._next.saves[request.request_id] = (tuple(request.all_token_ids), list(block_ids[:full]))
        return True, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    # The worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """New blocks wait for one more step."""

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        for name, (tokens, ids) in self._loading.items():
            for tensors, block in zip(self._known(tokens), ids, strict=False):
                for cache, saved in zip(self._caches.values(), tensors, strict=True):
                    cache[block].copy_(saved)
            self._store.loaded.append(name)
            results.finished_recving.add(name)
        if self._store.may_save:
            for name, (tokens, ids) in self._saving.items():
                for index, block in enumerate(ids, 1):
                    copied = [cache[block].clone() for cache in self._caches.values()]
                    self._store.blocks.setdefault(tokens[: index * BLOCK_TOKENS], copied)
                results.finished_sending.add(name)
            self._saving.clear()
        reported = self._get_connector_metadata()
        self._loading = dict(reported.loads)
        self._saving.update(reported.saves)
        return results

    def _known(self, tokens: Sequence[int]) -> list[list[torch.Tensor]]:
        ends = range(BLOCK_TOKENS, len(tokens), BLOCK_TOKENS)
        known = [self._store.blocks.get(tuple(tokens[:end])) for end in ends]
        return [tensors for tensors in known if tensors is not None]
