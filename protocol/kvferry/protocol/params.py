"""`kv_transfer_params`: the JSON object that a router passes from the producer's answer to the consumer's request.

Routers that support the NIXL contract pass this object on unread. Its flat keys are those of that contract; kvferry's
own fields are in one nested object, `kvferry`.

Evolution rules: a new key needs a default; a key is never retyped or reused; unknown keys are ignored; a change that an
old reader would misunderstand raises `PARAMS_VERSION`, and a reader refuses versions it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvferry.protocol.convert import as_type, decode
from kvferry.protocol.errors import MISSING, ForeignParams, InvalidParams
from kvferry.protocol.ids import (
    BlockId,
    Count,
    Hex128,
    Hex256,
    HexEpoch,
    Port,
    Positive,
    Size,
    SlotIndex,
    Text,
)
from kvferry.protocol.prompt_queries import MAX_ANSWERS_BYTES, boot_of, engine_of
from kvferry.protocol.stream_rows import RowIndex

PARAMS_VERSION = 1
MAX_BLOCKS = 1 << 20
"""Most block ids in one object, all groups together: 16 M tokens at 16 tokens a block."""
MAX_GROUPS = 64
MAX_DIGESTS = 1 << 16
"""Most digests, at 256 tokens a digest: as many tokens as `MAX_BLOCKS` blocks of 16 hold."""
MAX_KEYS = 64
_SPARE_BLOCKS = 1024
_SPARE_BYTES = 1 << 16
SHORTEST_LEASE_S = 0.05
"""A lease is renewed six times in its lifetime; a shorter one would keep its consumer busy with renewals alone."""

_OBJECTS = (dict, Mapping)  # `dict` first: checking against an abstract class is slow

Blocks = tuple[tuple[BlockId, ...], ...]
"""One list of block ids per cache group: scheduler blocks, in the order of the tokens that they hold."""


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """The right to read one request's blocks: the object under the key `kvferry`.

    Attributes:
        version: of this object; a reader refuses unknown versions.
        boot: the producer's boot.
        lease_slot: index into the lease table of every producer worker.
        lease_epoch: the epoch that the slot must hold, with READY, before and after the read.
        lease_s: the producer frees the blocks after this long without a renewal.
        digests: `kvferry.protocol.digests.digest_chain` of the tokens in the blocks.
        mac: `kvferry.protocol.params_mac.sign_params` over the params, all fields of the ticket included.
        held_from: per cache group the first token that its blocks hold; empty if the producer does not give it.
        stream_row: where the blocks of a prompt that is being computed are listed, in place of `remote_block_ids`.
        opens_within_s: how long after the ticket the workers may open the slot; 0 if they have.
    """

    version: Annotated[int, Meta(ge=1, le=2**31)]
    boot: Hex128
    lease_slot: SlotIndex
    lease_epoch: HexEpoch
    lease_s: Annotated[float, Meta(ge=SHORTEST_LEASE_S, le=86400 * 7)]
    digests: Annotated[tuple[Hex128, ...], Meta(min_length=1, max_length=MAX_DIGESTS)]
    mac: Hex256
    held_from: Annotated[tuple[Count, ...], Meta(max_length=MAX_GROUPS)] = ()
    opens_within_s: Annotated[float, Meta(ge=0.0, le=60.0)] = 0.0
    stream_row: RowIndex | None = None


class RemotePrefill(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt whose KV cache lies on another engine: the whole object as the consumer receives it.

    Attributes:
        do_remote_prefill, do_remote_decode: the requested transfer; swapped in a turn's offer.
        remote_engine_id: the producer, with its boot (`announced_id`).
        remote_request_id: the producer's id of the request, not the client's.
        remote_block_ids: one list per cache group: scheduler blocks, in the order of the tokens that they hold.
        remote_host, remote_port: the producer's side channel.
        tp_size, pp_size, dcp_size: the producer's parallel sizes, for routers; the plan uses the description's.
        remote_num_tokens: tokens whose KV the blocks hold.
        transfer_mode: the consumer always reads; `push` makes routers send both legs of the next requests at once.
        kvferry: the ticket.
    """

    do_remote_prefill: Literal[True] = True
    do_remote_decode: Literal[False] = False
    remote_engine_id: Text
    remote_request_id: Text
    remote_block_ids: Annotated[Blocks, Meta(min_length=1, max_length=MAX_GROUPS)]
    remote_host: Text
    remote_port: Port
    tp_size: Size
    pp_size: Size = 1
    dcp_size: Size = 1
    remote_num_tokens: Positive
    transfer_mode: Literal["pull", "push"] = "pull"
    kvferry: Ticket

    @property
    def engine_id(self) -> str:
        """The producer."""
        return engine_of(self.remote_engine_id)

    @property
    def boot(self) -> str:
        """The producer's boot."""
        return self.kvferry.boot

    def to_json(self, *, is_turn: bool = False, at_once: bool = False) -> dict[str, Any]:
        """Plain objects (dict, list, int, float, str) for the HTTP answer.

        Args:
            at_once: whether routers may send both legs of later requests at once. The mac does not cover it.
            is_turn: it is for the prefill of the conversation's next turn, and gets the flags of that leg, as unsigned.
        """
        ticket = msgspec.structs.asdict(self.kvferry)
        ticket |= {"digests": list(self.kvferry.digests), "held_from": list(self.kvferry.held_from)}
        plain = msgspec.structs.asdict(self)
        plain |= {
            "do_remote_prefill": not is_turn,
            "do_remote_decode": is_turn,
            "remote_block_ids": list(map(list, self.remote_block_ids)),
            "transfer_mode": "push" if at_once else "pull",
            "kvferry": ticket,
        }
        return plain


