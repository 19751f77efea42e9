"""What is measured: sizes by powers of four, in one descriptor and in runs of 16 KiB."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.cli.bench.messages import MIN_BYTES, Kind

RUN_BYTES = 16 << 10
"""The published knee: shorter descriptors are dear. Also a block of one head of many caches."""
_STEP = 4


@dataclass(frozen=True, slots=True)
class Case:
    """Reads of `num_bytes` in descriptors of `run_bytes`."""

    kind: Kind
    num_bytes: int
    run_bytes: int

    @property
    def descriptors(self) -> int:
        """Of one read."""
        return self.num_bytes // self.run_bytes


def cases_of(kind: Kind, max_bytes: int) -> list[Case]:
    """4 KiB, 16 KiB … up to `max_bytes`: each in one descriptor; those of several runs scattered, too."""
    found: list[Case] = []
    num_bytes = MIN_BYTES
    while num_bytes <= max_bytes:
        found.append(Case(kind, num_bytes, num_bytes))
        if num_bytes > RUN_BYTES:
            found.append(Case(kind, num_bytes, RUN_BYTES))
        num_bytes *= _STEP
    return found
