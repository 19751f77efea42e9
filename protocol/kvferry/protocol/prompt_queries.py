"""Queries about prompts that another engine is prefilling, sent before its answer has reached the router.

A router that sends both legs of a request at once names the producer in the params of the decode leg, and nothing
more. So the consumer queries the producer's side channel for the ticket of that prompt: for what the params of a
sequential request would contain.

Query: a consumer's scheduler, for each prompt whose producer a router has named.

    consumer's scheduler                                              producer's scheduler
    Subscribe{client_id, queries: [PromptQuery{number, key, num_tokens, digest, spans}]} ──►
        ◄────── Answers{answers: [Answer{number, progress: unknown, reason, …}], siblings}  siblings are queried, too
     or ◄────── Answers{answers: [Answer{number, progress: queued, …}], siblings}
     or ◄────── Answers{answers: [Answer{number, progress: ticket, params, cached_tokens, …}], siblings}
     or ◄────── Answers{answers: [Answer{number, progress: over, reason, …}], siblings}
    … and again whenever an answer changes, until
    Unsubscribe{client_id, numbers} ────────────────────────────────► no answer

A query is repeated until it is settled, by number, and each answer replaces the one before it. So neither a lost
message nor a broken connection matters: later answers are hints that only save waiting for the next repetition.

Evolution rules as in `kvferry.protocol.handshake`.
"""

from __future__ import annotations

import enum
import hashlib
import re
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.protocol.convert import decode
from kvferry.protocol.errors import InvalidMessage
from kvferry.protocol.ids import BootId, Count, Hex128, Port, Positive, Text
from kvferry.protocol.stream_rows import MAX_ROW_GROUPS

MAX_QUERIES = 256
"""Most queries of one message."""
MAX_KEY = 256
MAX_ANSWERS_BYTES = 8 << 20
"""Of one frame: the ticket of the longest prompts has 5 bytes for each block, and 34 for each 256 tokens."""
MAX_SIBLINGS = 1024

# The prefix says that the engine answers queries. Engines of other connectors have none, and are never queried.
_ANNOUNCED = "kvferry1"
_ANNOUNCED_ID = re.compile(rf"{_ANNOUNCED}\.(?P<boot>[0-9a-f]{{32}})\.(?=.)")
_RANDOM_END = re.compile(r"-[0-9a-f]{8}\Z")
_INDEX = re.compile(
    r"\A(?:(?P<of_n>\d{1,6})_)?(?:cmpl-.*-(?P<of_batch>\d{1,6})|.*)\Z", re.DOTALL
)

Number = Annotated[int, Meta(ge=0, lt=2**53)]


class PromptQuery(msgspec.Struct, frozen=True, kw_only=True):
    """A query for the ticket of one prompt.

    Attributes:
        number: chosen by the client, for the answers.
        key: `request_key` of the client's own request.
        num_tokens: length of the prompt.
        digest: the last of the prompt's `digest_chain`.
        spans: per cache group of the client the tokens of a block on all its ranks, if it reads prompts while they are
            computed. `()` if not: then it gets a ticket for a complete one.
    """

    number: Number
    key: Annotated[str, Meta(min_length=1, max_length=MAX_KEY, pattern=r"\A[ -~]+\Z")]
    num_tokens: Positive
    # Clients of the router can choose request ids, and a ticket permits reading a prompt's cache. So the key alone is
    # not enough: a ticket is given only to an engine that has the same prompt.
    digest: Hex128
    spans: Annotated[tuple[Positive, ...], Meta(max_length=MAX_ROW_GROUPS)] = ()


class Subscribe(msgspec.Struct, frozen=True, kw_only=True, tag="subscribe"):
    """Answer these queries, and again whenever an answer changes.

    Attributes:
        client_id: engine id of the sender; a prompt is promised to one request of one engine.
        queries: new ones, and all that are not settled.
    """

    client_id: Text
    queries: Annotated[
        tuple[PromptQuery, ...], Meta(min_length=1, max_length=MAX_QUERIES)
    ]


class Unsubscribe(msgspec.Struct, frozen=True, kw_only=True, tag="unsubscribe"):
    """These queries need no more answers.

    Attributes:
        client_id: engine id of the sender.
        numbers: of the queries.
    """

    client_id: Text
    numbers: Annotated[tuple[Number, ...], Meta(min_length=1, max_length=MAX_QUERIES)]


class PromptProgress(str, enum.Enum):
    """How far a prompt is on the producer."""

    UNKNOWN = "unknown"
    """No request with this key and prompt has arrived."""
    QUEUED = "queued"
    """It waits, or its first chunks are computed."""
    TICKET = "ticket"
    """It may be read as soon as its slot says so: it is complete, a scheduled step completes it, or it is streamed."""
    OVER = "over"
    """It will not be read: see `reason`."""


def encode_params(params: object) -> msgspec.Raw:
    """The params of an answer, as they are sent."""
    return msgspec.Raw(msgspec.msgpack.encode(params))


NO_PARAMS = encode_params({})


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one query.

    Attributes:
        number: of the query.
        progress: how far the prompt is.
        params: with a ticket, the params of the producer's response (read by `params.decode_params`).
        reason: why it is over, or not known, as a label of metrics.
        cached_tokens: with a ticket, the prompt's tokens that the producer had in its cache.
    """

    number: Number
    progress: PromptProgress
    # Not decoded with its frame: one of empty containers took 3 to 8 s and 1.2 GB, on the loop that renews leases.
    params: msgspec.Raw = NO_PARAMS
    reason: Annotated[str, Meta(max_length=64, pattern=r"\A[a-z_]*\Z")] = ""
    # vLLM adds this number to the params of a sequential response, and the decoder's front end reports it in `usage`.
    # Here that front end has no params to read it from.
    cached_tokens: Count | None = None


class Answers(msgspec.Struct, frozen=True, kw_only=True, tag="answers"):
    """Answers to some of a client's queries.

    Attributes:
        answers: one for each of these queries.
        siblings: ports of the side channels of the engine's other data-parallel ranks, on the same host.
    """

    answers: Annotated[tuple[Answer, ...], Meta(max_length=MAX_QUERIES)]
    siblings: Annotated[tuple[Port, ...], Meta(max_length=MAX_SIBLINGS)] = ()


class _AnyMessage(msgspec.Struct):
    """Any message, of which only the tag is read."""

    type: str


_answers: msgspec.msgpack.Decoder[Answers] = msgspec.msgpack.Decoder(Answers)
_any: msgspec.msgpack.Decoder[_AnyMessage] = msgspec.msgpack.Decoder(_AnyMessage)


def decode_answers(frame: bytes) -> Answers:
    """Decode a frame that a listener sent to a client.

    Raises:
        InvalidMessage: it is not one of the protocol's.
    """
    return decode(frame, _answers, MAX_ANSWERS_BYTES, InvalidMessage)


def answers_in(frame: bytes) -> Answers | None:
    """The answers to queries in a frame that a listener sent to a client; None if it answers another request.

    Raises:
        InvalidMessage: it is not one of the protocol's.
    """
    try:
        return decode_answers(frame)
    except InvalidMessage:
        # Its tag is read by itself only here, where the frame is most likely of another kind: answers may have
        # megabytes, and all of them were passed twice.
        if decode(frame, _any, MAX_ANSWERS_BYTES, InvalidMessage).type == "answers":
            raise
        return None


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
    # Clients choose ids: of any length, and with any character. Both legs replace such a one by the same digest.
    encoded = key.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(encoded, digest_size=16).hexdigest()
