"""`kv_transfer_params`: the JSON object that a router passes from the producer's answer to the consumer's request.

Routers that support the NIXL contract pass this object on unread. Its flat keys are those of that contract; kvferry's
own fields are in one nested object, `kvferry`. This module has the types; `params_reader.py` reads them from what a
client or router sent.

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
consumer queries it (`kvferry.protocol.prompt_queries`).

    router                          producer                              consumer
      ├─ prompt, RemoteDecode{} ───►│                                       │
      ├─ prompt, NamedPrefill{remote_engine_id, remote_host, remote_port,   │
      │                       remote_request_id, transfer_id} ─────────────►│
      │                             │◄──────────────────── Subscribe{…} ────┤

Evolution rules: a new key needs a default; a key is never retyped or reused; unknown keys are ignored; a change that an
old reader would misunderstand raises `PARAMS_VERSION`, and a reader refuses versions it does not know.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

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
from kvferry.protocol.prompt_queries import boot_of, engine_of
from kvferry.protocol.stream_rows import RowIndex

PARAMS_VERSION = 1
MAX_BLOCKS = 1 << 20
"""Most block ids in one object, all groups together: 16 M tokens at 16 tokens a block."""
MAX_GROUPS = 64
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
        mac: `kvferry.protocol.params_mac.sign_params` over the params, all fields of the ticket included.
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
        plain["remote_block_ids"] = [list(group) for group in self.remote_block_ids]
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
