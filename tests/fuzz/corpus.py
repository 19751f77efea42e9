"""Where fuzzers begin: valid messages, and decisions that lead to them."""

from __future__ import annotations

import functools
import json

from kvferry.protocol.description_json import encode_engine_json, engine_json_of
from kvferry.protocol.handshake import encode
from kvferry.protocol.notifications import MAGIC, encode_notification
from kvferry.protocol.orders import encode_orders
from kvferry.worker.fabric.metadata import wrap_metadata
from tests.fuzz.mutation import DEPTH
from tests.fuzz.targets import DONE, ORDERS, REPLIES, REQUESTS, SIGNED
from tests.protocol.samples import make_description, make_worker

DECISIONS = tuple(bytes([first]) + bytes(range(start, start + 24)) for first in range(8) for start in (0, 100))
"""Seeds of targets whose bytes are decisions, see `tests.fuzz.source`."""


@functools.cache
def seeds(target: str) -> tuple[bytes, ...]:
    """Seeds of one target."""
    found: dict[str, tuple[bytes, ...]] = {
        "request": tuple(map(encode, REQUESTS)),
        "reply": tuple(map(encode, REPLIES)),
        "worker": (encode(make_worker()),),
        "notification": (encode_notification(DONE),),
        "orders": (encode_orders(ORDERS),),
        "metadata": (wrap_metadata("prefill-0/tp1", b"body"),),
        "description_json": (
            encode_engine_json(engine_json_of(make_description())),
            encode_engine_json(engine_json_of(make_description()))[:-3] + b',"":0}',
        ),
        "params": (
            *(json.dumps(SIGNED.to_json(is_turn=turn)).encode() for turn in (False, True)),
            *(b"[1]", b"7", b"NaN", b'"ticket"', b"true", b'{"version":NaN}', b'{"version":1e999}'),
        ),
    }
    if target not in found:
        return DECISIONS
    return (*found[target], *_deep(target))


def _deep(target: str) -> tuple[bytes, ...]:
    """As deep as a frame can be nested, or 10,000 levels of JSON."""
    if target in ("description_json", "params"):
        return (b"[" * DEPTH, b"[" * DEPTH + b"]" * DEPTH, b'{"a":' * DEPTH + b"1" + b"}" * DEPTH)
    magic = MAGIC if target == "notification" else b""
    return (magic + b"\x91" * 4000, magic + b"\x81\xa1a" * 1300, b"\x91" * 60_000)
