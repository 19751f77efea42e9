"""Fuzz targets: functions of bytes that raise only where kvferry has a bug.

`test_targets.py` runs them under hypothesis, `run_atheris.py` under a coverage-guided fuzzer. `ALL` has them by name.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec

from kvferry.link.commands import RemoteLease
from kvferry.protocol.convert import as_type
from kvferry.protocol.description_json import (
    EngineJson,
    decode_engine_json,
    encode_engine_json,
    from_engine_json,
    to_engine_json,
)
from kvferry.protocol.digests import Prompt, shared_tokens
from kvferry.protocol.errors import InputError, InvalidDescription, InvalidParams
from kvferry.protocol.handshake import (
    EngineDescription,
    Hello,
    Refused,
    Release,
    Renew,
    decode_reply,
    decode_request,
    decode_worker,
    encode,
)
from kvferry.protocol.orders import (
    decode_head,
    decode_orders,
    encode_head,
    encode_orders,
)
from kvferry.protocol.params import (
    MAX_KEYS,
    RemoteDecode,
    RemotePrefill,
    check_params_mac,
    decode_params,
    read_params,
    read_turn,
    sign_params,
)
from kvferry.protocol.prefix_sources import (
    FETCH,
    MAX_SOURCES,
    SOURCE_KEY,
    PrefixSource,
    read_hints,
    read_sources,
)
from kvferry.protocol.queries import (
    Answers,
    FindPrefixes,
    Subscribe,
    Unsubscribe,
    decode_answers,
)
from kvferry.protocol.slots import (
    MAGIC,
    decode_notification,
    encode_notification,
    epoch_from_text,
    epoch_to_text,
)
from kvferry.scheduler.producer.prompt_directory import PromptDirectory
from kvferry.worker.fabric.errors import InvalidMetadata
from kvferry.worker.fabric.metadata_envelope import open_metadata, wrap_metadata
from tests.fuzz.mutation import Source, mutate
from tests.fuzz.plan_targets import connecting, pairing, planning
from tests.protocol.samples import (
    ANSWERS,
    ASKS,
    DONE,
    KEY,
    REPLIES,
    REQUESTS,
    make_description,
    make_orders,
    make_params,
    make_worker,
)

Target = Callable[[bytes], None]

MOST_SHOWN = 700
"""Characters of an error: what is logged must not grow with what was sent."""

SIGNED = sign_params(make_params(), KEY)


def check_refusal(refused: InputError | InvalidMetadata) -> None:
    """It names its field, in a text that may be logged: short, and encodable."""
    assert isinstance(refused, InvalidMetadata) or refused.field
    assert len(str(refused)) <= MOST_SHOWN, len(str(refused))
    str(refused).encode()


def use_request(
    found: Hello | Renew | Release | Subscribe | FindPrefixes | Unsubscribe,
) -> None:
    """As the listener does."""
    directory = PromptDirectory()
    if isinstance(found, Subscribe):
        assert len(directory.subscribe(b"peer", found).answers) == len(found.queries)
    elif isinstance(found, Unsubscribe):
        directory.unsubscribe(found)
    for name in found.leases if isinstance(found, (Renew, Release)) else ():
        assert epoch_to_text(epoch_from_text(name.epoch)) == name.epoch
        assert epoch_from_text(name.epoch)


def use_answers(found: Answers) -> None:
    """As the asker's engine does."""
    for answer in found.answers:
        try:
            use_source(decode_params(answer.params, 300))
        except InvalidParams as refused:
            check_refusal(refused)


def use_reply(found: EngineDescription | Refused) -> None:
    """As `kvferry describe` does."""
    if isinstance(found, EngineDescription):
        assert from_engine_json(to_engine_json(found)).facts == found.facts


class Format(NamedTuple):
    """A kind of message: valid ones, how they are written and read, and what is done with one that was read."""

    messages: tuple[Any, ...]
    write: Callable[[Any], bytes]
    read: Callable[[bytes], Any]
    use: Callable[[Any], object] = repr
    magic: bytes = b""


