"""Writing an engine's description where an operator asked for it: whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from kvferry.protocol.description_json import dump_of, encode_dump
from kvferry.protocol.errors import InvalidConfig
from kvferry.protocol.handshake import EngineDescription

_MODE = 0o644


def write_description(name: str, engine: EngineDescription) -> Path:
    """Write the dump of an engine; whoever reads the file meets the old one or the new one, never a part.

    Args:
        name: the path as configured; `{engine_id}` stands for the engine's id, in which slashes become underscores.

    Raises:
        InvalidConfig: it cannot be written; the text says why.
    """
    path = Path(name.replace("{engine_id}", engine.engine_id.replace("/", "_")))
    try:
        _replace(path, encode_dump(dump_of(engine)))
    except (OSError, ValueError) as refused:
        raise InvalidConfig("description_file", str(path), f"a file that can be written ({refused})") from None
    return path


def _replace(path: Path, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:64]}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            os.fchmod(stream.fileno(), _MODE)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
