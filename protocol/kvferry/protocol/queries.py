"""Queries between schedulers: for the ticket of a prompt that another engine is prefilling, and for the first tokens of
a prompt that another engine has in its cache.

Query: a consumer's scheduler, for each prompt whose producer a router has named.

    consumer's scheduler                                              producer's scheduler
    Subscribe{client_id, queries: [PromptQuery{number, key, num_tokens, digest, spans}]} ──►
        ◄────── Answers{answers: [Answer{number, progress: unknown, reason, …}], siblings}  siblings are queried, too
     or ◄────── Answers{answers: [Answer{number, progress: queued, …}], siblings}
     or ◄────── Answers{answers: [Answer{number, progress: ticket, params, cached_tokens, …}], siblings}
     or ◄────── Answers{answers: [Answer{number, progress: over, reason, …}], siblings}
    … and again whenever an answer changes, until
    Unsubscribe{client_id, numbers} ────────────────────────────────► no answer

A router that sends both legs of a request at once names the producer in the params of the decode leg, and nothing more.
So the consumer queries that engine for what the params of a sequential request would contain, before its answer has
reached the router.

Prefix query: an asker's scheduler, for each prompt of which another engine may have the first tokens.

    asker's scheduler                                                 answerer's scheduler
    FindPrefixes{client_id, queries: [PrefixQuery{number, chain, min_tokens}]} ──►
        ◄────── Answers{answers: [Answer{number, progress: over, reason, …}], …}      at once, if it has none
     or ◄────── Answers{answers: [Answer{number, progress: queued, …}], …}            its next step keeps the blocks
        ◄────── Answers{answers: [Answer{number, progress: ticket, params, …}], …}    and they may be read
    … until, without waiting for a ticket any more, or with it:
    Unsubscribe{client_id, numbers} ────────────────────────────────► no answer; a lease without a ticket ends

The asker proves that it has the prompt by the digests of it (`kvferry.protocol.digests`), so no engine tells others
what it was prompted with. The answerer finds its longest cached prefix among them in its own terms, keeps its blocks
under a lease, and answers with the ticket: the params of a usual sequential request. A prefix is as long as whole
chunks of 256 tokens: what the last digest that was sent covers, at most. A lease whose ticket was sent ends as any
other: by `Done`, by `Release`, or when its time is over, which `Renew` starts again.

Both kinds share their numbers. A query is repeated until it is settled, by number, and each answer replaces the one
before it. So neither a lost message nor a broken connection matters: later answers are hints that only save waiting for
the next repetition. A prefix query that is repeated gets the same lease, never a second one.

An engine of a version without prefix queries answers `Refused`. Evolution rules as in `kvferry.protocol.handshake`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.protocol.convert import decode
from kvferry.protocol.digests import DIGEST_BYTES
from kvferry.protocol.errors import InvalidMessage
from kvferry.protocol.ids import MAX_GROUPS, Count, Hex128, Port, Positive, Text

MAX_QUERIES = 256
"""Most queries of one message."""
MAX_KEY = 256
MAX_ANSWERS_BYTES = 8 << 20
"""Of one frame: the ticket of the longest prompts has 5 bytes for each block, and 34 for each 256 tokens."""
MAX_SIBLINGS = 1024

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
    spans: Annotated[tuple[Positive, ...], Meta(max_length=MAX_GROUPS)] = ()


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


# Prefixes.


MAX_CHAIN_DIGESTS = 4096
"""Most digests of one query: those of a million tokens."""
MAX_CHAIN_BYTES = MAX_CHAIN_DIGESTS * DIGEST_BYTES
# A frame of the most queries must not be refused for its length (`MAX_REQUEST_BYTES`), and an answerer looks up no more
# digests for one message than this.
MAX_CHAINS_BYTES = 2 * MAX_CHAIN_BYTES
"""Most bytes of all chains of one message together."""


class PrefixRefusal(str, enum.Enum):
    """Why an answer is `over`, as its `reason`. Readers must expect others, of later versions."""

    NO_PREFIX = "no_prefix"
    """No leading chunk, or fewer tokens than `min_tokens`, are in the cache and can be read."""
    NO_LEASE = "no_lease"
    """There is a prefix, but leases of prefixes have their number of slots, or their share of the cache."""
    PREFIX_OFF = "prefix_off"
    """This engine answers no such queries."""
    LEASE_OVER = "lease_over"
    """The lease that this query got has ended."""


class PrefixQuery(msgspec.Struct, frozen=True, kw_only=True):
    """A query for the longest prefix of one prompt.

    Attributes:
        number: chosen by the client, for the answers.
        chain: the digests of the prompt's whole chunks, in order, 16 bytes each.
        min_tokens: a shorter prefix is of no use to the client.
    """

    number: Number
    # Bytes, not the text of a ticket: half as long, and one object for the decoder, whatever its length.
    chain: Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=MAX_CHAIN_BYTES)]
    min_tokens: Positive = 1

    def __post_init__(self) -> None:
        if len(self.chain) % DIGEST_BYTES:
            raise ValueError(
                f"`chain` of {len(self.chain)} bytes; expected whole digests of {DIGEST_BYTES} bytes"
            )


class FindPrefixes(msgspec.Struct, frozen=True, kw_only=True, tag="find_prefixes"):
    """Answer these queries, and again whenever an answer changes.

    Attributes:
        client_id: engine id of the sender.
        queries: new ones, and all that are not settled.
    """

    client_id: Text
    queries: Annotated[
        tuple[PrefixQuery, ...], Meta(min_length=1, max_length=MAX_QUERIES)
    ]

    def __post_init__(self) -> None:
        chains_bytes = sum(len(query.chain) for query in self.queries)
        if chains_bytes > MAX_CHAINS_BYTES:
            raise ValueError(
                f"`queries` with chains of {chains_bytes} bytes; expected at most {MAX_CHAINS_BYTES} in all"
            )


def chain_bytes(digests: Iterable[str]) -> bytes:
    """The digests of a chain (lowercase hexadecimal text) as a query has them."""
    return bytes.fromhex("".join(digests))


def prefix_messages(
    client_id: str, queries: Iterable[PrefixQuery]
) -> Iterator[FindPrefixes]:
    """The queries, as many at a time as fit into a message."""
    fitting: list[PrefixQuery] = []
    chains_bytes = 0
    for query in queries:
        is_full = (
            len(fitting) == MAX_QUERIES
            or chains_bytes + len(query.chain) > MAX_CHAINS_BYTES
        )
        if is_full:
            yield FindPrefixes(client_id=client_id, queries=tuple(fitting))
            fitting = []
            chains_bytes = 0
        fitting.append(query)
        chains_bytes += len(query.chain)
    if fitting:
        yield FindPrefixes(client_id=client_id, queries=tuple(fitting))
