"""`kv_transfer_params`: the JSON object that a router passes from the producer's answer to the consumer's request.

Routers that support the NIXL contract pass this object on unread. Its flat keys are those of that contract; kvferry's
own fields are in one nested object, `kvferry`. Here are its types, the names in it of engines and requests, its reading
from what a client or router sent, and the MAC by which a consumer knows that its producer wrote it.

Ticket: the two legs of a request, one after the other.

    router                          producer                              consumer
      ├─ prompt, RemoteDecode{} ───►│                                       │
      │◄── one token, and ──────────┤                                       │
      │   RemotePrefill{remote_engine_id, remote_request_id, remote_block_ids, remote_host, remote_port,
      │                 tp_size, pp_size, dcp_size, remote_num_tokens, transfer_mode,
      │                 do_remote_prefill, do_remote_decode,
      │                 kvferry: Ticket{version, boot, lease_slot, lease_epoch, lease_s, digests, mac,
      │                                 held_from, opens_within_s, stream_row}}
      ├─ the prompt, and this object, unchanged ───────────────────────────►│ checks `digests`, then the `mac`
      │                             │◄══ slot `lease_slot`, blocks, slot ═══╡ good if both have `lease_epoch`, READY
      │◄──────────────────────────────────────────────────────────── tokens ┤

Turn: with `bidirectional_kv_xfer` the next prompt of a conversation begins with what the decoder holds. Its answer has
the same object about its own blocks, under the flags of the prefill leg, so a router sends it where it belongs.

    router                          prefiller                             decoder
      │◄── answer, RemotePrefill{do_remote_prefill, do_remote_decode, kvferry: Ticket{…}, …} ┤ its own blocks
      ├─ next prompt, this object ─►│                                       │
      │                             ╞══ reads slot, blocks, slot ══════════►│ under the decoder's lease
      │◄── RemotePrefill{…} ────────┤ for the next decoder, as above        │

Named prefill: both legs at once. The router has no ticket yet and names the producer of an earlier one, and the
consumer queries it (`kvferry.protocol.queries`).

    router                          producer                              consumer
      ├─ prompt, RemoteDecode{} ───►│                                       │
      ├─ prompt, NamedPrefill{remote_engine_id, remote_host, remote_port,   │
      │                       remote_request_id, transfer_id} ─────────────►│
      │                             │◄──────────────────── Subscribe{…} ────┤

Evolution rules: a new key needs a default; a key is never retyped or reused; unknown keys are ignored; a change that an
old reader would misunderstand raises `PARAMS_VERSION`, and a reader refuses versions it does not know.

Reading: nothing in that object can be trusted: a client can write it, and a router can change it without meaning to. So
every size is bounded before anything is read one by one, and every refusal is an `InvalidParams` that names the field.

Two changes by routers are accepted, since they are common and harmless: numbers that have become float64, and
sequences of another type.

    raw object
      ├─ do_remote_decode                            RemoteDecode   prefill here, for another engine
      ├─ do_remote_prefill, no ticket, but a boot    NamedPrefill   query the producer for the ticket
      ├─ do_remote_prefill, with a ticket            RemotePrefill  load
      ├─ remote_decoder                              RemoteDecode   as llm-d's sidecar writes it, both legs at once
      ├─ remote_prefiller                            NamedPrefill   of another engine than its flags say
      └─ none of these                               None

MAC: the key is generated at the producer's start and given to consumers at the handshake. So a client without access to
the side channel cannot point a valid lease at another request's blocks, nor a request at another host.

The MAC covers everything that a consumer acts on. Three kinds of fields are not covered:

- `transfer_mode`, which only routers read;
- `do_remote_prefill` and `do_remote_decode`, which say which of the two legs the object is for;
- `remote_prefill_cached_tokens`, which vLLM itself adds to an answer.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvferry.protocol.convert import OBJECTS, as_nested, as_type, decode
from kvferry.protocol.digests import CHUNK_TOKENS
from kvferry.protocol.errors import MISSING, ForeignParams, InvalidParams
from kvferry.protocol.ids import (
    MAX_GROUPS,
    TEXT,
    BlockId,
    BootId,
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
from kvferry.protocol.queries import MAX_ANSWERS_BYTES, MAX_KEY
from kvferry.protocol.slots import RowIndex

PARAMS_VERSION = 1
MAX_BLOCKS = 1 << 20
"""Most block ids in one object, all groups together: 16 M tokens at 16 tokens a block."""
MAX_DIGESTS = 1 << 16
"""Most digests, at 256 tokens a digest: as many tokens as `MAX_BLOCKS` blocks of 16 hold."""
MAX_KEYS = 64
"""Most keys of either object. Routers and vLLM add some of their own."""

# A lease is renewed six times in its lifetime. A shorter one would keep its consumer busy with renewals alone, and
# clients can write this field.
SHORTEST_LEASE_S = 0.05
LONGEST_LEASE_S = 7 * 86400.0

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
        mac: `kvferry.protocol.params.sign_params` over the params, all fields of the ticket included.
        held_from: per cache group the first token that its blocks hold; empty if the producer does not give it.
        stream_row: where the blocks of a prompt that is being computed are listed, in place of `remote_block_ids`.
        opens_within_s: how long after the ticket the workers may open the slot; 0 if they have.
    """

    version: Annotated[int, Meta(ge=1, le=2**31)]
    boot: Hex128
    lease_slot: SlotIndex
    # Text: some routers decode every JSON number to float64, which would change 60 bits.
    lease_epoch: HexEpoch
    lease_s: Annotated[float, Meta(ge=SHORTEST_LEASE_S, le=LONGEST_LEASE_S)]
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
        remote_request_id: the producer's id of the request, not the client's; the digest of one that is longer than a
            name may be, or has control characters.
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

    def to_json(
        self, *, is_turn: bool = False, at_once: bool = False
    ) -> dict[str, Any]:
        """Plain objects (dict, list, int, float, str) for the HTTP answer.

        Args:
            is_turn: the params go to the prefill of the conversation's next turn, and get the flags of that leg.
            at_once: routers may send both legs of later requests at the same time.
        """
        ticket = msgspec.structs.asdict(self.kvferry)
        ticket["digests"] = list(self.kvferry.digests)
        ticket["held_from"] = list(self.kvferry.held_from)

        plain = msgspec.structs.asdict(self)
        plain["remote_block_ids"] = list(map(list, self.remote_block_ids))
        plain["kvferry"] = ticket
        # The mac covers none of these three: a decoder that reads them differently reads no other bytes.
        plain["do_remote_prefill"] = not is_turn
        plain["do_remote_decode"] = is_turn
        # "push" is the word that makes vllm-router 0.1.17 send both legs together, from the next request on. kvferry's
        # consumer pulls in either case.
        plain["transfer_mode"] = "push" if at_once else "pull"
        return plain