FORMATS: dict[str, Format] = {
    "request": Format((*REQUESTS, *ASKS), encode, decode_request, use_request),
    "answers": Format((ANSWERS,), encode, decode_answers, use_answers),
    "reply": Format(REPLIES, encode, decode_reply, use_reply),
    "worker": Format((make_worker(),), encode, decode_worker),
    "notification": Format(
        (DONE,), encode_notification, decode_notification, magic=MAGIC
    ),
    "orders": Format((make_orders(),), encode_orders, decode_orders),
    "head": Format(
        (decode_head(encode_head(make_orders())),), msgspec.msgpack.encode, decode_head
    ),
}
"""In msgpack."""
OTHER_FORMATS: dict[str, Format] = {
    "metadata": Format(
        (("prefill-0/tp1", b"body"),),
        lambda named: wrap_metadata(*named),
        open_metadata,
    ),
    "description_json": Format(
        (to_engine_json(make_description()),),
        encode_engine_json,
        decode_engine_json,
        from_engine_json,
    ),
}


def read_frame(form: Format, data: bytes) -> None:
    """Any bytes are a message, which survives being written, or are refused."""
    try:
        found = form.read(data)
    except (InputError, InvalidMetadata) as refused:
        return check_refusal(refused)
    assert form.read(form.write(found)) == found
    form.use(found)
    return None


def read_mutated(form: Format, data: bytes) -> None:
    """A valid message in msgpack with hostile values in it."""
    source = Source(data)
    message = msgspec.msgpack.encode(source.pick(form.messages))
    plain = mutate(source, msgspec.msgpack.decode(message))
    with contextlib.suppress(OverflowError):  # an integer that msgpack has no form for
        read_frame(form, form.magic + msgspec.msgpack.encode(plain))


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
    if isinstance(found, RemotePrefill):
        assert len(raw) <= MAX_KEYS
        use_source(found)
    return None


def use_source(found: RemotePrefill) -> None:
    """Use the params of a remote prefill as the engine does."""
    plain = found.to_json(at_once=found.transfer_mode == "push")
    again = read_params(json.loads(json.dumps(plain), parse_int=float))
    assert again == found
    prompt = Prompt(tokens=range(300))
    assert (
        0
        <= shared_tokens(prompt, found.kvferry.digests, found.remote_num_tokens)
        <= found.remote_num_tokens
    )
    assert RemoteLease.from_params(found).key
    try:
        check_params_mac(found, KEY)
    except InvalidParams as refused:
        check_refusal(refused)
        return
    covered = (
        "remote_engine_id",
        "remote_block_ids",
        "remote_host",
        "remote_port",
        "remote_num_tokens",
    )
    assert all(getattr(found, name) == getattr(SIGNED, name) for name in covered), (
        "a MAC of other params"
    )
    assert round(found.kvferry.lease_s * 1000) == round(SIGNED.kvferry.lease_s * 1000)
    assert round(found.kvferry.opens_within_s * 1000) == 0
    assert found.kvferry == msgspec.structs.replace(
        SIGNED.kvferry,
        lease_s=found.kvferry.lease_s,
        opens_within_s=found.kvferry.opens_within_s,
    )


def digests(data: bytes) -> None:
    """A chain of digests and a prompt that have nothing to do with one another."""
    source = Source(data)
    tokens = [source.number(2**32) for _ in range(source.number(600))]
    count = source.pick((1, 255, 256, 257, 600, 2**40))
    chain = ["0" * 32 for _ in range(source.number(5))]
    assert shared_tokens(Prompt(tokens=tokens), chain, count) == 0


def mutated_params(data: bytes) -> None:
    """Valid params with hostile values in them, as a router may hand them on."""
    source = Source(data)
    is_turn = bool(source.number(2))
    raw = mutate(source, SIGNED.to_json(is_turn=is_turn))
    before = repr(raw)
    use_params(raw)
    assert repr(raw) == before, "the caller's object was changed"


