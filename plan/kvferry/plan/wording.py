"""Workers and numbers as short text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvferry.protocol.geometry import Place

_MOST_PARTS = 3


def counted(number: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_places(places: Iterable[Place]) -> str:
    """The places of several workers, bounded in length: `tp0…7`, `tp0…56 by 8/pp0…1`.

    The decode context parallel rank, which follows from the others, is left out if there are several.
    """
    found = list(dict.fromkeys(places))
    if len(found) == 1:
        return str(found[0])
    ranks: dict[tuple[int, int], list[int]] = {}
    for place in found:
        ranks.setdefault((place.pp, place.pcp), []).append(place.tp)
    alike: dict[tuple[int, ...], dict[int, list[int]]] = {}
    for (pp, pcp), held in ranks.items():
        alike.setdefault(tuple(sorted(held)), {}).setdefault(pcp, []).append(pp)
    parts = []
    for tps, by_pcp in alike.items():
        for pcp, stages in by_pcp.items():
            pps = _formatted(sorted(stages)) if any(stages) else [""]
            ends = [f"{f'/pp{pp}' if pp else ''}{f'/pcp{pcp}' if pcp else ''}" for pp in pps]
            parts += [f"tp{ranks}{end}" for ranks in _formatted(tps) for end in ends]
    last = max(place.tp for place in found)
    return (
        ", ".join(parts)
        if len(parts) <= _MOST_PARTS
        else f"{len(found)} of tp{min(map(min, alike))}…{last}"
    )


def format_numbers(numbers: Sequence[int]) -> str:
    """Ascending numbers, bounded in length: `0…7`, `0…56 by 8`, `1, 4…6`, `30 of 1…63`."""
    parts = _formatted(numbers)
    return (
        ", ".join(parts)
        if len(parts) <= _MOST_PARTS
        else f"{len(numbers)} of {numbers[0]}…{numbers[-1]}"
    )


def progressions(numbers: Sequence[int]) -> list[tuple[int, int, int]]:
    """Ascending numbers as (first, last, step): single ones, ranges, and three or more with a step above 1."""
    found, left = [], list(numbers)
    while left:
        step = left[1] - left[0] if len(left) > 1 else 1
        count = 1
        while count < len(left) and left[count] == left[0] + step * count:
            count += 1
        count, step = (1, 1) if count == 2 and step > 1 else (count, step)
        found.append((left[0], left[count - 1], step))
        del left[:count]
    return found


def _formatted(numbers: Sequence[int]) -> list[str]:
    return [
        f"{first}" if first == last else f"{first}…{last}{f' by {step}' if step > 1 else ''}"
        for first, last, step in progressions(numbers)
    ]
