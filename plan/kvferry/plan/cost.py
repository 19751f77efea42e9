"""The cost model: the time of a read in place, and of a read in the producer's shape followed by a relayout.

All constants are here. They are published figures; a machine's measured ones can replace them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DIRECT_MIN_BYTES = 16 << 10
"""Run length from which a descriptor costs less than the bytes that it moves, as published for RDMA over NIXL."""


@dataclass(frozen=True, slots=True)
class Costs:
    """The constants of the cost model.

    Attributes:
        direct_min_bytes: run length at which a descriptor takes as long as its bytes.
        link_gb_s: bandwidth of the link, GB/s.
        relayout_gb_s: bandwidth of the relayout, bytes read and written, GB/s.
        mapped_gb_s: bandwidth of copies from mapped memory, bytes counted once, GB/s: one core copies.
        staged_run_bytes: longest run that the staging pool takes; 0 without a pool.
        reaches_caches: the fabric reaches the consumer's caches; if not, everything is staged.
    """

    direct_min_bytes: int = DIRECT_MIN_BYTES
    link_gb_s: float = 50.0
    relayout_gb_s: float = 1500.0
    mapped_gb_s: float = 10.0
    staged_run_bytes: int = 32 << 20
    reaches_caches: bool = True

    @property
    def descriptor_s(self) -> float:
        """The cost of one descriptor, without its bytes."""
        return self.direct_min_bytes / (self.link_gb_s * 1e9)

    def read_s(self, num_bytes: float, descriptors: float) -> float:
        """The cost of reading `num_bytes` with `descriptors`."""
        return num_bytes / (self.link_gb_s * 1e9) + descriptors * self.descriptor_s

    def relayout_s(self, num_bytes: float) -> float:
        """The cost of moving bytes from the staging pool into place: each is read and written."""
        return 2 * num_bytes / (self.relayout_gb_s * 1e9)

    def mapped_s(self, num_bytes: float) -> float:
        """The cost of copying bytes from mapped memory into place."""
        return num_bytes / (self.mapped_gb_s * 1e9)


PUBLISHED = Costs()
"""The published constants."""


@dataclass(frozen=True, slots=True)
class ReadOption:
    """A way of reading in the producer's shape: its bytes and descriptors."""

    read_bytes: float
    descriptors: float


@dataclass(frozen=True, slots=True)
class Choice:
    """How bytes are placed, and why. `option` is the index of the chosen option, None for direct."""

    option: int | None
    reason: str


def choose(
    costs: Costs,
    num_bytes: float,
    descriptors: float,
    read_options: Sequence[ReadOption],
) -> Choice:
    """Choose between reading `num_bytes` in place with `descriptors` and the options in the producer's shape."""
    run_bytes = num_bytes / descriptors
    # Such descriptors cost less than their bytes: staging could save only the smaller part, and
    # would move every byte twice more.
    if run_bytes >= costs.direct_min_bytes:
        return Choice(
            None,
            f"runs of {run_bytes:.0f} B, and from {costs.direct_min_bytes} B on descriptors are cheap",
        )
    no_better_runs = Choice(
        None, f"runs of {run_bytes:.0f} B, and no better ones on the producer"
    )
    best = cheapest(costs, read_options)
    if best is None:
        return no_better_runs
    option = read_options[best]
    direct_s = costs.read_s(num_bytes, descriptors)
    staged_s = costs.read_s(option.read_bytes, option.descriptors) + costs.relayout_s(
        num_bytes
    )
    if staged_s >= direct_s:
        return no_better_runs
    producer_run_bytes = option.read_bytes / option.descriptors
    reason = (
        f"runs of {run_bytes:.0f} B, but of {producer_run_bytes:.0f} B on the producer"
    )
    if option.read_bytes > num_bytes:
        reason += (
            f", where {option.read_bytes / num_bytes:.3g} times the bytes are read"
        )
    return Choice(best, reason)


def cheapest(costs: Costs, read_options: Sequence[ReadOption]) -> int | None:
    """The index of the fastest option; the first of equals."""
    if not read_options:
        return None
    # Without the relayout: it puts the same bytes in place, however they were read.
    times_s = [
        costs.read_s(option.read_bytes, option.descriptors) for option in read_options
    ]
    return times_s.index(min(times_s))
