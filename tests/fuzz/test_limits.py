"""Every bound of docs/protocol.md, at its limit and one beyond it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvferry.cli.arguments import InvalidArgument
from kvferry.cli.plan import short_engine
from kvferry.cli.plan.short_engine import engine_of_form
from kvferry.plan import planner
from kvferry.plan.planner import plan_transfer
from kvferry.plan.refusals import MAX_BLOCK_TOKENS, PlanRefused, check_description
from kvferry.protocol import description_json, handshake
from kvferry.protocol.description_json import (
    decode_engine_json,
    encode_engine_json,
    to_engine_json,
)
from kvferry.protocol.errors import (
    InputError,
    InvalidDescription,
    InvalidMessage,
    InvalidParams,
)
from kvferry.protocol.geometry import MAX_SCALES, MAX_TENSORS, Interleave, Place, Range
from kvferry.protocol.handshake import (
    MAX_ENGINE_TENSORS,
    MAX_RENEWALS,
    CacheGroup,
    LeaseName,
    Renew,
    decode_reply,
    decode_request,
    decode_worker,
    encode,
)
from kvferry.protocol.ids import MAX_GROUPS, MAX_WORKERS
from kvferry.protocol.orders import LeaseOpen
from kvferry.protocol.params import (
    MAX_BLOCKS,
    MAX_DIGESTS,
    MAX_KEYS,
    read_params,
)
from kvferry.protocol.queries import MAX_QUERIES, Subscribe
from kvferry.protocol.slots import (
    MAGIC,
    MAX_NOTIFICATION_BYTES,
    Done,
    decode_notification,
    encode_notification,
)
from kvferry.worker.leases import MAX_CONSUMERS, LeaseTable
from tests.cli.plan.forms import read_form
from tests.plan.samples import engine, tensor, worker
from tests.protocol.samples import (
    BOOT,
    DONE,
    EPOCH,
    QUESTIONS,
    make_description,
    make_params,
    make_tensor,
    make_worker,
    params_of_length,
)


def read_changed(**changes: Any) -> object:
    return read_params(make_params().to_json() | changes)


def renewals(count: int) -> object:
    lease = LeaseName(slot=1, epoch=EPOCH)
    return decode_request(encode(Renew(boot=BOOT, leases=(lease,) * count)))


def queries(count: int) -> object:
    return decode_request(
        encode(Subscribe(client_id="decode-0", queries=QUESTIONS[:1] * count))
    )


def digests(count: int) -> object:
    return read_params(params_of_length(256 * count).to_json())


def workers(count: int) -> object:
    each = tuple(
        make_worker(place=Place(tp=index % 64, pp=index // 64), tensors=())
        for index in range(count)
    )
    return decode_reply(encode(make_description(workers=each)))


def tensors(count: int) -> object:
    return decode_worker(encode(make_worker(tensors=(make_tensor(),) * count)))


def tensors_of_all(count: int) -> object:
    whole, rest = divmod(count, 16)
    each = [make_worker(tensors=(make_tensor(),) * whole)] * 16 + [
        make_worker(tensors=(make_tensor(),) * rest)
    ]
    return decode_reply(encode(make_description(workers=tuple(each))))


def described(**changes: Any) -> object:
    return decode_worker(encode(make_worker(tensors=(make_tensor(**changes),))))


def notified(**changes: Any) -> object:
    done = Done(slot=1, epoch=EPOCH, consumer=BOOT, worker=0, expected=1)
    return decode_notification(
        encode_notification(msgspec.structs.replace(done, **changes))
    )


def checked(block_tokens_of_group: int = 4, **changes: Any) -> object:
    group = CacheGroup(policy="full", block_tokens=block_tokens_of_group)
    check_description(engine(tensor(**changes), groups=(group,)))
    return None


def pieces(count: int) -> object:
    """Cells of a block, one for every head."""
    heads = Range(0, count)
    return checked(heads=heads, block_tokens=1)


AT_LIMIT: dict[str, tuple[Callable[[int], object], int, type[InputError]]] = {
    "keys of params": (
        lambda n: read_changed(**{f"k{i}": i for i in range(n - 13)}),
        MAX_KEYS,
        InvalidParams,
    ),
    "cache groups of params": (
        lambda n: read_changed(remote_block_ids=[[1]] * n),
        MAX_GROUPS,
        InvalidParams,
    ),
    "block ids": (
        lambda n: read_changed(remote_block_ids=[[1] * (n - 1), [2]]),
        MAX_BLOCKS,
        InvalidParams,
    ),
    "a block id": (
        lambda n: read_changed(remote_block_ids=[[n]]),
        2**31 - 1,
        InvalidParams,
    ),
    "digests": (digests, MAX_DIGESTS, InvalidParams),
    "tokens": (
        lambda n: params_of_length(300) and read_changed(remote_num_tokens=n),
        300 + 212,
        InvalidParams,
    ),
    "characters of a name": (
        lambda n: read_changed(remote_host="x" * n),
        512,
        InvalidParams,
    ),
    "a port": (lambda n: read_changed(remote_port=n), 65535, InvalidParams),
    "leases of a renewal": (renewals, MAX_RENEWALS, InvalidMessage),
    "questions of a message": (queries, MAX_QUERIES, InvalidMessage),
    "workers": (workers, MAX_WORKERS, InvalidMessage),
    "tensors of a worker": (tensors, MAX_TENSORS, InvalidMessage),
    "tensors of an engine": (tensors_of_all, MAX_ENGINE_TENSORS, InvalidMessage),
    "scales": (lambda n: described(scales=(1.0,) * n), MAX_SCALES, InvalidMessage),
    "an address": (lambda n: described(base=n), 2**63 - 1, InvalidMessage),
    "a stride": (lambda n: described(block_stride=n), 2**48 - 1, InvalidMessage),
    "blocks": (lambda n: described(blocks=n), 2**40, InvalidMessage),
    "tokens of a tensor's block": (
        lambda n: described(block_tokens=n),
        65536,
        InvalidMessage,
    ),
    "ranks of an interleave": (
        lambda n: described(interleave=Interleave(ranks=n)),
        65536,
        InvalidMessage,
    ),
    "a lease slot": (lambda n: notified(slot=n), 2**24 - 1, InvalidMessage),
    "a worker's index": (lambda n: notified(worker=n), MAX_WORKERS - 1, InvalidMessage),
    "expected workers": (lambda n: notified(expected=n), MAX_WORKERS, InvalidMessage),
    "cells of a head": (
        lambda n: checked(blocks=n, block_stride=0, block_tokens=1),
        2**31 - 1,
        InvalidMessage,
    ),
    "pieces of a block": (pieces, 1 << 24, InvalidMessage),
    "tokens of a group's block": (
        lambda n: checked(block_tokens_of_group=4 * (n // 4) + n % 4 * 4),
        MAX_BLOCK_TOKENS,
        InvalidMessage,
    ),
    "the end of a cache": (
        lambda n: checked(base=n - 7 * 64 - 64),
        1 << 63,
        InvalidMessage,
    ),
}


@pytest.mark.parametrize("what", AT_LIMIT)
def test_the_limit_is_accepted_and_one_more_is_refused(what: str) -> None:
    use, limit, error = AT_LIMIT[what]
    use(limit)
    with pytest.raises(error):
        use(limit + 1)


@pytest.mark.parametrize(
    ("module", "name"),
    [(handshake, "MAX_REQUEST_BYTES"), (handshake, "MAX_REPLY_BYTES")],
)
def test_a_frame_may_have_as_many_bytes_as_its_limit_and_no_more(
    module: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = decode_request if "REQUEST" in name else decode_reply
    frame = encode(
        Renew(boot=BOOT, leases=(LeaseName(slot=1, epoch=EPOCH),))
        if "REQUEST" in name
        else make_description()
    )
    for limit in (len(frame), len(frame) - 1):
        monkeypatch.setattr(module, name, limit)
        if limit == len(frame):
            decode(frame)
        else:
            with pytest.raises(InvalidMessage, match="at most"):
                decode(frame)


def test_a_notification_may_have_as_many_bytes_as_its_limit_and_no_more() -> None:
    body = encode_notification(DONE)[len(MAGIC) :]
    room = MAX_NOTIFICATION_BYTES - len(body) - len(b"\xa5later\xda\x00\x00")
    frames = [
        MAGIC
        + bytes([body[0] + 1])
        + body[1:]
        + b"\xa5later\xda"
        + size.to_bytes(2, "big")
        + b"x" * size
        for size in (room, room + 1)
    ]
    assert decode_notification(frames[0]) == DONE
    with pytest.raises(InvalidMessage, match="at most"):
        decode_notification(frames[1])


def test_a_lease_takes_the_notifications_of_eight_consumers_whatever_their_numbers_and_no_more() -> (
    None
):
    table = LeaseTable(1)
    table.open(LeaseOpen(slot=0, epoch=EPOCH))
    notifications = [
        Done(
            slot=0,
            epoch=EPOCH,
            consumer=f"{index:032x}",
            worker=MAX_WORKERS - 1,
            expected=2,
        )
        for index in range(MAX_CONSUMERS + 1)
    ]
    for done in notifications[:-1]:
        assert table.done(done) is None
    with pytest.raises(InvalidMessage):
        table.done(notifications[-1])
    kept = table._leases[0].reports.values()
    assert len(kept) == MAX_CONSUMERS
    assert all(sys.getsizeof(sent.workers) <= MAX_WORKERS // 8 + 64 for sent in kept), (
        "more than a bit a worker"
    )


def test_a_description_file_may_have_as_many_bytes_as_its_limit_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = encode_engine_json(to_engine_json(make_description()))
    monkeypatch.setattr(description_json, "MAX_DESCRIPTION_JSON_BYTES", len(text))
    decode_engine_json(text)
    with pytest.raises(InvalidDescription, match="at most"):
        decode_engine_json(text + b" ")


def test_an_engine_may_have_as_many_tensors_in_a_file_and_a_short_form_as_at_a_handshake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = [make_worker(place=Place(tp=tp)) for tp in range(2)]
    tensors = sum(len(each.tensors) for each in workers)
    text = encode_engine_json(to_engine_json(make_description(workers=tuple(workers))))
    form = read_form("layers=2,heads=8,dim=64,block=16,layout=NHD,dtype=bfloat16")
    for module in (description_json, short_engine):
        monkeypatch.setattr(module, "MAX_ENGINE_TENSORS", tensors)
    decode_engine_json(text)
    monkeypatch.setattr(description_json, "MAX_ENGINE_TENSORS", tensors - 1)
    with pytest.raises(InvalidDescription, match="at most"):
        decode_engine_json(text)
    monkeypatch.setattr(short_engine, "MAX_ENGINE_TENSORS", 4)
    engine_of_form(form, "a")
    monkeypatch.setattr(short_engine, "MAX_ENGINE_TENSORS", 3)
    with pytest.raises(InvalidArgument, match="more than 3"):
        engine_of_form(form, "a")


def test_the_rows_of_a_plan_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = (
        engine(tensor(), engine_id="C"),
        engine(tensor(head_stride=8, tile_stride=16)),
    )
    rows = 8  # two heads of four tokens, none of which follow one another on both sides
    monkeypatch.setattr(planner, "MAX_ROWS", rows)
    plan_transfer(ours, 0, theirs)
    monkeypatch.setattr(planner, "MAX_ROWS", rows - 1)
    with pytest.raises(PlanRefused, match=f"{rows} rows"):
        plan_transfer(ours, 0, theirs)


def test_the_descriptors_of_a_plan_are_bounded() -> None:
    """A producer that claims a huge cache in short runs: no index has more than 31 bits, in NIXL neither."""
    ours = engine(
        tensor(heads=Range(0, 512), head_stride=32, block_stride=1 << 20), engine_id="C"
    )
    each = [
        tensor(
            heads=Range(0, 512),
            blocks=blocks,
            head_stride=8,
            tile_stride=4096,
            block_stride=1 << 20,
        )
        for blocks in ((1 << 31) // 2048 - 1, (1 << 31) // 2048)
    ]
    plan_transfer(ours, 0, engine(each[0]))
    with pytest.raises(PlanRefused, match=f"{1 << 31} descriptors"):
        plan_transfer(ours, 0, engine(each[1]))


def test_thousands_of_workers_whose_heads_all_overlap_differently_are_refused_in_some_seconds() -> (
    None
):
    ours = engine(tensor(heads=Range(0, 10_000), block_stride=1 << 20), engine_id="C")
    each = [
        worker(
            [tensor(heads=Range(n, 10_000), block_stride=1 << 30)],
            place=Place(tp=n % 64, pp=n // 64),
        )
        for n in range(MAX_WORKERS)
    ]
    started_s = time.process_time()
    with pytest.raises(PlanRefused, match="too many overlapping head ranges"):
        plan_transfer(ours, 0, engine(workers=each))
    assert time.process_time() - started_s < 60
