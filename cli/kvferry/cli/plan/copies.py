"""`--copies`: every elementary copy of one request as a JSON line, to examine suspected corruption."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated

import msgspec
from msgspec import Meta, to_builtins

from kvferry.cli.arguments import InvalidCopies, read_json
from kvferry.plan.blocks import RequestBlocks, UnitPairs, pair_request
from kvferry.plan.copies import route_copies
from kvferry.plan.tokens import TokenMap
from kvferry.plan.transfer_plan import TransferPlan
from kvferry.protocol.convert import as_type
from kvferry.protocol.errors import UNKNOWN, InvalidParams, Shown, cut, one_of
from kvferry.protocol.handshake import EngineDescription
from kvferry.protocol.ids import BlockId, Count, Positive

MAX_REQUEST_BYTES = 64 << 20
MAX_BLOCKS = 1 << 20

_Ids = Annotated[tuple[BlockId, ...], Meta(max_length=MAX_BLOCKS)]
_IdsOfGroups = Annotated[tuple[_Ids, ...], Meta(min_length=1, max_length=64)]


class CopyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request's blocks on both sides, one list of scheduler blocks per cache group.

    Attributes:
        remote_block_ids: the last blocks of the producer's sequence, as in `kv_transfer_params`.
        local_block_ids: the consumer's blocks from the first token on, 0 where none is held.
        num_tokens: tokens that the remote blocks hold.
        first_token, stop_token: the tokens that are read; all by default.
    """

    remote_block_ids: _IdsOfGroups
    local_block_ids: _IdsOfGroups
    num_tokens: Positive
    first_token: Count = 0
    stop_token: Count | None = None


def read_request(
    text: bytes, consumer: EngineDescription, producer: EngineDescription
) -> RequestBlocks:
    """The request's blocks for pairing, from the content of the file of `--copies`.

    Raises:
        InvalidCopies: with the field, its value and the expected one.
    """
    plain = read_json(InvalidCopies, text, MAX_REQUEST_BYTES)
    if isinstance(plain, dict):
        # msgspec would name an unknown field, but not guess what was meant.
        names = CopyRequest.__struct_encode_fields__
        for key in plain:
            if key not in names:
                raise InvalidCopies(cut(key), UNKNOWN, one_of(key, names))
    request = as_type(plain, CopyRequest, InvalidCopies)
    for field, engine in (
        ("remote_block_ids", producer),
        ("local_block_ids", consumer),
    ):
        lists = getattr(request, field)
        if len(lists) != len(engine.groups):
            expected = f"one per cache group: {len(engine.groups)}"
            raise InvalidCopies(field, f"{len(lists)} lists", expected)
    stop_token = request.num_tokens
    if request.stop_token is not None:
        stop_token = request.stop_token
    # Beyond its tokens a block holds those of another request.
    if stop_token > request.num_tokens:
        expected = f"at most num_tokens={request.num_tokens}"
        raise InvalidCopies("stop_token", stop_token, expected)
    if request.first_token >= stop_token:
        expected = f"below {stop_token}, where reading stops"
        raise InvalidCopies("first_token", request.first_token, expected)
    return RequestBlocks(
        local=request.local_block_ids,
        remote=request.remote_block_ids,
        first_token=request.first_token,
        stop_token=stop_token,
        num_tokens=request.num_tokens,
    )


def copy_lines(
    plans: Sequence[TransferPlan],
    consumer: EngineDescription,
    producer: EngineDescription,
    request: RequestBlocks,
) -> Iterator[str]:
    """One line per elementary copy, by consumer worker and producer worker.

    Raises:
        InvalidCopies: the blocks do not cover the tokens, or are outside a cache. Before the first line.
    """
    # All plans are paired before the first line is made: half a file of copies would look like a whole one.
    try:
        units_by_plan = [
            pair_request(plan, consumer.groups, producer.groups, request)
            for plan in plans
        ]
    except InvalidParams as wrong:
        field = wrong.field.replace("local_blocks", "local_block_ids")
        shown = Shown(wrong.shown_value)
        raise InvalidCopies(field, shown, wrong.expected) from None
    return _lines(plans, units_by_plan)


def _lines(
    plans: Sequence[TransferPlan], units_by_plan: Sequence[Mapping[TokenMap, UnitPairs]]
) -> Iterator[str]:
    for plan, units in zip(plans, units_by_plan, strict=True):
        for route in plan.routes:
            for bundle in route.bundles:
                line = {
                    "consumer": to_builtins(plan.place),
                    "producer": to_builtins(route.place),
                    "src": "%d",
                    "dst": "%d",
                    "bytes": "%d",
                    "via": route.placing_of(bundle).value,
                }
                if bundle.conversions:
                    line["convert"] = str(bundle.conversions[0])
                # There are millions of lines, which differ in three numbers.
                form = json.dumps(line).replace('"%d"', "%d") + "\n"
                # A bundle at a time: its copies share their placing and their conversion.
                for copies in route_copies(replace(route, bundles=(bundle,)), units):
                    columns = (copies.src, copies.dst, copies.num_bytes)
                    rows = zip(*(column.tolist() for column in columns), strict=True)
                    yield from (form % row for row in rows)
