"""The staging pool: which load may read into which part of one registered buffer, and which loads wait.

Pure bookkeeping over the offsets `[0, capacity)`. A *wave* is a contiguous range that one load reads into and relays
out from. The rules:

1. A wave is at most an eighth of the pool. No wave leaves less free than its peer then holds, quarantined waves
   included. So one peer holds at most half, a second one beside it a quarter, and so on.
2. A load may always hold one wave. It gets a second one, to read into while the first is put in place, only while no
   other load waits for its first. It never gets a third.
3. Loads that wait for their first wave are served in the order in which they began to wait. A load that waits only for
   waves of its own peer, since that has its share, blocks no loads but those of its own peer.
4. No load waits for quarantined bytes: where they are in the way, a wave is cut to what would fit if everything else
   came back. Where not even `at_least` would fit, the load `lacks_room`: it waits without blocking others, and its
   owner should not wait for long.

Why no load waits for ever: a load that holds a wave must be able to give it back without being granted another. Then
the first in the queue is always served. Nothing is granted past it but waves of other peers, and those only while its
own peer has waves that come back. So in the end everything that is out comes back, and by rule 4 it then fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvferry.protocol.errors import InvalidConfig, LocalProtocolError

WAVES_PER_POOL = 8
"""A wave is at most one of this many parts of the pool."""

WAVES_PER_LOAD = 2
"""One is read into while the other is put in place."""


class PoolTooSmall(InvalidConfig):
    """The pool cannot hold what has to be read in one wave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """The bytes `[start, stop)` of the pool, while `load` has them.

    Attributes:
        load: the load that reads into them.
        peer: the peer that it reads from.
    """

    start: int
    stop: int
    load: str
    peer: str

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """The pool at one moment.

    Attributes:
        capacity, used_bytes, alignment: of the pool.
        largest_wave, peer_limit: bytes that one wave, and all of one peer, may have.
        waves: that are out, by start.
        quarantined: starts of those that failed reads may still write into.
        waiting: loads that wait for their first wave, the one that waits longest first.
    """

    capacity: int
    used_bytes: int
    alignment: int
    largest_wave: int
    peer_limit: int
    waves: tuple[Wave, ...]
    quarantined: frozenset[int]
    waiting: tuple[str, ...]

    @property
    def free_bytes(self) -> int:
        return self.capacity - self.used_bytes

    @property
    def quarantined_bytes(self) -> int:
        return sum(
            wave.num_bytes for wave in self.waves if wave.start in self.quarantined
        )


@dataclass(frozen=True, slots=True)
class _Wish:
    """What a load asks for, in aligned bytes."""

    peer: str
    wanted: int
    at_least: int


