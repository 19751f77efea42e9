"""Fuzz targets: functions of bytes that raise only where kvferry has a bug.

`test_targets.py` runs them under hypothesis, `run_atheris.py` under a coverage-guided fuzzer. `ALL` has them by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec

from kvferry.protocol.convert import as_type
from kvferry.protocol.description_json import (
    EngineJson,
    decode_engine_json,
    encode_engine_json,
    engine_json_of,
    engine_of,
)
from kvferry.protocol.digests import Prompt, shared_tokens
from kvferry.protocol.errors import InputError, InvalidDescription, InvalidMessage, InvalidParams
from kvferry.protocol.handshake import (
    EngineDescription,
    Hello,
    LeaseName,
    Refused,
    Release,
    Renew,
    decode_reply,
    decode_request,
    decode_worker,
    encode,
)
from kvferry.protocol.ids import epoch_from_text, epoch_to_text
from kvferry.protocol.notifications import MAGIC, Done, decode_notification, encode_notification
from kvferry.protocol.orders import (
    LeaseEnd,
    LeaseHold,
    LeaseOpen,
    LoadOrder,
    OrdersHead,
    Prewarm,
    StepOrders,
    decode_head,
    decode_orders,
    encode_head,
    encode_orders,
)
from kvferry.protocol.params import MAX_KEYS, RemoteDecode, RemotePrefill, read_params, read_turn
from kvferry.protocol.params_mac import check_params_mac, sign_params
from kvferry.scheduler.consumer.remote_lease import RemoteLease
from kvferry.worker.fabric.errors import InvalidMetadata
from kvferry.worker.fabric.metadata import open_metadata, wrap_metadata
from tests.fuzz.lease_target import leases
from tests.fuzz.mutation import mutate
from tests.fuzz.plan_targets import connecting, pairing, planning
from tests.fuzz.source import Source
from tests.protocol.samples import BOOT, EPOCH, KEY, make_description, make_params, make_worker

Target = Callable[[bytes], None]
Check = Callable[[bytes], None]

MOST_SHOWN = 700
"""Characters of an error: what is logged must not grow with what was sent."""

LEASES = (LeaseName(slot=7, epoch=EPOCH), LeaseName(slot=8, epoch="f" * 15))
REQUESTS: tuple[Hello | Renew | Release, ...] = (
    Hello(engine_id="prefill-0", asker="decode-3"),
    Renew(boot=BOOT, leases=LEASES),
    Release(boot=BOOT, leases=LEASES[:1]),
)
REPLIES: tuple[EngineDescription | Refused, ...] = (
    make_description(),
    Refused(field="version", value="2", expected="1"),
)
DONE = Done(slot=7, epoch=EPOCH, consumer=BOOT, worker=3, expected=4)
SIGNED = sign_params(make_params(), KEY)
ORDERS = StepOrders(
    boot=BOOT,
    ends=(LeaseEnd(request_id="r1", slot=3, epoch=EPOCH),),
    opens=(LeaseOpen(slot=4, epoch=EPOCH),),
    holds=(LeaseHold(request_id="r2", slot=5, epoch=EPOCH, blocks=((1, 2), ())),),
    loads=(LoadOrder(request_id="r3", source=SIGNED, local_blocks=((1,), (2,)), first_token=0, stop_token=300),),
    prewarms=(Prewarm.of(SIGNED),),
)


def check_refusal(refused: InputError) -> None:
    """It names its field, in a text that may be logged."""
    assert refused.field
    check_text(str(refused))


def check_text(text: str) -> None:
    """It may be logged: short, and encodable."""
    assert len(text) <= MOST_SHOWN, len(text)
    text.encode()


def request(data: bytes) -> None:
    """A frame at the listener."""
    try:
        found = decode_request(data)
    except InvalidMessage as refused:
        return check_refusal(refused)
    assert decode_request(encode(found)) == found
    for name in () if isinstance(found, Hello) else found.leases:
        assert epoch_to_text(epoch_from_text(name.epoch)) == name.epoch
        assert epoch_from_text(name.epoch)
    return None


def reply(data: bytes) -> None:
    """A frame from a producer."""
    try:
        found = decode_reply(data)
    except InvalidMessage as refused:
        return check_refusal(refused)
    assert decode_reply(encode(found)) == found
    if isinstance(found, EngineDescription):
        assert engine_of(engine_json_of(found)).facts == found.facts
    return None


def worker(data: bytes) -> None:
    """The description that a worker gave to its scheduler."""
    try:
        found = decode_worker(data)
    except InvalidMessage as refused:
        return check_refusal(refused)
    assert decode_worker(encode(found)) == found
    return None


def notification(data: bytes) -> None:
    """A notification over the fabric."""
    try:
        found = decode_notification(data)
    except InvalidMessage as refused:
        return check_refusal(refused)
    assert decode_notification(encode_notification(found)) == found
    assert found.worker < found.expected or found.worker < 4096
    return None


def orders(data: bytes) -> None:
    """A step's orders."""
    try:
        found = decode_orders(data)
    except InvalidMessage as refused:
        return check_refusal(refused)
    assert decode_orders(encode_orders(found)) == found
    return None


