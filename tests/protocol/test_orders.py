"""Step metadata: it reaches the workers as it left the scheduler, whatever a client chose as its request id."""

from __future__ import annotations

import pickle

import msgspec
import pytest

from kvferry.protocol.orders import (
    ORDERS_VERSION,
    OrdersHead,
    decode_head,
    decode_orders,
    encode_head,
    encode_orders,
)
from tests.protocol.frames import decode_plain, encode_plain, hostile_frames, refused
from tests.protocol.samples import BOOT, make_orders


def test_orders_round_trip_also_through_pickle() -> None:
    orders = make_orders()
    assert decode_orders(encode_orders(orders)) == orders
    assert decode_orders(pickle.loads(pickle.dumps(encode_orders(orders)))) == orders  # noqa: S301 - what vLLM does


@pytest.mark.parametrize(
    "request_id", ["", "x" * 100_000, "line\nbreak", "\x00", "日本"]
)
def test_no_request_id_that_a_client_chose_stops_a_worker(request_id: str) -> None:
    orders = make_orders(request_id)
    assert decode_orders(encode_orders(orders)) == orders


def test_orders_of_another_version_are_refused_by_their_version() -> None:
    later = msgspec.structs.replace(make_orders(), version=ORDERS_VERSION + 1)
    assert refused(decode_orders, encode_orders(later)).field == "version"


def test_hostile_frames_are_invalid_messages() -> None:
    valid = encode_orders(make_orders())
    for name, frame in hostile_frames(valid):
        if frame != encode_plain({}):
            refused(decode_orders, frame)
        else:
            assert refused(decode_orders, frame).field == "boot", name
    plain = decode_plain(valid)
    plain["loads"][0]["source"]["remote_port"] = 0
    assert (
        refused(decode_orders, encode_plain(plain)).field
        == "loads[0].source.remote_port"
    )
    plain = decode_plain(valid)
    plain["prewarms"][0]["host"] = "a\nb"
    assert refused(decode_orders, encode_plain(plain)).field == "prewarms[0].host"


def test_the_head_has_what_is_opened_and_the_names_of_the_loads() -> None:
    head = decode_head(encode_head(make_orders()))
    assert head == OrdersHead(boot=BOOT, opens=make_orders().opens, loads=("cmpl-1",))


def test_the_head_does_not_grow_with_the_blocks_that_are_loaded() -> None:
    orders = make_orders()
    more = msgspec.structs.replace(
        orders.loads[0], local_blocks=(tuple(range(100_000)), ())
    )
    longer = msgspec.structs.replace(orders, loads=(more,))
    assert encode_head(longer) == encode_head(orders)


def test_heads_of_another_version_and_hostile_ones_are_invalid_messages() -> None:
    later = msgspec.structs.replace(make_orders(), version=ORDERS_VERSION + 1)
    assert refused(decode_head, encode_head(later)).field == "version"
    for name, frame in hostile_frames(encode_head(make_orders())):
        assert refused(decode_head, frame).field, name