class RemoteDecode(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt to be prefilled here and decoded elsewhere, as a router sends it to the producer.

    The params may also contain the offer of a turn, see `read_turn`.
    """


class NamedPrefill(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that another engine prefills at this moment, from a router that sends both legs at once: the producer is
    named, and has to be asked for the ticket.

    Attributes:
        remote_engine_id: the producer, with its boot (`announced_id`).
        remote_host, remote_port: its side channel.
        remote_request_id: a part of the id of both legs, if the router sends it.
        transfer_id: the same on both legs, where routers send one.
    """

    remote_engine_id: Text
    remote_host: Text
    remote_port: Port
    remote_request_id: Text | None = None
    transfer_id: Text | None = None

    @property
    def engine_id(self) -> str:
        """The producer."""
        return engine_of(self.remote_engine_id)

    @property
    def boot(self) -> str | None:
        """The producer's boot, where it is announced."""
        return boot_of(self.remote_engine_id)


_OF_A_TRANSFER = frozenset(
    (
        *RemotePrefill.__struct_fields__,
        *NamedPrefill.__struct_fields__,
        "remote_prefill_cached_tokens",
        "remote_blocks_expiry_time",
    )
)
"""The keys of the NIXL contract, and kvferry's."""

_answered: msgspec.msgpack.Decoder[RemotePrefill] = msgspec.msgpack.Decoder(RemotePrefill)
_FIELDS, _TICKET_FIELDS = (frozenset(of.__struct_fields__) for of in (RemotePrefill, Ticket))


def read_params(
    raw: object, prompt_tokens: int | None = None
) -> RemotePrefill | NamedPrefill | RemoteDecode | None:
    """Read the `kv_transfer_params` of a request.

    Args:
        raw: the value that a client or router sent, of any type; None when there was none.
        prompt_tokens: of the request, see `most_blocks`; None if they are not read for a request.

    Returns:
        The requested transfer, or None when the object requests none.

    Raises:
        ForeignParams: a remote prefill of an engine that does not run kvferry.
        InvalidParams: it is not usable; the error names the field.
    """
    if raw is None:
        return None
    if not isinstance(raw, _OBJECTS):
        raise InvalidParams("kv_transfer_params", raw, "an object")
    if len(raw) > MAX_KEYS:
        raise InvalidParams("kv_transfer_params", f"{len(raw)} keys", f"at most {MAX_KEYS} keys")
    prefill, decode = (_flag(raw, key) for key in ("do_remote_prefill", "do_remote_decode"))
    if prefill and decode:
        raise InvalidParams("do_remote_decode", True, "false, since do_remote_prefill is true")
    if decode:
        return RemoteDecode()
    if not prefill:
        return None
    return _read_named_prefill(raw) if _is_named(raw) else _read_remote_prefill(raw, prompt_tokens)


def decode_params(encoded: msgspec.Raw, prompt_tokens: int | None = None) -> RemotePrefill:
    """The params in a producer's answer to a question.

    Args:
        prompt_tokens: of the prompt to be loaded, see `most_blocks`; None for one that is not loaded.

    Raises:
        InvalidParams: they are not usable; the error names the field.
    """
    most_bytes = min(MAX_ANSWERS_BYTES, _SPARE_BYTES + 8 * most_blocks(prompt_tokens))
    params = decode(bytes(encoded), _answered, most_bytes, InvalidParams)
    if params.kvferry.version != PARAMS_VERSION:
        raise InvalidParams("kvferry.version", params.kvferry.version, f"{PARAMS_VERSION}")
    _check_counts(
        sum(map(len, params.remote_block_ids)), len(params.kvferry.digests), prompt_tokens
    )
    return _with_its_digests(params)


def most_blocks(prompt_tokens: int | None) -> int:
    """Most block ids that params may list for a prompt of so many tokens, all groups together: reading them takes time
    of the engine's thread, and a client chooses their number. Four per token are more than any layout has."""
    return (
        MAX_BLOCKS if prompt_tokens is None else min(MAX_BLOCKS, _SPARE_BLOCKS + 4 * prompt_tokens)
    )


def _check_counts(num_blocks: int, num_digests: int, prompt_tokens: int | None) -> None:
    most = most_blocks(prompt_tokens)
    expected = (
        f"at most {most}"
        if most == MAX_BLOCKS
        else f"at most {most} for a prompt of {prompt_tokens} tokens"
    )
    if num_blocks > most:
        raise InvalidParams("remote_block_ids", f"{num_blocks} block ids", expected)
    if num_digests > most:
        raise InvalidParams("kvferry.digests", f"{num_digests} digests", expected)


def _is_named(raw: Mapping[str, Any]) -> bool:
    """Whether there is no ticket, from an engine that answers questions. Other engines may end over a question."""
    engine_id = raw.get("remote_engine_id")
    has_ticket = bool(raw.get("kvferry") or raw.get("remote_block_ids"))
    return not has_ticket and isinstance(engine_id, str) and boot_of(engine_id) is not None


def _read_named_prefill(raw: Mapping[str, Any]) -> NamedPrefill:
    plain = {key: _integral(raw[key]) for key in NamedPrefill.__struct_fields__ if key in raw}
    return as_type(plain, NamedPrefill, InvalidParams)


def read_turn(raw: Mapping[str, Any], prompt_tokens: int | None = None) -> RemotePrefill | None:
    """Read the offer of the conversation's last turn in the params of a prompt to be prefilled here.

    Args:
        raw: params that `read_params` read as a `RemoteDecode`.
        prompt_tokens: as there.

    Returns:
        The location of the last turn's prompt and answer, or None when nothing is offered (routers then send null for
        each key).

    Raises:
        ForeignParams: the offer is of an engine that does not run kvferry.
        InvalidParams: it is not usable; the error names the field.
    """
    return _read_remote_prefill(raw, prompt_tokens) if raw.get("remote_block_ids") else None


def without_transfer(raw: object) -> dict[str, Any] | None:
    """Params of a request for which nothing is transferred, as a new object: the keys of others, as connectors beside
    this one under a MultiConnector read them. None if there are none."""
    if not isinstance(raw, _OBJECTS) or len(raw) > MAX_KEYS:
        return None
    return {key: value for key, value in raw.items() if key not in _OF_A_TRANSFER} or None


def read_transfer_id(raw: object) -> str | None:
    """The `transfer_id` in params that `read_params` has read; None without a usable one."""
    found = raw.get("transfer_id") if isinstance(raw, Mapping) else None
    return found if isinstance(found, str) and 0 < len(found) <= 512 else None


def _read_remote_prefill(raw: Mapping[str, Any], prompt_tokens: int | None) -> RemotePrefill:
    ticket = raw.get("kvferry")
    if ticket is None:
        raise ForeignParams("kvferry", MISSING, "the object that a kvferry producer adds")
    if not isinstance(ticket, _OBJECTS):
        raise InvalidParams("kvferry", ticket, "an object")
    if len(ticket) > MAX_KEYS:
        raise InvalidParams("kvferry", f"{len(ticket)} keys", f"at most {MAX_KEYS} keys")
    _check_lengths(raw.get("remote_block_ids"), ticket.get("digests"), prompt_tokens)
    return _read_at_once(raw) or _read_part_by_part(raw, ticket)


def _check_lengths(groups: object, digests: object, prompt_tokens: int | None) -> None:
    """Bound the ids and digests before they are read one by one."""
    if not isinstance(groups, (list, tuple)):
        raise InvalidParams(
            "remote_block_ids", groups, "a list of lists of block ids, one per cache group"
        )
    if len(groups) > MAX_GROUPS:
        raise InvalidParams(
            "remote_block_ids", f"{len(groups)} groups", f"at most {MAX_GROUPS} cache groups"
        )
    for index, group in enumerate(groups):
        if not isinstance(group, (list, tuple)):
            raise InvalidParams(f"remote_block_ids[{index}]", group, "a list of block ids")
    num_digests = len(digests) if isinstance(digests, (list, tuple)) else 0
    _check_counts(sum(map(len, groups)), num_digests, prompt_tokens)


def _read_at_once(raw: Mapping[str, Any]) -> RemotePrefill | None:
    """Fast path for params that no router changed. None for all others, which may still be readable."""
    try:
        params = msgspec.convert(raw, RemotePrefill)
    except (
        msgspec.ValidationError,
        UnicodeEncodeError,
    ):  # UnicodeEncodeError: a key with half a surrogate pair
        return None
    is_known = params.kvferry.version == PARAMS_VERSION
    return params if is_known and len(params.kvferry.digests) == _num_digests(params) else None


def _read_part_by_part(raw: Mapping[str, Any], ticket: Mapping[str, Any]) -> RemotePrefill:
    """Read params whose numbers and sequences a router may have changed, or raise an error that names the field."""
    version = _integral(ticket.get("version"))
    if version != PARAMS_VERSION:
        raise InvalidParams("kvferry.version", version, f"{PARAMS_VERSION}")
    plain = {key: _integral(value) for key, value in raw.items() if key in _FIELDS}
    plain |= {"do_remote_prefill": True, "do_remote_decode": False}
    plain["remote_block_ids"] = list(map(_integrals, raw["remote_block_ids"]))
    plain["kvferry"] = {
        key: _integral(value) for key, value in ticket.items() if key in _TICKET_FIELDS
    }
    held_from = ticket.get("held_from")
    if isinstance(held_from, (list, tuple)):
        plain["kvferry"]["held_from"] = [_integral(first) for first in held_from[: MAX_GROUPS + 1]]
    return _with_its_digests(as_type(plain, RemotePrefill, InvalidParams))


def _with_its_digests(params: RemotePrefill) -> RemotePrefill:
    expected = _num_digests(params)
    if len(params.kvferry.digests) != expected:
        raise InvalidParams(
            "kvferry.digests", f"{len(params.kvferry.digests)} digests", f"{expected} of them"
        )
    return params


def _num_digests(params: RemotePrefill) -> int:
    return -(-params.remote_num_tokens // 256)


def _flag(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise InvalidParams(key, value, "true or false")


def _integrals(values: Sequence[Any]) -> Sequence[Any]:
    """`_integral` of every value. Few routers make it necessary; for the others only the types are checked."""
    kinds = set(map(type, values))
    if kinds == {float} and all(map(float.is_integer, values)) and max(map(abs, values)) <= 2**53:
        return list(map(int, values))  # five times as fast as one by one
    has_floats = any(issubclass(kind, float) for kind in kinds)
    return [_integral(value) for value in values] if has_floats else values


def _integral(value: Any) -> Any:
    """7.0 becomes 7: some routers decode every JSON number to float64. Other values are returned unchanged."""
    return (
        int(value)
        if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53
        else value
    )