def head(data: bytes) -> None:
    """The head of a step's orders."""
    try:
        found = decode_head(data)
    except InvalidMessage as refused:
        return check_refusal(refused)
    assert decode_head(encode_head(StepOrders(boot=found.boot, opens=found.opens))).opens == found.opens
    return None


def metadata(data: bytes) -> None:
    """An agent's metadata."""
    try:
        name, body = open_metadata(data)
    except InvalidMetadata as refused:
        return check_text(str(refused))
    assert open_metadata(wrap_metadata(name, body)) == (name, body)
    return None


def description_json(data: bytes) -> None:
    """A description file."""
    try:
        found = decode_engine_json(data)
    except InvalidDescription as refused:
        return check_refusal(refused)
    assert decode_engine_json(encode_engine_json(found)) == found
    engine_of(found)
    return None


def params(data: bytes) -> None:
    """Params of a client, as JSON: Python's reader takes NaN, infinities, lone surrogates and any integer."""
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError):
        return
    use_params(raw)
    use_params({"do_remote_prefill": True, "kvferry": raw})


def use_params(raw: Any) -> None:
    """Read params as the engine does, and use what was read as it does."""
    try:
        found = read_params(raw)
        if isinstance(raw, dict) and isinstance(found, RemoteDecode):
            found = read_turn(raw)
    except InvalidParams as refused:
        return check_refusal(refused)
    if not isinstance(found, RemotePrefill):
        return None
    assert len(raw) <= MAX_KEYS
    again = read_params(json.loads(json.dumps(found.to_json()), parse_int=float))
    assert again == found
    prompt = Prompt(tokens=range(300))
    assert 0 <= shared_tokens(prompt, found.kvferry.digests, found.remote_num_tokens) <= found.remote_num_tokens
    assert RemoteLease.of(found).key
    try:
        check_params_mac(found, KEY)
    except InvalidParams as refused:
        return check_refusal(refused)
    covered = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port", "remote_num_tokens")
    assert all(getattr(found, name) == getattr(SIGNED, name) for name in covered), "a MAC of other params"
    assert found.kvferry.lease_ms == SIGNED.kvferry.lease_ms
    assert found.kvferry == msgspec.structs.replace(SIGNED.kvferry, lease_s=found.kvferry.lease_s)
    return None


def digests(data: bytes) -> None:
    """A chain of digests and a prompt that have nothing to do with one another."""
    source = Source(data)
    tokens = [source.number(2**32) for _ in range(source.number(600))]
    count = source.pick((1, 255, 256, 257, 600, 2**40))
    chain = ["0" * 32 for _ in range(source.number(5))]
    assert shared_tokens(Prompt(tokens=tokens), chain, count) == 0


def mutated_request(data: bytes) -> None:
    """A valid frame at the listener with hostile values in it."""
    source = Source(data)
    request(_mutated(source, source.pick(REQUESTS)))


def mutated_reply(data: bytes) -> None:
    """A valid description with hostile values in it."""
    source = Source(data)
    reply(_mutated(source, source.pick(REPLIES)))


def mutated_worker(data: bytes) -> None:
    """A valid worker with hostile values in it."""
    worker(_mutated(Source(data), make_worker()))


def mutated_notification(data: bytes) -> None:
    """A valid notification with hostile values in it."""
    notification(MAGIC + _mutated(Source(data), DONE))


def mutated_orders(data: bytes) -> None:
    """Valid orders with hostile values in them."""
    orders(_mutated(Source(data), ORDERS))


def mutated_head(data: bytes) -> None:
    """A valid head of orders with hostile values in it."""
    head(_mutated(Source(data), OrdersHead.of(ORDERS)))


def mutated_params(data: bytes) -> None:
    """Valid params with hostile values in them, as a router may hand them on."""
    source = Source(data)
    flags = source.number(2)
    raw = SIGNED.to_json(is_turn=bool(flags))
    use_params(mutate(source, raw))


def mutated_description_json(data: bytes) -> None:
    """A valid description file with hostile values in it."""
    source = Source(data)
    plain = mutate(source, msgspec.to_builtins(engine_json_of(make_description())))
    description_json(json.dumps(plain).encode("utf-8", "surrogatepass"))
    try:
        as_type(plain, EngineJson, InvalidDescription)
    except InvalidDescription as refused:
        check_refusal(refused)


def _mutated(source: Source, message: Any) -> bytes:
    plain = mutate(source, msgspec.to_builtins(message, builtin_types=(bytes,)))
    return msgspec.msgpack.encode(plain)


ALL: dict[str, Target] = {
    target.__name__: target
    for target in (
        *(request, reply, worker, notification, orders, head, metadata, description_json, params, digests),
        *(mutated_request, mutated_reply, mutated_worker, mutated_notification, mutated_orders),
        *(mutated_head, mutated_params, mutated_description_json, leases, planning, pairing, connecting),
    )
}
