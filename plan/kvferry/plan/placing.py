"""The slices of one route, and whether each is read in place or through the staging pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvferry.plan.conversion import conversion_of, has_scales_by_head, needs_conversion
from kvferry.plan.cost import Choice, Costs, ReadOption, cheapest, choose
from kvferry.plan.refusals import PlanRefused, Reason
from kvferry.plan.runs import Bundle, Reading, TensorSlice
from kvferry.plan.staged_layout import StagedSource, Unplaceable, differs, read_options, sources
from kvferry.plan.tokens import TokenMap, map_tokens
from kvferry.plan.transfer_plan import Placing, Slice
from kvferry.protocol.geometry import PagedTensor, Range
from kvferry.protocol.handshake import EngineDescription


def parts_of(
    local: PagedTensor, remote: PagedTensor, heads: Range, tokens: TokenMap
) -> Iterator[TensorSlice]:
    """One part, or one part per head if heads are converted with scales of their own."""
    if not needs_conversion(local, remote):
        yield TensorSlice(local, remote, heads, tokens)
    elif has_scales_by_head(local) or has_scales_by_head(remote):
        for head in range(heads.start, heads.stop):
            yield TensorSlice(
                local, remote, Range(head, head + 1), tokens, conversion_of(local, remote, head)
            )
    else:
        yield TensorSlice(local, remote, heads, tokens, conversion_of(local, remote, heads.start))


class TokenMaps:
    """Cache of token maps; equal ones are one object."""

    def __init__(self, consumer: EngineDescription) -> None:
        self._policies = [group.policy for group in consumer.groups]
        self._found: dict[tuple[object, ...], TokenMap] = {}

    def of(self, local: PagedTensor, remote: PagedTensor) -> TokenMap:
        """The token map of two tensors."""
        sides = (
            local.block_tokens,
            local.blocks,
            local.interleave,
            remote.block_tokens,
            remote.blocks,
        )
        key = (local.group, *sides, remote.interleave)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = map_tokens(
                local.group, self._policies[local.group], local, remote
            )
        return found


def place(
    parts: Sequence[TensorSlice], bundles: Sequence[Bundle], costs: Costs
) -> tuple[tuple[Slice, ...], tuple[StagedSource, ...]]:
    """Decide for every bundle how it is placed."""
    short = [
        index
        for one in bundles
        if one.run_bytes < costs.direct_min_bytes or one.conversions or not costs.reaches_caches
        for of in one.members
        for index in of
    ]
    readings = [
        reading for reading in Reading if any(differs(parts[index], reading) for index in short)
    ]
    possible = [read_options(parts, short, reading, costs.staged_run_bytes) for reading in readings]
    banned: set[tuple[int, Reading]] = set()
    while True:
        choices: list[Choice] = []
        chosen: dict[int, Reading] = {}
        for index, one in enumerate(bundles):
            members = _members(one)
            usable = [
                (of, reading)
                for of, reading in zip(possible, readings, strict=True)
                if of.keys() >= set(members) and (index, reading) not in banned
            ]
            offered = [
                ReadOption(
                    sum(of[m].read_bytes for m in members), sum(of[m].descriptors for m in members)
                )
                for of, _ in usable
            ]
            if one.conversions or not costs.reaches_caches:
                choices.append(_must_stage(parts[min(members)], costs, offered))
            else:
                choices.append(choose(costs, one.unit_bytes, one.unit_runs, offered))
            option = choices[-1].option
            if option is not None:
                chosen.update(dict.fromkeys(members, usable[option][1]))
        lost = _lost(parts, bundles, chosen, costs)
        if not lost:
            try:
                return _slices(parts, bundles, choices), sources(parts, bundles, chosen)
            except Unplaceable:
                lost = {(index, reading) for index in range(len(bundles)) for reading in Reading}
        banned |= lost


def _slices(
    parts: Sequence[TensorSlice], bundles: Sequence[Bundle], choices: Sequence[Choice]
) -> tuple[Slice, ...]:
    slices: dict[int, Slice] = {}
    for one, choice in zip(bundles, choices, strict=True):
        for of_place in one.members:
            for member in of_place:
                part = parts[member]
                slices[member] = Slice(
                    local=part.local,
                    remote=part.remote,
                    heads=part.heads,
                    tokens=part.tokens,
                    placing=Placing.DIRECT if choice.option is None else Placing.STAGED,
                    reason=choice.reason,
                    run_bytes=one.run_bytes,
                    unit_runs=one.runs_per_place / len(of_place),
                )
    return tuple(slices[index] for index in range(len(parts)))


def _members(one: Bundle) -> list[int]:
    return [member for of_place in one.members for member in of_place]


def _lost(
    parts: Sequence[TensorSlice],
    bundles: Sequence[Bundle],
    chosen: dict[int, Reading],
    costs: Costs,
) -> set[tuple[int, Reading]]:
    """The bundles that cannot be read as chosen: runs may be shorter when not all parts are read alike."""
    lost: set[tuple[int, Reading]] = set()
    for reading in set(chosen.values()):
        members = [index for index in chosen if chosen[index] is reading]
        still = read_options(parts, members, reading, costs.staged_run_bytes)
        for index, one in enumerate(bundles):
            own = _members(one)
            if chosen.get(own[0]) is reading and not still.keys() >= set(own):
                lost.add((index, reading))
    return lost


def _must_stage(part: TensorSlice, costs: Costs, read_options: Sequence[ReadOption]) -> Choice:
    """The choice for a part that is converted, or that the fabric does not reach: the pool, at any cost.

    Raises:
        PlanRefused: there is no pool, or it is too small.
    """
    if not read_options:
        change, where = (
            "raise staging_pool_bytes on the consumer",
            f"{part.local.layer}/{part.local.kind}",
        )
        pool = f"a staging pool for runs of up to {costs.staged_run_bytes} B"
        if part.conversion is not None:
            change += ", or use the same --kv-cache-dtype on both sides"
            expected = f"{part.local.format.dtype} and {pool}"
            raise PlanRefused(
                [Reason(f"{where}.format", part.remote.format.dtype, expected, change)]
            )
        change += ", or use no kv_buffer_device: cpu there"
        raise PlanRefused(
            [
                Reason(
                    where,
                    f"cells of {part.remote.cell_bytes} B",
                    f"no host buffer, or {pool}",
                    change,
                )
            ]
        )
    why = (
        str(part.conversion)
        if part.conversion is not None
        else "the fabric does not reach the device"
    )
    return Choice(cheapest(costs, read_options), why)
