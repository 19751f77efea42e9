"""A child of a MultiConnector that holds the blocks of every request at its end, as one does that still saves them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)


@dataclass
class Saved(KVConnectorMetadata):  # type: ignore[misc]
    """Requests whose blocks are saved."""

    request_ids: frozenset[str] = frozenset()


class HoldingChild(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """It saves nothing, and its workers report the requests in `saved`, once each."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.held: set[str] = set()
        self.saved: set[str] = set()

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        """Nothing to load."""

    def build_connector_meta(self, scheduler_output: Any) -> Saved:
        saved = self.held & self.saved
        self.held -= saved
        return Saved(frozenset(saved))

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, None]:
        self.held.add(request.request_id)
        return True, None

    def get_transfer_results(
        self, finished_req_ids: set[str]
    ) -> KVConnectorTransferResults:
        metadata = self._get_connector_metadata()
        return KVConnectorTransferResults(finished_sending=set(metadata.request_ids))

    def register_kv_caches(self, kv_caches: Any) -> None:
        """Nothing to save from."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing to load."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to load."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing to save."""

    def wait_for_save(self) -> None:
        """Nothing to save."""
