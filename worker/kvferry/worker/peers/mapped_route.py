"""One producer worker of this host, whose memory is mapped: its cache is read, and its lease table, without NIXL.

The bundles of the plan have both sides' addresses, axes and strides already, so that a bundle is one shape of the
relayout, with the mapped addresses as its source:

    bundle   bases (local, remote), axes, unit strides    →   shape; pieces (mapped remote, local)
    units    of a request                                 →   (remote block, position, local block, position)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.plan.blocks import UnitPairs
from kvferry.plan.runs import Bundle
from kvferry.plan.tokens import TokenMap
from kvferry.plan.transfer_plan import Route
from kvferry.worker.caches import KvCaches
from kvferry.worker.fabric.port import RemoteDescriptors
from kvferry.worker.peer_memory.mapping import WorkerMapping
from kvferry.worker.peer_memory.port import PeerMemory
from kvferry.worker.relayout.port import Allocation, BoundedRelayout, Memory
from kvferry.worker.relayout.shape import (
    MAX_AXES,
    CopyAxis,
    ElementConversion,
    Shape,
)
from kvferry.worker.relayout.wave_table import Pieces, WaveTable

LAUNCH_BYTES = 32 << 20
"""Bytes of one launch, unless a single unit has more: between two launches other loads have their turn."""


@dataclass(frozen=True, slots=True)
class Mapper:
    """How a worker reads producers of its host.

    Attributes:
        peer_memory: maps their memory.
        relayout_from: what copies from mapped allocations into this worker's caches.
    """

    peer_memory: PeerMemory
    relayout_from: Callable[[Sequence[Allocation]], BoundedRelayout]


@dataclass(frozen=True, slots=True)
class _UnitKind:
    """The units of a request whose tokens are mapped alike.

    Attributes:
        num_bytes: of one unit, in all shapes that it is copied by.
        shapes: for each shape whether it is one of these.
    """

    tokens: TokenMap
    num_bytes: int
    shapes: tuple[bool, ...]

    @classmethod
    def of_bundles(cls, bundles: Sequence[Bundle]) -> tuple[_UnitKind, ...]:
        """All of a route, whose bundles are one shape each."""
        return tuple(
            cls(
                tokens=tokens,
                num_bytes=sum(
                    bundle.unit_bytes for bundle in bundles if bundle.tokens == tokens
                ),
                shapes=tuple(bundle.tokens == tokens for bundle in bundles),
            )
            for tokens in dict.fromkeys(bundle.tokens for bundle in bundles)
        )


@dataclass(frozen=True, slots=True, eq=False)
class MappedRoute:
    """See the module.

    Attributes:
        mapping: keeps the memory.
        proofs: descriptor `i` is the proof of allocation `i`, in the producer's memory.
        relayout: from the mapped memory into the caches; keeps that memory too.
        pieces: everything that is copied.
        units: of which kinds a request may have units.
    """

    mapping: WorkerMapping
    proofs: RemoteDescriptors
    relayout: BoundedRelayout
    pieces: Pieces
    units: tuple[_UnitKind, ...]

    @classmethod
    def from_plan(
        cls,
        route: Route,
        mapping: WorkerMapping,
        proofs: RemoteDescriptors,
        caches: KvCaches,
        relayout: BoundedRelayout,
    ) -> MappedRoute:
        """Prepare what the plan reads from this worker.

        Raises:
            NotMappable: an address of the plan is not mapped.
        """
        sources = Memory(mapping.allocations)
        destinations = Memory(caches.storages)
        shapes: list[Shape] = []
        rows: list[tuple[int, int, int, int]] = []
        scales: list[tuple[float, float]] = []
        for number, bundle in enumerate(route.bundles):
            bases = [
                (local, mapping.address_of(remote)) for local, remote in bundle.bases
            ]
            axis = _axis_of_bases(bundle, bases, sources, destinations)
            shapes.append(_shape(bundle, axis))
            # With an axis of its own every base is a step from the first one.
            for index, (local, remote) in enumerate(
                bases if axis is None else [min(bases)]
            ):
                rows.append((remote, local, number, len(scales)))
                scales.append(_scales(bundle, index))
        pieces = Pieces(
            tuple(shapes),
            np.array(rows, dtype=np.int64).reshape(-1, 4),
            np.array(scales, dtype=np.float32).reshape(-1, 2),
        )
        return cls(
            mapping=mapping,
            proofs=proofs,
            relayout=relayout,
            pieces=pieces,
            units=_UnitKind.of_bundles(route.bundles),
        )

    def tables(
        self, units: Mapping[TokenMap, UnitPairs]
    ) -> Iterator[tuple[WaveTable, int]]:
        """The copies of a request, launch by launch, each with its bytes on the producer."""
        for kind in self.units:
            pairs = units.get(kind.tokens)
            if pairs is None or not len(pairs):
                continue
            most_units = self.relayout.most_units(self.pieces)
            at_once = max(1, min(most_units, LAUNCH_BYTES // kind.num_bytes))
            for first in range(0, len(pairs), at_once):
                launched = pairs.places[first : first + at_once]
                ranges = tuple(
                    (0, len(launched)) if is_own else (0, 0) for is_own in kind.shapes
                )
                yield (
                    WaveTable(self.pieces, ranges, launched),
                    len(launched) * kind.num_bytes,
                )


def _shape(bundle: Bundle, more: CopyAxis | None) -> Shape:
    axes = [CopyAxis.of_plan(axis) for axis in bundle.axes]
    if more is not None:
        axes.append(more)
    remote = bundle.remote_unit_stride
    local = bundle.local_unit_stride
    return Shape.from_axes(
        axes,
        bundle.run,
        source_unit_stride=(remote.block_stride, remote.position_stride),
        destination_unit_stride=(local.block_stride, local.position_stride),
        conversion=ElementConversion.of_plan(bundle.dtypes),
    )


def _scales(bundle: Bundle, index: int) -> tuple[float, float]:
    """The producer's and the consumer's scale at one of a bundle's bases."""
    if not bundle.conversions:
        return 1.0, 1.0
    conversion = bundle.conversions[index]
    return conversion.remote_scale, conversion.local_scale


def _axis_of_bases(
    bundle: Bundle, bases: list[tuple[int, int]], sources: Memory, destinations: Memory
) -> CopyAxis | None:
    """The bases of a bundle as one axis, if they are equally far apart on both sides; else None.

    The layers of a cache usually are. On the CPU every piece costs some 10 µs, whatever its bytes: 80 layers of K and V
    were 160 pieces, and are one.
    """
    same_scales = len({_scales(bundle, index) for index in range(len(bases))}) == 1
    if len(bases) < 2 or len(bundle.axes) >= MAX_AXES or not same_scales:
        return None
    addresses = np.array(sorted(bases), dtype=np.int64)
    steps = np.diff(addresses, axis=0)
    local_stride, remote_stride = (int(stride) for stride in steps[0])
    is_regular = (
        bool((steps == steps[0]).all()) and local_stride >= 0 and remote_stride >= 0
    )
    # A piece lies in one allocation: the check of its bounds knows no other.
    lies_together = (
        len(set(destinations.allocations_of(addresses[:, 0]).tolist())) == 1
        and len(set(sources.allocations_of(addresses[:, 1]).tolist())) == 1
    )
    if not is_regular or not lies_together:
        return None
    return CopyAxis(len(bases), remote_stride, local_stride)
