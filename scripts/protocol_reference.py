"""docs/protocol-reference.md from the message types: every field, its type, its bounds and what its docstring says."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_origin

import msgspec
from msgspec import inspect as types

from kvferry.protocol import description_json, geometry, handshake, ids, notifications, params

_ATTRIBUTE = re.compile(r"^    ((?:\w+, )*\w+): ", re.MULTILINE)
_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_LEAVES: dict[type, str] = {
    types.IntType: "integer",
    types.FloatType: "number",
    types.StrType: "text",
    types.BoolType: "true or false",
}


@dataclass(frozen=True, slots=True)
class Chapter:
    """Messages that travel one way.

    Attributes:
        about: where they travel and how they are encoded.
    """

    title: str
    about: str
    messages: tuple[type[msgspec.Struct], ...]


CHAPTERS = (
    Chapter(
        "kv_transfer_params",
        "JSON in HTTP bodies, from the producer's answer through the router to the consumer. Flat keys are those of "
        "the NIXL contract, the object `kvferry` is the ticket.",
        (params.RemotePrefill, params.Ticket),
    ),
    Chapter(
        "Side channel",
        "One msgpack map a message, with its name under `type`. ZMQ: an empty frame, then the message.",
        (
            handshake.Hello,
            handshake.Renew,
            handshake.Release,
            handshake.LeaseName,
            handshake.EngineDescription,
            handshake.Refused,
        ),
    ),
    Chapter(
        "What a description holds",
        "Parts of `engine` on the side channel, and of a description JSON.",
        (
            handshake.ModelFacts,
            handshake.CacheGroup,
            handshake.WorkerDescription,
            handshake.LeaseTable,
            geometry.Topology,
            geometry.Place,
            geometry.PagedTensor,
            geometry.Range,
            geometry.Interleave,
            geometry.Format,
        ),
    ),
    Chapter(
        "Notifications",
        "Over NIXL, from a consumer's worker to a producer's: the four bytes `KVF1`, then one msgpack map with its "
        "name under `type`.",
        (notifications.Done,),
    ),
    Chapter(
        "Description JSON",
        "JSON files: what `kvferry describe --json` prints and `description_file` gets. Unlike on the wire, an unknown "
        "field is an error.",
        (description_json.EngineJson, description_json.WorkerJson),
    ),
)

VERSIONS = (
    ("kv_transfer_params, `kvferry.version`", params.PARAMS_VERSION),
    ("side channel, `version` of `hello`, `engine` and `refused`", handshake.CHANNEL_VERSION),
    ("notifications, in the magic", notifications.MAGIC.decode()),
    ("description JSON, `kvferry_description`", description_json.DESCRIPTION_JSON_VERSION),
)

SIZES = (
    ("a request on the side channel", handshake.MAX_REQUEST_BYTES),
    ("an answer", handshake.MAX_REPLY_BYTES),
    ("a notification", notifications.MAX_NOTIFICATION_BYTES),
    ("a description JSON", description_json.MAX_DESCRIPTION_JSON_BYTES),
)


def reference() -> dict[str, str]:
    """The generated parts of the page by name."""
    versions = ["| of | version |", "| --- | --- |", *(f"| {what} | `{value}` |" for what, value in VERSIONS)]
    sizes = ["| of | at most |", "| --- | --- |", *(f"| {what} | {value:,} bytes |" for what, value in SIZES)]
    return {
        "versions": "\n".join(versions),
        "sizes": "\n".join(sizes),
        "messages": "\n\n".join(part for chapter in CHAPTERS for part in _chapter(chapter)),
    }


def _chapter(chapter: Chapter) -> Iterator[str]:
    yield f"## {chapter.title}"
    yield chapter.about
    for message in chapter.messages:
        yield _message(message)


def _message(message: type[msgspec.Struct]) -> str:
    reported = types.type_info(message)
    if not isinstance(reported, types.StructType):
        raise TypeError(f"{message.__name__} is no message: {reported!r}")
    summary, meanings = _documented(message)
    tagged = f" (`type`: `{reported.tag}`)" if reported.tag else ""
    listed = "\n\nA list in this order, not a map." if reported.array_like else ""
    rows = ["| field | type | default | meaning |", "| --- | --- | --- | --- |"]
    rows += [
        f"| `{field.encode_name}` | {_shown(field.type)} | {_default(field)} | {meanings.get(field.name, '')} |"
        for field in reported.fields
    ]
    return f"### {message.__name__}{tagged}\n\n{summary}{listed}\n\n" + "\n".join(rows)


def _documented(message: type[msgspec.Struct]) -> tuple[str, dict[str, str]]:
    """A docstring as what comes before `Attributes:`, and the meaning of each attribute."""
    text = textwrap.dedent(f"    {message.__doc__ or ''}")
    before, _, after = text.partition("Attributes:\n")
    parts = _ATTRIBUTE.split(after)
    meanings = {
        name: " ".join(meaning.split()).removesuffix(".")
        for names, meaning in zip(parts[1::2], parts[2::2], strict=True)
        for name in names.split(", ")
    }
    paragraphs = (" ".join(each.split()) for each in before.split("\n\n"))
    return "\n\n".join(each for each in paragraphs if each), meanings


def _default(field: types.Field) -> str:
    if field.required:
        return "required"
    value = field.default
    if value is msgspec.NODEFAULT:
        made = field.default_factory
        return "" if made is msgspec.NODEFAULT else f"`{_plain(made())}`"
    return f"`{_plain(value)}`"


def _plain(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _shown(kind: types.Type) -> str:
    """A type and its bounds in words."""
    if isinstance(kind, types.StructType):
        return f"[{kind.cls.__name__}](#{_anchor(kind)})"
    if isinstance(kind, types.LiteralType):
        return ", ".join(f"`{_plain(value)}`" for value in kind.values)
    if isinstance(kind, types.UnionType):
        return " or ".join(_shown(each) for each in kind.types)
    if isinstance(kind, types.NoneType):
        return "null"
    if isinstance(kind, (types.VarTupleType, types.ListType)):
        return f"list{_length(kind, 'of')} of {_shown(kind.item_type)}"
    if isinstance(kind, types.BytesType):
        return f"bytes{_length(kind, ',')}"
    if isinstance(kind, types.StrType) and kind.pattern is not None:
        return _TEXTS.get(kind.pattern, f"text{_length(kind, ',')} like `{kind.pattern}`")
    name = _LEAVES.get(type(kind))
    if name is None:
        raise TypeError(f"a type that the reference cannot show: {kind!r}")
    return f"{name}{_length(kind, ',')}{_range(kind)}"


def _anchor(kind: types.StructType) -> str:
    tag = f" (`type`: `{kind.tag}`)" if kind.tag else ""
    return re.sub(r"[^\w\- ]", "", f"{kind.cls.__name__}{tag}".lower()).replace(" ", "-")


def _length(kind: Any, joint: str) -> str:
    """How long a text, a list or bytes may be; in brackets when `of` follows."""
    low, high = getattr(kind, "min_length", None), getattr(kind, "max_length", None)
    if low is None and high is None:
        return ""
    span = f"{high:,}" if low == high else f"{low or 0} to {high:,}"
    if joint == "of":
        return f" ({span})"
    return f"{joint} {span} {'bytes' if isinstance(kind, types.BytesType) else 'characters'}"


def _range(kind: Any) -> str:
    """Bounds as powers of two where they are such."""
    low, high = getattr(kind, "ge", None), getattr(kind, "le", None)
    below = getattr(kind, "lt", None)
    parts = [] if low is None else [f"from {_number(low)}"]
    parts += [f"to {_number(high)}"] if high is not None else [f"below {_number(below)}"] if below is not None else []
    return f", {' '.join(parts)}" if parts else ""


def _number(value: float) -> str:
    whole = int(value)
    if whole != value or abs(value) > 1 << 64:
        return f"{value:g}"
    for missing, shown in ((0, ""), (1, " − 1")):
        power = (whole + missing).bit_length() - 1
        if power > 16 and whole + missing == 1 << power:
            return f"2{str(power).translate(_RAISED)}{shown}"
    return f"{whole:,}"


def _pattern(annotated: Any) -> str:
    (meta,) = (each for each in get_args(annotated)[1:] if isinstance(each, msgspec.Meta))
    if get_origin(annotated) is None or meta.pattern is None:
        raise TypeError(f"no pattern: {annotated!r}")
    return meta.pattern


_TEXTS = {
    _pattern(ids.Text): "name",
    _pattern(ids.Hex128): "32 hex digits",
    _pattern(ids.Hex256): "64 hex digits",
    _pattern(ids.HexEpoch): "15 hex digits, not all 0",
}
