"""The envelope in which an agent's metadata travels to its peers:

    magic (8 bytes) | BLAKE2b-128 of the rest (16) | length of the name (2, little endian) | agent name, UTF-8 | body

The body belongs to the fabric.
"""

from __future__ import annotations

import hashlib
import hmac

from kvferry.protocol.errors import shorten
from kvferry.worker.fabric.errors import InvalidFabricRequest, InvalidMetadata

MAX_NAME_BYTES = 255

_MAGIC = b"KVFABRC1"
_DIGEST_BYTES = 16
_LENGTH_BYTES = 2
_REST_START = len(_MAGIC) + _DIGEST_BYTES


def check_agent_name(agent_name: str) -> bytes:
    """The name in UTF-8.

    Raises:
        InvalidFabricRequest: it is not 1 … `MAX_NAME_BYTES` bytes of UTF-8 without a NUL.
    """
    try:
        name = agent_name.encode()
    except UnicodeEncodeError as error:
        raise InvalidFabricRequest(
            "name agent", f"{shorten(agent_name)} cannot be written in UTF-8"
        ) from error
    if not 0 < len(name) <= MAX_NAME_BYTES or b"\0" in name:
        raise InvalidFabricRequest(
            "name agent",
            f"{shorten(agent_name)}; expected 1 … {MAX_NAME_BYTES} bytes, no NUL",
        )
    return name


def wrap_metadata(agent_name: str, body: bytes) -> bytes:
    """The envelope around `body`.

    Raises:
        InvalidFabricRequest: `check_agent_name` refuses the name.
    """
    name = check_agent_name(agent_name)
    # The name stands outside the body, which only the fabric's library can parse: a fabric must
    # refuse an agent that it knows *before* its library replaces the agent's entry, which
    # invalidates its descriptors.
    rest = len(name).to_bytes(_LENGTH_BYTES, "little") + name + body
    return _MAGIC + _digest(rest) + rest


def open_metadata(metadata: bytes) -> tuple[str, bytes]:
    """(agent name, body).

    Raises:
        InvalidMetadata: `wrap_metadata` did not make this.
    """
    has_header = (
        isinstance(metadata, bytes)
        and metadata.startswith(_MAGIC)
        and len(metadata) >= _REST_START + _LENGTH_BYTES
    )
    if not has_header:
        raise InvalidMetadata("add peer", f"{shorten(metadata)} is no fabric metadata")
    digest = metadata[len(_MAGIC) : _REST_START]
    rest = metadata[_REST_START:]
    # NIXL passes the body to UCX, which crashes on some damaged addresses (found by flipping
    # bytes). The checksum turns damage into an error; it is no defence against a malicious peer.
    if not hmac.compare_digest(digest, _digest(rest)):
        raise InvalidMetadata(
            "add peer", f"the checksum of {len(metadata)} bytes of metadata is wrong"
        )
    name_bytes = int.from_bytes(rest[:_LENGTH_BYTES], "little")
    name_end = _LENGTH_BYTES + name_bytes
    try:
        name = rest[_LENGTH_BYTES:name_end].decode()
    except UnicodeDecodeError as error:
        raise InvalidMetadata("add peer", "the agent name is not UTF-8") from error
    if not 0 < name_bytes <= MAX_NAME_BYTES or len(rest) < name_end:
        raise InvalidMetadata(
            "add peer",
            f"the agent name has {name_bytes} bytes; expected 1 … {MAX_NAME_BYTES}",
        )
    return name, rest[name_end:]


def _digest(rest: bytes) -> bytes:
    return hashlib.blake2b(rest, digest_size=_DIGEST_BYTES).digest()
