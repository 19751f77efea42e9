"""kvferry's connector with a fault on purpose, for one check: the producer's cache is overwritten before it is read.

If the decoder answers as if nothing had happened, it did not use what was transferred.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvferry.connector import FerryConnector
from kvferry.connector.messages import FerryMetadata
from kvferry.protocol.orders import decode_head

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


class NixlConnector(FerryConnector):
    """Overwrites all registered caches when a step has run that computes what decoders read, before they may read it:
    the last step of a prompt, and each one of a prompt that is read meanwhile."""

    _caches: tuple[torch.Tensor, ...] = ()
    _marks = False

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self._caches = tuple(kv_caches.values())

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        head = isinstance(connector_metadata, FerryMetadata) and connector_metadata.head
        self._marks = bool(head and decode_head(head).marks)
        super().bind_connector_metadata(connector_metadata)

    def wait_for_save(self) -> None:
        if self._marks:
            for index, cache in enumerate(self._caches):
                # Numbers of a usual size: the model goes on and says something else.
                generator = torch.Generator().manual_seed(index)
                cache.copy_(torch.randn(cache.shape[1:], generator=generator).to(cache))
        super().wait_for_save()
