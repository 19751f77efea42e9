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
from kvferry.protocol.params import RemotePrefill, Ticket

MAC_KEY_BYTES = 32

_DOMAIN = "kvferry-ticket-1"
_encoder = msgspec.msgpack.Encoder()


def new_mac_key() -> bytes:
    """A fresh key for one boot."""
    return secrets.token_bytes(MAC_KEY_BYTES)


class ParamsSigner:
    """Computes the MAC of params under one key, which is prepared once."""

    def __init__(self, key: bytes) -> None:
        self._keyed = hmac.new(key, digestmod=hashlib.sha256)

    def sign(self, params: RemotePrefill) -> RemotePrefill:
        """The same params with their MAC set."""
        return msgspec.structs.replace(params, kvferry=_with_mac(params.kvferry, self.mac(params)))

    def mac(self, params: RemotePrefill) -> str:
        """HMAC-SHA256 over the msgpack of a fixed tuple of integers and text, without floats and key order."""
        # Not hmac.digest: it releases the interpreter's lock, which may delay the step that calls this.
        mac = self._keyed.copy()
        mac.update(_covered(params))
        return mac.hexdigest()


def sign_params(params: RemotePrefill, key: bytes) -> RemotePrefill:
    """The same params with their MAC set."""
    return ParamsSigner(key).sign(params)


def check_params_mac(params: RemotePrefill, key: bytes) -> None:
    """Check that the producer wrote these params.

    Raises:
        InvalidParams: the mac is not the producer's.
    """
    if not hmac.compare_digest(ParamsSigner(key).mac(params), params.kvferry.mac):
        raise InvalidParams("kvferry.mac", params.kvferry.mac, "the mac of exactly these params by their producer")


def _covered(params: RemotePrefill) -> bytes:
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
        ticket.lease_ms,
        ticket.digests,
        ticket.held_from,
    )
    return _encoder.encode(covered)


def _with_mac(ticket: Ticket, mac: str) -> Ticket:
    return msgspec.structs.replace(ticket, mac=mac)
