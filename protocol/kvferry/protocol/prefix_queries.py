"""Queries for the leading part of a prompt that another engine has in its cache: the prompt is read from there.

The asker proves that it has the prompt by the digests of it (`kvferry.protocol.digests`), so no engine tells others
what it was prompted with. The answerer finds its longest cached prefix among them in its own terms, keeps its blocks
under a lease, and answers with the ticket: the params of a usual sequential request.

Prefix query: an asker's scheduler, for each prompt of which another engine may have the first tokens.

    asker's scheduler                                                 answerer's scheduler
    FindPrefixes{client_id, queries: [PrefixQuery{number, chain, min_tokens}]} ──►
        ◄────── Answers{answers: [Answer{number, progress: over, reason, …}], …}      at once, if it has none
     or ◄────── Answers{answers: [Answer{number, progress: queued, …}], …}            its next step keeps the blocks
        ◄────── Answers{answers: [Answer{number, progress: ticket, params, …}], …}    and they may be read
    … until, without waiting for a ticket any more, or with it:
    Unsubscribe{client_id, numbers} ────────────────────────────────► no answer; a lease without a ticket ends

A query is repeated until it is settled, by number, and each answer replaces the one before it. A query that is repeated
gets the same lease, never a second one. Queries of prompts and of prefixes share their numbers. A lease whose ticket
was sent ends as any other: by `Done`, by `Release`, or when its time is over, which `Renew` starts again.

A prefix is as long as whole chunks of 256 tokens: what the last digest that was sent covers, at most. An engine of a
version without these messages answers `Refused`. Evolution rules as in `kvferry.protocol.handshake`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.protocol.digests import DIGEST_BYTES
from kvferry.protocol.ids import Positive, Text
from kvferry.protocol.prompt_queries import MAX_QUERIES, Number

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


def messages(client_id: str, queries: Iterable[PrefixQuery]) -> Iterator[FindPrefixes]:
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
