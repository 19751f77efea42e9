"""Workers and numbers as short text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvferry.protocol.geometry import Place

_MAX_PARTS = 3


def counted(number: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}s"


def format_places(places: Iterable[Place]) -> str:
    """The places of several workers, bounded in length: `tp0…7`, `tp0…56 by 8/pp0…1`.

    The decode context parallel rank, which follows from the others, is left out if there are several.
    """
    distinct = list(dict.fromkeys(places))
    if len(distinct) == 1:
        return str(distinct[0])
    tensor_ranks: dict[tuple[int, int], list[int]] = {}
    for place in distinct:
        tensor_ranks.setdefault((place.pp, place.pcp), []).append(place.tp)
    # Stages that have the same tensor parallel ranks are named together.
    stages_by_ranks: dict[tuple[int, ...], dict[int, list[int]]] = {}
    for (pp, pcp), held in tensor_ranks.items():
        stages_by_pcp = stages_by_ranks.setdefault(tuple(sorted(held)), {})
        stages_by_pcp.setdefault(pcp, []).append(pp)
    parts: list[str] = []
    for tps, stages_by_pcp in stages_by_ranks.items():
        for pcp, stages in stages_by_pcp.items():
            ends = _ends(sorted(stages), pcp)
            parts += [f"tp{ranks}{end}" for ranks in format_runs(tps) for end in ends]
    if len(parts) <= _MAX_PARTS:
        return ", ".join(parts)
    first = min(place.tp for place in distinct)
    last = max(place.tp for place in distinct)
    return f"{len(distinct)} of tp{first}…{last}"


def _ends(stages: Sequence[int], pcp: int) -> list[str]:
    """The ends of the names of places in these pipeline stages: `/pp0…1/pcp2`; rank 0 alone is not named."""
    ends = [""]
    if any(stages):
        ends = [f"/pp{pp}" for pp in format_runs(stages)]
    if pcp:
        ends = [f"{end}/pcp{pcp}" for end in ends]
    return ends


def format_numbers(numbers: Sequence[int]) -> str:
    """Ascending numbers, bounded in length: `0…7`, `0…56 by 8`, `1, 4…6`, `30 of 1…63`."""
    parts = format_runs(numbers)
    if len(parts) <= _MAX_PARTS:
        return ", ".join(parts)
    return f"{len(numbers)} of {numbers[0]}…{numbers[-1]}"


def format_runs(numbers: Sequence[int]) -> list[str]:
    """Ascending numbers: single ones, ranges, and three or more with a step above 1; `1`, `4…6`, `8…56 by 8`."""
    found: list[str] = []
    start = 0
    while start < len(numbers):
        count, step = _progression(numbers, start)
        last = numbers[start + count - 1]
        found.append(_format_progression(numbers[start], last, step))
        start += count
    return found


def _progression(numbers: Sequence[int], start: int) -> tuple[int, int]:
    """How many numbers from `start` on are one progression, and its step."""
    if start + 1 == len(numbers):
        return 1, 1
    first = numbers[start]
    step = numbers[start + 1] - first
    count = 2
    while (
        start + count < len(numbers) and numbers[start + count] == first + step * count
    ):
        count += 1
    # Two numbers are always a progression: unless they are neighbours, it says nothing.
    if count == 2 and step > 1:
        return 1, 1
    return count, step


def _format_progression(first: int, last: int, step: int) -> str:
    if first == last:
        return str(first)
    if step == 1:
        return f"{first}…{last}"
    return f"{first}…{last} by {step}"
