"""The port to the engine's block pool. A block without references is free for requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class BlockPool(Protocol):
    """By block id."""

    def keep(self, blocks: Sequence[int]) -> None:
        """Add a reference on each block."""

    def give_back(self, blocks: Sequence[int]) -> None:
        """Remove a reference from each block of a sequence; its end is reused before its beginning."""

    def reference_count(self, block: int) -> int:
        """The number of references on a block, of leases, of quarantined loads and of running requests."""

    def loaded_into(self, request_id: str) -> tuple[int, ...]:
        """The blocks that a load of this request writes, each once."""