class RemoteDecode(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt to be prefilled here and decoded elsewhere, as a router sends it to the producer.

    The params may also contain the offer of a turn, see `read_turn`.
    """


class NamedPrefill(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that another engine is prefilling, from a router that sends both legs at once.

    The router names the producer and has no ticket: the consumer queries the producer for it.

    Attributes:
        remote_engine_id: the producer, with its boot (`announced_id`); None of a router that has no ticket of it.
        remote_host, remote_port: its side channel.
        remote_request_id: a part of the id of both legs, if the router sends it.
        transfer_id: the same on both legs, where routers send one.
    """

    remote_host: Text
    remote_port: Port
    remote_engine_id: Text | None = None
    remote_request_id: Text | None = None
    transfer_id: Text | None = None

    @property
    def engine_id(self) -> str | None:
        """The producer; None if it is not named."""
        if self.remote_engine_id is None:
            return None
        return engine_of(self.remote_engine_id)

    @property
    def boot(self) -> str | None:
        """The producer's boot; None if it is not named, or its engine id does not announce one."""
        if self.remote_engine_id is None:
            return None
        return boot_of(self.remote_engine_id)


# Names: of an engine, and of a request on both legs.


# The prefix says that the engine answers queries. Engines of other connectors have none, and are never queried.
_ANNOUNCED = "kvferry1"
_ANNOUNCED_ID = re.compile(rf"{_ANNOUNCED}\.(?P<boot>[0-9a-f]{{32}})\.(?=.)")
_RANDOM_END = re.compile(r"-[0-9a-f]{8}\Z")
_INDEX = re.compile(
    r"\A(?:(?P<of_n>\d{1,6})_)?(?:cmpl-.*-(?P<of_batch>\d{1,6})|.*)\Z", re.DOTALL
)


def announced_id(boot: BootId, engine_id: str) -> str:
    """The engine id in params: it says that the engine answers queries, and in which of its lives."""
    return f"{_ANNOUNCED}.{boot}.{engine_id}"


def boot_of(announced: str) -> BootId | None:
    """The boot in an announced id; None if the engine announces none, and must not be queried."""
    announcement = _ANNOUNCED_ID.match(announced)
    if announcement is None:
        return None
    return BootId(announcement["boot"])


def engine_of(announced: str) -> str:
    """The engine's own id in an announced one; any other id is returned unchanged."""
    announcement = _ANNOUNCED_ID.match(announced)
    if announcement is None:
        return announced
    return announced[announcement.end() :]


def request_key(request_id: str, transfer_id: str | None = None) -> str:
    """The key that both legs of a request have in common.

    Args:
        request_id: vLLM's, on this engine: `cmpl-<id>-<index in the batch>-<8 hex>`, `chatcmpl-<id>-<8 hex>`, and
            `<k>_` before it for the k-th of n. Without the eight random digits where vLLM is set to append none.
        transfer_id: of routers that send one with both legs; their request ids may differ.

    Returns:
        Printable ASCII of at most `MAX_KEY` characters.
    """
    # Each engine appends its own eight random digits; without them both legs have the same id.
    key = _RANDOM_END.sub("", request_id)
    if transfer_id is not None:
        # One `transfer_id` covers a whole batch and all of its n siblings, so the indices stay part of the key.
        of_n = ""
        of_batch = ""
        index = _INDEX.match(key)
        if index is not None:
            of_n = index["of_n"] or ""
            of_batch = index["of_batch"] or ""
        key = f"{transfer_id}/{of_n}/{of_batch}"
    is_plain = key.isascii() and key.isprintable()
    if is_plain and 0 < len(key) <= MAX_KEY:
        return key
    return digest_of_id(key)


def request_name(request_id: str) -> str:
    """A request's id as its params have it, of which readers take a `Text` only: the digest of any other.

    They would refuse all of the params for it, and the producer would hold the blocks until the lease expires.
    """
    if TEXT.fullmatch(request_id) is not None:
        return request_id
    return digest_of_id(request_id)


def digest_of_id(request_id: str) -> str:
    """The digest in place of an id that readers would refuse. Clients choose ids, of any length and characters."""
    # Of the id alone: both legs of a request replace theirs by the same one.
    encoded = request_id.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(encoded, digest_size=16).hexdigest()


# Reading what a client or router sent.


# Four block ids per token are more than any layout has. The constant part is for short prompts of models with many
# cache groups.
_BLOCKS_PER_TOKEN = 4
_SPARE_BLOCKS = 1024
_BYTES_PER_BLOCK = 8
_SPARE_BYTES = 1 << 16

_MAX_TRANSFER_ID = 512
_LARGEST_FLOAT_INTEGER = 2**53
"""Above it float64 skips integers, so a float cannot be read as an integer any more."""

_DECODER = "remote_decoder"
_PREFILLER = "remote_prefiller"

_LISTS = (list, tuple)

_PARAMS_FIELDS = frozenset(RemotePrefill.__struct_fields__)
_TICKET_FIELDS = frozenset(Ticket.__struct_fields__)
_NAMED_FIELDS = frozenset(NamedPrefill.__struct_fields__)

# The last two are keys of the NIXL contract that kvferry does not read. vLLM's own connector would act on them.
_TRANSFER_KEYS = frozenset(
    (
        *RemotePrefill.__struct_fields__,
        *NamedPrefill.__struct_fields__,
        "remote_prefill_cached_tokens",
        "remote_blocks_expiry_time",
    )
)


class _DecoderRole(msgspec.Struct, frozen=True):
    kv_request_id: Text


class _PrefillerRole(msgspec.Struct, frozen=True):
    kv_request_id: Text
    remote_host: Text
    remote_port: Port


_answer_decoder: msgspec.msgpack.Decoder[RemotePrefill] = msgspec.msgpack.Decoder(
    RemotePrefill
)


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
    if not isinstance(raw, OBJECTS):
        raise InvalidParams("kv_transfer_params", raw, "an object")
    if len(raw) > MAX_KEYS:
        raise InvalidParams(
            "kv_transfer_params", f"{len(raw)} keys", f"at most {MAX_KEYS} keys"
        )
    wants_prefill = _flag(raw, "do_remote_prefill")
    wants_decode = _flag(raw, "do_remote_decode")
    if wants_prefill and wants_decode:
        raise InvalidParams(
            "do_remote_decode", True, "false, since do_remote_prefill is true"
        )
    if wants_decode:
        return RemoteDecode()
    if not wants_prefill:
        return _read_role(raw)
    has_ticket = raw.get("kvferry") or raw.get("remote_block_ids")
    if not has_ticket and _announces(raw.get("remote_engine_id")):
        return as_type(_plain_fields(raw, _NAMED_FIELDS), NamedPrefill, InvalidParams)
    return _read_remote_prefill(raw, prompt_tokens)


def read_turn(
    raw: Mapping[str, Any], prompt_tokens: int | None = None
) -> RemotePrefill | None:
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
    if not raw.get("remote_block_ids"):
        return None
    return _read_remote_prefill(raw, prompt_tokens)


def decode_params(
    encoded: msgspec.Raw, prompt_tokens: int | None = None
) -> RemotePrefill:
    """The params in a producer's answer to a query.

    Args:
        prompt_tokens: of the prompt to be loaded, see `most_blocks`; None for one that is not loaded.

    Raises:
        InvalidParams: they are not usable; the error names the field.
    """
    # The bytes are bounded by the prompt, too, before they are decoded: an answer of 8 MiB that is full of empty
    # containers took seconds and a gigabyte.
    bytes_for_prompt = _SPARE_BYTES + _BYTES_PER_BLOCK * most_blocks(prompt_tokens)
    max_bytes = min(MAX_ANSWERS_BYTES, bytes_for_prompt)
    params = decode(bytes(encoded), _answer_decoder, max_bytes, InvalidParams)
    if params.kvferry.version != PARAMS_VERSION:
        raise _unknown_version(params.kvferry.version)
    num_blocks = sum(map(len, params.remote_block_ids))
    _check_counts(num_blocks, len(params.kvferry.digests), prompt_tokens)
    _check_num_digests(params)
    return params


def without_transfer(raw: object) -> dict[str, Any] | None:
    """A copy of params without the keys of a transfer; None if nothing is left.

    The other keys stay: connectors beside this one, under a MultiConnector, read them.
    """
    if not isinstance(raw, OBJECTS) or len(raw) > MAX_KEYS:
        return None
    others = {key: value for key, value in raw.items() if key not in _TRANSFER_KEYS}
    return others or None


def read_transfer_id(raw: object) -> str | None:
    """What both legs of a request have in common: the `transfer_id` in params that `read_params` has read, or llm-d's
    `kv_request_id`; None without a usable one."""
    if not isinstance(raw, Mapping):
        return None
    transfer_id = raw.get("transfer_id")
    decoder = raw.get(_DECODER)
    if transfer_id is None and isinstance(decoder, OBJECTS):
        transfer_id = decoder.get("kv_request_id")
    if isinstance(transfer_id, str) and 0 < len(transfer_id) <= _MAX_TRANSFER_ID:
        return transfer_id
    return None


def most_blocks(prompt_tokens: int | None) -> int:
    """Most block ids that params may list for a prompt of so many tokens, all groups together.

    The bound follows the prompt because the engine's thread reads the ids, and a client chooses their number.
    """
    if prompt_tokens is None:
        return MAX_BLOCKS
    return min(MAX_BLOCKS, _SPARE_BLOCKS + _BLOCKS_PER_TOKEN * prompt_tokens)


def _announces(engine_id: object) -> bool:
    """True if the engine of this id in params answers queries."""
    # An engine of another connector has no boot in its id. It must not be queried: its listener may end over a message
    # that it does not know.
    return isinstance(engine_id, str) and boot_of(engine_id) is not None


def _read_role(raw: Mapping[str, Any]) -> NamedPrefill | RemoteDecode | None:
    """A leg that names the other one's engine by its role; None if it names none. llm-d's sidecar writes it with
    `--kv-connector=offloading`, and sends both legs at once.

    Raises:
        InvalidParams: it is not usable; the error names the field.
    """
    decoder = raw.get(_DECODER)
    prefiller = raw.get(_PREFILLER)
    if decoder is None and prefiller is None:
        return None
    if prefiller is None:
        as_nested(decoder, _DecoderRole, InvalidParams, _DECODER)
        return RemoteDecode()
    if decoder is not None:
        raise InvalidParams(_PREFILLER, prefiller, f"null, since {_DECODER} is set")
    role = as_nested(prefiller, _PrefillerRole, InvalidParams, _PREFILLER)
    return NamedPrefill(
        remote_host=role.remote_host,
        remote_port=role.remote_port,
        transfer_id=role.kv_request_id,
    )


def _read_remote_prefill(
    raw: Mapping[str, Any], prompt_tokens: int | None
) -> RemotePrefill:
    """Read params with a ticket, whose numbers and sequences a router may have changed.

    Raises:
        ForeignParams: there is no ticket.
        InvalidParams: they are not usable; the error names the field.
    """
    ticket = raw.get("kvferry")
    if ticket is None:
        raise ForeignParams(
            "kvferry", MISSING, "the object that a kvferry producer adds"
        )
    if not isinstance(ticket, OBJECTS):
        raise InvalidParams("kvferry", ticket, "an object")
    if len(ticket) > MAX_KEYS:
        raise InvalidParams(
            "kvferry", f"{len(ticket)} keys", f"at most {MAX_KEYS} keys"
        )
    _check_lengths(raw.get("remote_block_ids"), ticket.get("digests"), prompt_tokens)
    plain_ticket = _plain_fields(ticket, _TICKET_FIELDS)
    # The version is judged first: the fields of an unknown one may mean anything.
    version = plain_ticket.get("version")
    if version != PARAMS_VERSION:
        raise _unknown_version(version)
    held_from = ticket.get("held_from")
    if isinstance(held_from, _LISTS):
        # One more than allowed, so that the type's own bound refuses a longer list, by the name of the field.
        plain_ticket["held_from"] = _integrals(held_from[: MAX_GROUPS + 1])

    plain = _plain_fields(raw, _PARAMS_FIELDS)
    # A turn's offer arrives with the flags of the other leg.
    plain["do_remote_prefill"] = True
    plain["do_remote_decode"] = False
    plain["remote_block_ids"] = list(map(_integrals, raw["remote_block_ids"]))
    plain["kvferry"] = plain_ticket

    params = as_type(plain, RemotePrefill, InvalidParams)
    _check_num_digests(params)
    return params


def _check_lengths(groups: object, digests: object, prompt_tokens: int | None) -> None:
    """Bound the ids and digests before they are read one by one."""
    if not isinstance(groups, _LISTS):
        expected = "a list of lists of block ids, one per cache group"
        raise InvalidParams("remote_block_ids", groups, expected)
    if len(groups) > MAX_GROUPS:
        expected = f"at most {MAX_GROUPS} cache groups"
        raise InvalidParams("remote_block_ids", f"{len(groups)} groups", expected)
    for index, group in enumerate(groups):
        if not isinstance(group, _LISTS):
            raise InvalidParams(
                f"remote_block_ids[{index}]", group, "a list of block ids"
            )
    num_blocks = sum(map(len, groups))
    num_digests = len(digests) if isinstance(digests, _LISTS) else 0
    _check_counts(num_blocks, num_digests, prompt_tokens)


def _check_counts(num_blocks: int, num_digests: int, prompt_tokens: int | None) -> None:
    most = most_blocks(prompt_tokens)
    expected = f"at most {most}"
    if most != MAX_BLOCKS:
        expected += f" for a prompt of {prompt_tokens} tokens"
    if num_blocks > most:
        raise InvalidParams("remote_block_ids", f"{num_blocks} block ids", expected)
    if num_digests > most:
        raise InvalidParams("kvferry.digests", f"{num_digests} digests", expected)


def _unknown_version(version: object) -> InvalidParams:
    return InvalidParams("kvferry.version", version, f"{PARAMS_VERSION}")


def _check_num_digests(params: RemotePrefill) -> None:
    """Refuse a chain that ends before the tokens do: the rest of the blocks would be loaded unchecked."""
    num_digests = len(params.kvferry.digests)
    expected = -(-params.remote_num_tokens // CHUNK_TOKENS)
    if num_digests != expected:
        raise InvalidParams(
            "kvferry.digests", f"{num_digests} digests", f"{expected} of them"
        )


def _flag(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key)
    if value is None:
        return False
    if isinstance(value, bool):
        return value
    raise InvalidParams(key, value, "true or false")


def _plain_fields(raw: Mapping[str, Any], fields: frozenset[str]) -> dict[str, Any]:
    """The values of these fields, as far as they are there, whole numbers as integers."""
    found: dict[str, Any] = {}
    for key in fields.intersection(raw):
        value = raw[key]
        # Few values are numbers, and fewer are floats: a call for each value took a fifth of the reading.
        if isinstance(value, float):
            value = _integral(value)
        found[key] = value
    return found


def _integrals(values: Sequence[Any]) -> Sequence[Any]:
    """`_integral` of every value."""
    # Block ids are the bulk of the params, and few routers change them. So the types are checked first, in C, and a
    # list of plain integers is returned as it is.
    kinds = set(map(type, values))
    if kinds == {int}:
        return values
    if kinds == {float} and all(map(float.is_integer, values)):
        largest = max(map(abs, values))
        if largest <= _LARGEST_FLOAT_INTEGER:
            return list(map(int, values))  # five times as fast as one by one
    has_floats = any(issubclass(kind, float) for kind in kinds)
    if not has_floats:
        return values
    return list(map(_integral, values))


def _integral(value: Any) -> Any:
    """7.0 becomes 7: some routers decode every JSON number to float64. Other values are returned unchanged."""
    is_whole = isinstance(value, float) and value.is_integer()
    if is_whole and abs(value) <= _LARGEST_FLOAT_INTEGER:
        return int(value)
    return value


# The MAC.


MAC_KEY_BYTES = 32
NO_MAC = "0" * 64
"""Of params that are not signed yet."""

_DOMAIN = "kvferry-ticket-1"
_EARLY_DOMAIN = "kvferry-early-ticket-1"
_encoder = msgspec.msgpack.Encoder()


def new_mac_key() -> bytes:
    """A fresh key for one boot."""
    return secrets.token_bytes(MAC_KEY_BYTES)


def sign_params(params: RemotePrefill, key: bytes) -> RemotePrefill:
    """The same params with their MAC set."""
    ticket = msgspec.structs.replace(params.kvferry, mac=_mac(params, key))
    return msgspec.structs.replace(params, kvferry=ticket)


def sign_early(
    signed: RemotePrefill, key: bytes, opens_within_s: float
) -> RemotePrefill:
    """Signed params as a ticket whose slot may open only later."""
    # One prompt needs both objects: the early ticket, and the params of its answer. The early MAC is over the other
    # one, so the digests and block ids of a long prompt are encoded and hashed once.
    opens_ms = round(opens_within_s * 1000)
    mac = _hmac((_EARLY_DOMAIN, signed.kvferry.mac, opens_ms), key)
    ticket = msgspec.structs.replace(
        signed.kvferry, mac=mac, opens_within_s=opens_ms / 1000
    )
    return msgspec.structs.replace(signed, kvferry=ticket)


def check_params_mac(params: RemotePrefill, key: bytes) -> None:
    """Check that the producer wrote these params.

    Raises:
        InvalidParams: the mac is not the producer's.
    """
    given = params.kvferry.mac
    if not hmac.compare_digest(_mac(params, key), given):
        expected = "the mac of exactly these params by their producer"
        raise InvalidParams("kvferry.mac", given, expected)


def _mac(params: RemotePrefill, key: bytes) -> str:
    """The MAC that a ticket must have: of the params, or of an early ticket if its slot opens later."""
    ticket = params.kvferry
    # A fixed tuple of integers and text. Routers reorder keys and turn numbers into float64, so neither the order of
    # keys nor a float may have an influence: times are in whole milliseconds.
    covered: tuple[object, ...] = (
        _DOMAIN,
        ticket.version,
        ticket.boot,
        params.remote_engine_id,
        params.remote_request_id,
        params.remote_host,
        params.remote_port,
        params.tp_size,
        params.pp_size,
        params.dcp_size,
        params.remote_block_ids,
        params.remote_num_tokens,
        ticket.lease_slot,
        ticket.lease_epoch,
        round(ticket.lease_s * 1000),
        ticket.digests,
        ticket.held_from,
    )
    # Appended only where there is one, so that this field changes no MAC of params without it.
    if ticket.stream_row is not None:
        covered += (ticket.stream_row,)
    mac = _hmac(covered, key)
    opens_ms = round(ticket.opens_within_s * 1000)
    if opens_ms:
        mac = _hmac((_EARLY_DOMAIN, mac, opens_ms), key)
    return mac


def _hmac(covered: tuple[object, ...], key: bytes) -> str:
    # Not hmac.digest: it releases the interpreter's lock, which may delay the step that calls this.
    return hmac.new(key, _encoder.encode(covered), hashlib.sha256).hexdigest()
