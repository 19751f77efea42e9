"""The MAC of `kv_transfer_params`, which pass through clients that could change them.

The key is generated at the producer's start and given to consumers at the handshake. So a client without access to the
side channel cannot point a valid lease at another request's blocks, nor a request at another host.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

import msgspec

from kvferry.protocol.errors import InvalidParams
from kvferry.protocol.params import RemotePrefill

MAC_KEY_BYTES = 32

_DOMAIN = "kvferry-ticket-1"
_encoder = msgspec.msgpack.Encoder()


def new_mac_key() -> bytes:
    """A fresh key for one boot."""
    return secrets.token_bytes(MAC_KEY_BYTES)


def sign_params(params: RemotePrefill, key: bytes) -> RemotePrefill:
    """The same params with their MAC set."""
    ticket = msgspec.structs.replace(params.kvferry, mac=_mac(params, key))
    return msgspec.structs.replace(params, kvferry=ticket)


def check_params_mac(params: RemotePrefill, key: bytes) -> None:
    """Check that the producer wrote these params.

    Raises:
        InvalidParams: the mac is not the producer's.
    """
    if not hmac.compare_digest(_mac(params, key), params.kvferry.mac):
        raise InvalidParams("kvferry.mac", params.kvferry.mac, "the mac of exactly these params by their producer")


def _mac(params: RemotePrefill, key: bytes) -> str:
    """HMAC-SHA256 over the msgpack of a fixed tuple of integers and text, without floats and key order."""
    ticket = params.kvferry
    covered = (
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
        *(() if ticket.stream_row is None else (ticket.stream_row,)),
    )
    # Not hmac.digest: it releases the interpreter's lock, which may delay the step that calls this.
    return hmac.new(key, _encoder.encode(covered), hashlib.sha256).hexdigest()
