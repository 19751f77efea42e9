"""vLLM's prefix cache: what of a sequence is in it, and references on its blocks.

A hit is what vLLM itself would find for a prompt with these block hashes: `find_longest_cache_hit` of its coordinator
(v1/core/kv_cache_coordinator.py), with its rules for windows, chunks, recurrent states and drafters. Of states, only
those at the end of a block are taken, see `_full_blocks_of_states`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

from kvferry.protocol.errors import LocalProtocolError, UnsupportedVllm
from kvferry.scheduler.producer.prefix_directory import CachedPrefix

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

logger = logging.getLogger(__name__)

_PAUSE_EVERY = 32
"""Look-ups between two pauses, some 20 µs."""


class PrefixCache:
    """The prefix cache of this process's engine: `PrefixLookup`.

    Attributes:
        hash_tokens, hit_tokens: see `PrefixLookup`; 0 until `bind`, and where prefixes are not cached.
    """

    def __init__(self) -> None:
        self.hash_tokens = 0
        self.hit_tokens = 0
        self._manager: KVCacheManager | None = None
        self._spans: tuple[int, ...] = ()
        self._state_tokens = 1
        self._dropped_tokens = 0

    def bind(self, manager: KVCacheManager) -> None:
        """Take vLLM's KV cache manager."""
        if not manager.enable_caching:
            return
        try:
            coordinator: Any = manager.coordinator
            self._spans = tuple(
                int(single.block_size) for single in coordinator.single_type_managers
            )
            self._state_tokens = _full_blocks_of_states(
                coordinator.single_type_managers
            )
            # Coordinators of one group have no such attribute: there hits end with a block.
            hit_tokens = getattr(
                coordinator, "_cache_hit_alignment_tokens", self._spans[0]
            )
            self._dropped_tokens = _dropped_for_drafts(coordinator)
            hash_tokens = int(coordinator.block_pool.hash_block_size)
            coordinator.find_longest_cache_hit([], 0)
        except Exception as error:  # noqa: BLE001 - vLLM's internals may differ
            logger.warning(
                "no other engine reads prefixes from here: kvferry does not know this vLLM's prefix cache (%r)",
                error,
            )
            return
        self._manager = manager
        self.hit_tokens = math.lcm(int(hit_tokens), self._state_tokens)
        self.hash_tokens = hash_tokens

    # On any thread.

    def find(
        self, hashes: Sequence[bytes], num_tokens: int, pause: Callable[[], None]
    ) -> CachedPrefix | None:
        """See `PrefixLookup`."""
        manager = self._manager
        longest = min(num_tokens + self._dropped_tokens, len(hashes) * self.hash_tokens)
        if manager is None or not longest:
            return None
        try:
            groups, length = self._hit(manager, _PausingHashes(hashes, pause), longest)
        except (RuntimeError, StopIteration):
            # A dict of several blocks with one hash has changed, or has lost its last one, while this thread took its
            # first (`BlockHashToBlockMap.get_one_block`).
            return None
        if not length:
            return None
        blocks: list[tuple[int, ...]] = []
        keys: dict[int, bytes] = {}
        for group, (found, span) in enumerate(zip(groups, self._spans, strict=True)):
            blocks.append(tuple(block.block_id for block in found))
            for position, block in enumerate(found):
                if position % _PAUSE_EVERY == 0:
                    pause()
                if block.is_null:
                    continue
                # Not the hash that the block has: it may be another's by now. The hash of a long block, or of a part of
                # one, is that of the tokens up to its end.
                end = min((position + 1) * span, length)
                key = hashes[end // self.hash_tokens - 1] + group.to_bytes(4, "big")
                own_key = block.block_hash
                # The block's own object where it is equal: the step thread compares it without reading it.
                keys[block.block_id] = own_key if own_key == key else key
        return CachedPrefix(length, tuple(blocks), tuple(keys), tuple(keys.values()))

    def _hit(
        self, manager: KVCacheManager, hashes: _PausingHashes, longest: int
    ) -> tuple[Sequence[Sequence[KVCacheBlock]], int]:
        """By cache group the blocks of the longest hit, and its length. Of states only those at the end of a block."""
        while True:
            groups, length, _ = manager.coordinator.find_longest_cache_hit(
                hashes, longest
            )
            longest = length - length % self._state_tokens
            if longest == length:
                return groups, length

    # On the engine's thread.

    def keep(self, block_ids: Sequence[int], hashes: Sequence[bytes]) -> bool:
        """Take a reference on each block, if each still has its hash. Takes none if not.

        Some 0.4 µs a block; the caller takes few at a time.
        """
        pool = self._bound.block_pool
        objects = list(map(pool.blocks.__getitem__, block_ids))
        for block, key in zip(objects, hashes, strict=True):
            if block.block_hash != key and not self._is_listed(key, block):
                return False
        pool.touch(objects)
        return True

    def _is_listed(self, key: bytes, block: KVCacheBlock) -> bool:
        """True if a block has this hash beside its first one: the end of a sequence within a longer block."""
        listed: Any = self._bound.block_pool.cached_block_hash_to_block
        return bool(listed.contain(key, block.block_id))

    @property
    def _bound(self) -> KVCacheManager:
        if self._manager is None:
            raise LocalProtocolError("vLLM has not bound its KV cache manager")
        return self._manager


def _dropped_for_drafts(coordinator: Any) -> int:
    """The number of tokens by which a hit is shorter than what was looked up for it, where drafts are made from the
    model's own activations (EAGLE, MTP).

    Of the last block that it finds, vLLM uses nothing: what the draft layers have of its last tokens depends on the
    tokens after it. So a hit of n tokens is found by a look-up of one block more. The coordinator of several groups
    looks that block up by itself; that of one group expects the caller to, with its whole prompt.
    """
    if hasattr(coordinator, "_cache_hit_alignment_tokens"):
        return 0
    (single,) = coordinator.single_type_managers
    if not single.use_eagle or hasattr(single, "mamba_cache_mode"):
        # Draft layers have no states: of these nothing is dropped.
        return 0
    return int(single.block_size)


def _full_blocks_of_states(managers: Sequence[Any]) -> int:
    """The number of tokens at whose multiples every group of recurrent states has a state at the end of a block; 1
    without such groups.

    In `align` mode, the only one of this vLLM with a prefix cache, each block that has a hash holds the state after its
    last token (`MambaManager`, v1/core/single_type_kv_cache_manager.py; v1/worker/mamba_utils.py):

        scheduled   the hash is given when the step is scheduled whose forward pass, or whose end where drafts were
                    accepted, writes the state; at the earliest then, since only known tokens are hashed
        later       the sequence goes on in another block, into which the state is copied first. Nothing writes this
                    one again, so its content is final when the device has passed the step of its hash, as for keys
                    and values

    A state *within* a block (`prefix_match_unit`) is another matter: the block is the one in which its request goes on.
    The next step that has the request moves the hash to a copy, and overwrites the block. Between the two steps the
    hash is right, for requests that vLLM schedules, and wrong for another engine, which reads whenever it likes. So
    such states are never given.

    Raises:
        UnsupportedVllm: states are cached in another mode.
    """
    tokens = 1
    for manager in managers:
        mode = getattr(manager, "mamba_cache_mode", None)
        if mode is None:
            continue
        if mode != "align":
            raise UnsupportedVllm("mamba_cache_mode", repr(mode), "align")
        tokens = math.lcm(tokens, int(manager.block_size))
    return tokens


class _PausingHashes(Sequence[bytes]):
    """Block hashes that pause now and then, as vLLM takes them in its look-up.

    That holds the interpreter's lock for a millisecond where a prompt has 2,000 blocks, and the engine's thread would
    wait for it.
    """

    def __init__(self, hashes: Sequence[bytes], pause: Callable[[], None]) -> None:
        self._hashes = hashes
        self._pause = pause
        self._taken = 0

    def __len__(self) -> int:
        return len(self._hashes)

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        self._taken += 1
        if self._taken % _PAUSE_EVERY == 0:
            self._pause()
        return self._hashes[index]

    def __iter__(self) -> Iterator[bytes]:
        for index in range(len(self._hashes)):
            yield self[index]
