"""The MAC of `kv_transfer_params`, which pass through clients that could change them.

The key is generated at the producer's start and given to consumers at the handshake. So a client without access to the
side channel cannot point a valid lease at another request's blocks, nor a request at another host.

Covered is everything that a consumer acts on. Not covered are what only routers read (`transfer_mode`), which of the
two legs it is for (`do_remote_prefill`), and what vLLM itself adds to an answer (`remote_prefill_cached_tokens`).
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
_EARLY_DOMAIN = "kvferry-early-ticket-1"
_encoder = msgspec.msgpack.Encoder()


def new_mac_key() -> bytes:
    """A fresh key for one boot."""
    return secrets.token_bytes(MAC_KEY_BYTES)


def sign_params(params: RemotePrefill, key: bytes) -> RemotePrefill:
    """The same params with their MAC set."""
    ticket = msgspec.structs.replace(params.kvferry, mac=_mac(params, key))
    return msgspec.structs.replace(params, kvferry=ticket)


def sign_early(signed: RemotePrefill, key: bytes, opens_within_s: float) -> RemotePrefill:
    """Signed params as a ticket whose slot may open only later.

    One prompt has both: the ticket, and the params of its answer. The digests and block ids of a long prompt are
    encoded once, for the latter.
    """
    opens_ms = round(opens_within_s * 1000)
    mac = _early_mac(signed.kvferry.mac, opens_ms, key)
    ticket = msgspec.structs.replace(signed.kvferry, mac=mac, opens_within_s=opens_ms / 1000)
    return msgspec.structs.replace(signed, kvferry=ticket)


def check_params_mac(params: RemotePrefill, key: bytes) -> None:
    """Check that the producer wrote these params.

    Raises:
        InvalidParams: the mac is not the producer's.
    """
    if not hmac.compare_digest(_mac(params, key), params.kvferry.mac):
        raise InvalidParams(
            "kvferry.mac", params.kvferry.mac, "the mac of exactly these params by their producer"
        )


def _mac(params: RemotePrefill, key: bytes) -> str:
    """HMAC-SHA256 over the msgpack of a fixed tuple of integers and text, without floats and key order.

    A ticket whose slot opens later has the MAC over that of the same params without it, and the time.
    """
    ticket = params.kvferry
    opens_ms = round(ticket.opens_within_s * 1000)
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
    mac = _hmac(covered, key)
    return _early_mac(mac, opens_ms, key) if opens_ms else mac


def _early_mac(mac: str, opens_ms: int, key: bytes) -> str:
    return _hmac((_EARLY_DOMAIN, mac, opens_ms), key)


def _hmac(covered: tuple[object, ...], key: bytes) -> str:
    # Not hmac.digest: it releases the interpreter's lock, which may delay the step that calls this.
    return hmac.new(key, _encoder.encode(covered), hashlib.sha256).hexdigest()
