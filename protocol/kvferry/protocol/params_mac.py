"""The MAC of `kv_transfer_params`, which pass through clients that could change them.

The key is generated at the producer's start and given to consumers at the handshake. So a client without access to the
side channel cannot point a valid lease at another request's blocks, nor a request at another host.

The MAC covers everything that a consumer acts on. Three kinds of fields are not covered:

- `transfer_mode`, which only routers read;
- `do_remote_prefill` and `do_remote_decode`, which say which of the two legs the object is for;
- `remote_prefill_cached_tokens`, which vLLM itself adds to an answer.
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


def sign_early(
    signed: RemotePrefill, key: bytes, opens_within_s: float
) -> RemotePrefill:
    """Signed params as a ticket whose slot may open only later."""
    # One prompt needs both objects: the early ticket, and the params of its answer. The early MAC is over the other
    # one, so the digests and block ids of a long prompt are encoded and hashed once.
    opens_ms = _milliseconds(opens_within_s)
    mac = _early_mac(signed.kvferry.mac, opens_ms, key)
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
    # keys nor a float may have an influence.
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
        _milliseconds(ticket.lease_s),
        ticket.digests,
        ticket.held_from,
    )
    # Appended only where there is one, so that this field changes no MAC of params without it.
    if ticket.stream_row is not None:
        covered += (ticket.stream_row,)
    mac = _hmac(covered, key)
    opens_ms = _milliseconds(ticket.opens_within_s)
    if not opens_ms:
        return mac
    return _early_mac(mac, opens_ms, key)


def _early_mac(mac: str, opens_ms: int, key: bytes) -> str:
    return _hmac((_EARLY_DOMAIN, mac, opens_ms), key)


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def _hmac(covered: tuple[object, ...], key: bytes) -> str:
    # Not hmac.digest: it releases the interpreter's lock, which may delay the step that calls this.
    return hmac.new(key, _encoder.encode(covered), hashlib.sha256).hexdigest()