def mutated_sources(data: bytes) -> None:
    """Sources of prefixes with hostile values in them, as routers name them in params and in hints."""
    raw = mutate(Source(data), {SOURCE_KEY: [_NAMED, _NAMED], "hint": _HINTED})
    if not isinstance(raw, dict):
        return
    hint = raw.get("hint")
    if isinstance(hint, dict):
        # vLLM has checked that an action is one, and nothing of its payload.
        action = SimpleNamespace(**{**_HINTED, **hint, "action_type": FETCH})
        actions = [action]
    else:
        actions = []
    _check_sources(functools.partial(read_sources, raw))
    _check_sources(functools.partial(read_hints, actions))


def _check_sources(read: Callable[[], tuple[PrefixSource, ...]]) -> None:
    try:
        found = read()
    except InvalidParams as refused:
        check_refusal(refused)
        return
    assert len(found) <= MAX_SOURCES
    for source in found:
        assert 1 <= source.remote_port <= 65535
        assert 1 <= len(source.remote_host) <= 512


_NAMED = {"kv_request_id": "x", "remote_host": "10.1.2.3", "remote_port": 7777}
_HINTED = {
    "action_version": "1.0",
    "payload": {
        "source_control_endpoint": "tcp://10.1.2.3:7777",
        "block_hashes": [1, 2],
        "mode": "copy",
    },
}


def mutated_description_json(data: bytes) -> None:
    """A valid description file with hostile values in it."""
    plain = mutate(
        Source(data), msgspec.to_builtins(to_engine_json(make_description()))
    )
    read_frame(
        OTHER_FORMATS["description_json"],
        json.dumps(plain).encode("utf-8", "surrogatepass"),
    )
    try:
        as_type(plain, EngineJson, InvalidDescription)
    except InvalidDescription as refused:
        check_refusal(refused)


_OTHERS = (
    params,
    mutated_params,
    mutated_sources,
    mutated_description_json,
    digests,
    planning,
    pairing,
    connecting,
)
ALL: dict[str, Target] = {
    **{
        name: functools.partial(read_frame, form)
        for name, form in (FORMATS | OTHER_FORMATS).items()
    },
    **{
        f"mutated_{name}": functools.partial(read_mutated, form)
        for name, form in FORMATS.items()
    },
    **{target.__name__: target for target in _OTHERS},
}


DEPTH = 10_000
"""Levels of JSON."""

DECISIONS = tuple(
    bytes([first]) + bytes(range(start, start + 24))
    for first in range(8)
    for start in (0, 100)
)
"""Seeds of targets whose bytes are decisions, see `Source`."""

_DEEP_JSON = (
    b"[" * DEPTH,
    b"[" * DEPTH + b"]" * DEPTH,
    b'{"a":' * DEPTH + b"1" + b"}" * DEPTH,
)
_ODD_JSON = (
    b"[1]",
    b"7",
    b"NaN",
    b'"ticket"',
    b"true",
    b'{"version":NaN}',
    b'{"version":1e999}',
)


@functools.cache
def seeds(target: str) -> tuple[bytes, ...]:
    """Seeds of one target: valid messages, and nesting as deep as a frame can have."""
    if target == "params":
        signed = (
            json.dumps(SIGNED.to_json(is_turn=turn)).encode() for turn in (False, True)
        )
        return (*signed, *_ODD_JSON, *_DEEP_JSON)
    form = (FORMATS | OTHER_FORMATS).get(target)
    if form is None:
        return DECISIONS
    valid = map(form.write, form.messages)
    if target == "description_json":
        (text,) = valid
        return (text, text[:-3] + b',"":0}', *_DEEP_JSON)
    return (
        *valid,
        form.magic + b"\x91" * 4000,
        form.magic + b"\x81\xa1a" * 1300,
        b"\x91" * 60_000,
    )
