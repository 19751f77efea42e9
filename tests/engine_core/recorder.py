"""A connector with scripted answers that records vLLM's calls: one line per call, in order.

It stands for the contract that kvferry's connector is written against. When a new vLLM calls in another way, the tests
over it fail first, and say how.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

Matched = tuple[int | None, bool]


class NoMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Nothing for the workers."""


class RecordingConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Scheduler side only. `match` answers `get_num_new_matched_tokens`; `hold` is what a finished request answers."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.calls: list[str] = []
        self.match: Callable[[Any, int], Matched] = lambda request, local: (0, False)
        self.hold = False

    def on_new_request(self, request: Any) -> None:
        self.calls.append(
            f"new {request.request_id} params={request.kv_transfer_params!r}"
        )

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> Matched:
        self.calls.append(f"match {request.request_id} local={num_computed_tokens}")
        return self.match(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        count = len(blocks.get_block_ids()[0])
        self.calls.append(
            f"alloc {request.request_id} external={num_external_tokens} blocks={count}"
        )

    def build_connector_meta(self, scheduler_output: Any) -> NoMetadata:
        self.calls.append("meta")
        return NoMetadata()

    def update_connector_output(self, connector_output: Any) -> None:
        self.calls.append("output")

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        self.calls.append(
            f"finished {request.request_id} {request.status} blocks={len(block_ids[0])}"
        )
        return self.hold, {"do_remote_prefill": True} if self.hold else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_layer_load(self, layer_name: str) -> None:
        raise NotImplementedError

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        raise NotImplementedError

    def wait_for_save(self) -> None:
        raise NotImplementedError

    def take(self) -> list[str]:
        """The calls since the last `take`, without the empty one of each step."""
        taken, self.calls = [call for call in self.calls if call != "meta"], []
        return taken