class StagingPool:
    """Gives out waves.

    Args:
        capacity: bytes of the buffer.
        alignment: of a wave's start and size; a power of two.

    Attributes:
        used_bytes: bytes that are out, quarantined ones included.
        given_back: how often a wave was given back.

    Raises:
        PoolTooSmall: an eighth of the capacity is less than `alignment`.
    """

    def __init__(self, capacity: int, *, alignment: int = 256) -> None:
        self.capacity = capacity
        self.alignment = alignment
        if self.largest_wave == 0:
            raise PoolTooSmall(
                "staging_pool_bytes", capacity, f"at least {WAVES_PER_POOL * alignment}"
            )
        self.used_bytes = 0
        self.given_back = 0
        # The waves that are out, by start.
        self._out: dict[int, Wave] = {}
        # The starts of those that are quarantined.
        self._quarantined: set[int] = set()
        # By load, the one that waits longest first.
        self._waiting: dict[str, _Wish] = {}

    @property
    def largest_wave(self) -> int:
        """Bytes of the largest wave that is ever given out."""
        return self._aligned_down(self.capacity // WAVES_PER_POOL)

    @property
    def peer_limit(self) -> int:
        """The most bytes that one peer holds, when no other one holds any."""
        return self._aligned_down(self.capacity // 2)

    @property
    def free_bytes(self) -> int:
        return self.capacity - self.used_bytes

    @property
    def waiting(self) -> tuple[str, ...]:
        """The loads that wait for their first wave, the one that waits longest first."""
        return tuple(self._waiting)

    def waves(self) -> tuple[Wave, ...]:
        """The waves that are out, by start."""
        return tuple(self._out[start] for start in sorted(self._out))

    def snapshot(self) -> PoolSnapshot:
        """The pool now."""
        return PoolSnapshot(
            capacity=self.capacity,
            used_bytes=self.used_bytes,
            alignment=self.alignment,
            largest_wave=self.largest_wave,
            peer_limit=self.peer_limit,
            waves=self.waves(),
            quarantined=frozenset(self._quarantined),
            waiting=self.waiting,
        )

    def try_take(
        self, load: str, peer: str, wanted: int, *, at_least: int | None = None
    ) -> Wave | None:
        """A wave for `load`, or None: it then waits, and asks again until it is served or withdraws.

        Args:
            wanted: bytes; what exceeds the largest wave is cut off.
            at_least: the fewest bytes that the load can use; `wanted` (or the largest wave) by default. A wave smaller
                than `wanted` is given only where quarantined waves leave no more, never because the pool is busy.

        Raises:
            PoolTooSmall: `at_least` bytes are more than the largest wave.
        """
        wish = self._wish(peer, wanted, at_least)
        if wish.wanted <= 0 or wish.at_least <= 0:
            raise LocalProtocolError(
                f"load={load} peer={peer} asks for {wish.wanted} bytes of the staging pool"
            )
        held = sum(wave.load == load for wave in self._live())
        if held >= WAVES_PER_LOAD:
            return None
        wave = self._grant(load, wish)
        if wave is not None:
            self._waiting.pop(load, None)
        elif held == 0:
            # A load that waits already keeps its place: a dict's order is that of first insertion.
            self._waiting[load] = wish
        return wave

    def _wish(self, peer: str, wanted: int, at_least: int | None) -> _Wish:
        wanted_bytes = min(self._aligned_up(wanted), self.largest_wave)
        if at_least is None:
            return _Wish(peer, wanted_bytes, wanted_bytes)
        least_bytes = self._aligned_up(at_least)
        if least_bytes > self.largest_wave:
            expected = f"at least {WAVES_PER_POOL * least_bytes}: one wave must hold {at_least}"
            raise PoolTooSmall("staging_pool_bytes", self.capacity, expected)
        return _Wish(peer, wanted_bytes, min(least_bytes, wanted_bytes))

    def is_waiting(self, load: str) -> bool:
        """True if `load` waits for its first wave."""
        return load in self._waiting

    def lacks_room(self, load: str) -> bool:
        """True if `load` waits for its first wave and cannot get it before quarantined ones come back."""
        wish = self._waiting.get(load)
        return wish is not None and self._attainable_bytes(wish) is None

    def withdraw(self, load: str) -> None:
        """Remove `load` from the queue. A load that ends must call it, or others wait behind it for ever."""
        self._waiting.pop(load, None)

    def quarantine(self, wave: Wave) -> None:
        """Quarantine a wave that a given-up transfer may still write into: it stays out until it is given back."""
        self._check_out(wave)
        if wave.start in self._quarantined:
            raise LocalProtocolError(
                f"load={wave.load} quarantines a wave twice: {wave}"
            )
        self._quarantined.add(wave.start)

    def give_back(self, wave: Wave) -> None:
        """Return a wave that nothing reads or writes any more; also ends its quarantine."""
        self._check_out(wave)
        del self._out[wave.start]
        self.used_bytes -= wave.num_bytes
        self.given_back += 1
        self._quarantined.discard(wave.start)

    def held_by(self, peer: str) -> int:
        """Bytes that `peer` holds, quarantined ones included."""
        return sum(wave.num_bytes for wave in self._out.values() if wave.peer == peer)

    def _grant(self, load: str, wish: _Wish) -> Wave | None:
        size = self._attainable_bytes(wish)
        if size is None or self._is_over_share(wish.peer, size):
            return None
        for earlier_load, earlier_wish in self._waiting.items():
            if earlier_load == load:
                break
            if self._must_be_served_first(earlier_wish, wish.peer):
                return None
        for start, stop in _gaps(self.waves(), self.capacity):
            if stop - start >= size:
                wave = Wave(start=start, stop=start + size, load=load, peer=wish.peer)
                self._out[start] = wave
                self.used_bytes += wave.num_bytes
                return wave
        return None

    def _attainable_bytes(self, wish: _Wish) -> int | None:
        """The bytes that the wish would get if every wave came back that is not quarantined."""
        # Quarantined ones are not counted on: they may stay out as long as a dead peer's handles
        # live.
        quarantined = [self._out[start] for start in sorted(self._quarantined)]
        gap = max(stop - start for start, stop in _gaps(quarantined, self.capacity))
        free = self.capacity - sum(wave.num_bytes for wave in quarantined)
        own = sum(wave.num_bytes for wave in quarantined if wave.peer == wish.peer)
        # The largest size with free - size >= own + size.
        share = self._aligned_down((free - own) // 2)
        size = min(wish.wanted, self._aligned_down(gap), share)
        if size < wish.at_least:
            return None
        return size

    def _is_over_share(self, peer: str, size: int) -> bool:
        """True if a wave of this size would leave less free than the peer then holds.

        So a peer that stands still never takes the last of the pool, however many do. (A half for every peer was tried:
        two that stood still took it all.)
        """
        return self.free_bytes - size < self.held_by(peer) + size

    def _must_be_served_first(self, waiting: _Wish, peer: str) -> bool:
        """True if a load of `peer` must not be served before this one, which waits longer."""
        size = self._attainable_bytes(waiting)
        if size is None:
            # Only quarantined waves can help it. Others would wait with it for a dead peer.
            return False
        if waiting.peer == peer or not self._is_over_share(waiting.peer, size):
            return True
        # Its own peer's waves come back and make room. Without any, it can only wait for the
        # others'.
        return not any(wave.peer == waiting.peer for wave in self._live())

    def _live(self) -> Iterator[Wave]:
        """The waves that are out and not quarantined."""
        return (
            wave for start, wave in self._out.items() if start not in self._quarantined
        )

    def _check_out(self, wave: Wave) -> None:
        if self._out.get(wave.start) != wave:
            raise LocalProtocolError(
                f"load={wave.load} peer={wave.peer}: {wave} is not out"
            )

    def _aligned_down(self, num_bytes: int) -> int:
        return num_bytes // self.alignment * self.alignment

    def _aligned_up(self, num_bytes: int) -> int:
        return -(-num_bytes // self.alignment) * self.alignment


def _gaps(waves: Iterable[Wave], capacity: int) -> Iterator[tuple[int, int]]:
    """The gaps between waves that are ordered by start; the last gap may be empty."""
    position = 0
    for wave in waves:
        if wave.start > position:
            yield position, wave.start
        position = wave.stop
    yield position, capacity
