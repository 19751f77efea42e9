"""The tables of docs/protocol-reference.md from the message types: every field with its type, bounds and meaning."""

from __future__ import annotations

import inspect
import itertools
import re
import textwrap
from typing import Any

import msgspec
from msgspec import inspect as types

from kvferry.protocol import (
    description_json,
    geometry,
    handshake,
    ids,
    params,
    queries,
    slots,
)
from scripts import markdown
from scripts.exchanges import MODULES, exchanges

Message = type[msgspec.Struct]
PARTS: dict[str, tuple[Message, ...]] = {
    "params": (params.RemotePrefill, params.Ticket),
    "side channel": (
        handshake.Hello,
        handshake.Renew,
        handshake.Release,
        handshake.LeaseName,
        handshake.EngineDescription,
        handshake.DescriptionPart,
        handshake.Refused,
        queries.Subscribe,
        queries.PromptQuery,
        queries.FindPrefixes,
        queries.PrefixQuery,
        queries.Unsubscribe,
        queries.Answers,
        queries.Answer,
    ),
    "description": (
        handshake.ModelFacts,
        handshake.CacheGroup,
        handshake.WorkerDescription,
        handshake.LeaseTableAddress,
        geometry.Topology,
        geometry.Place,
        geometry.PagedTensor,
        geometry.Range,
        geometry.Interleave,
        geometry.Format,
    ),
    "notifications": (slots.Done,),
}
"""The messages of each generated part of the page."""
_LIMITS = {
    "kv_transfer_params": (f"`kvferry.version` {params.PARAMS_VERSION}", None),
    "a request on the side channel": (
        f"`version` {handshake.CHANNEL_VERSION}",
        handshake.MAX_REQUEST_BYTES,
    ),
    "an answer on it": (
        f"`version` {handshake.CHANNEL_VERSION}",
        handshake.MAX_REPLY_BYTES,
    ),
    "a notification": (
        f"magic `{slots.MAGIC.decode()}`",
        slots.MAX_NOTIFICATION_BYTES,
    ),
    "a description JSON": (
        f"`kvferry_description` {description_json.DESCRIPTION_JSON_VERSION}",
        description_json.MAX_DESCRIPTION_JSON_BYTES,
    ),
}
_ATTRIBUTE = re.compile(r"^    ((?:\w+, )*\w+): ", re.MULTILINE)
_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_HEX = "15 hex digits, not all 0"
_NAMED = (
    (ids.Text, "name"),
    (ids.Hex128, "32 hex digits"),
    (ids.Hex256, "64 hex digits"),
    (ids.HexEpoch, _HEX),
)


def reference() -> dict[str, str]:
    """The generated parts of the page by name."""
    rows = [
        (what, version, f"{most:,} bytes" if most else "")
        for what, (version, most) in _LIMITS.items()
    ]
    versions = markdown.table("of | version | at most", rows)
    return {
        "versions": versions,
        **{name: _table(messages) for name, messages in PARTS.items()},
    }


def drawings() -> dict[str, str]:
    """The drawing of every exchange, as a part of a page, by `exchange: <title>`."""
    return {
        f"exchange: {exchange.title}": (
            f"{textwrap.fill(f'**{exchange.title}**: {exchange.caption}', 120)}\n\n"
            f"```text\n{exchange.drawing}\n```"
        )
        for module in MODULES
        for exchange in exchanges(module)
    }


def _table(messages: tuple[Message, ...]) -> str:
    """Each message's name and purpose as a row, and its fields below it."""
    rows: list[tuple[str, ...]] = []
    for message in messages:
        kind = types.type_info(message)
        assert isinstance(kind, types.StructType)
        before, _, after = inspect.cleandoc(message.__doc__ or "").partition(
            "Attributes:\n"
        )
        tag = f"`{kind.tag}`" if kind.tag else ""
        listed = " A list in this order, not a map." if kind.array_like else ""
        rows += [
            (f"**{message.__name__}**", tag, "", f"{' '.join(before.split())}{listed}"),
            *_fields(kind, after),
        ]
    return markdown.table("field | type | default | meaning", rows)


def _fields(kind: types.StructType, attributes: str) -> list[tuple[str, ...]]:
    """One row a field, or one for neighbours that are alike but for the name, or for all of one type and default."""
    names_and_meanings = _ATTRIBUTE.split(attributes)[1:]
    meanings = {
        name: " ".join(meaning.split()).removesuffix(".")
        for names, meaning in zip(
            names_and_meanings[::2], names_and_meanings[1::2], strict=True
        )
        for name in names.split(", ")
    }
    kinds = {(_shown(field.type), _default(field)) for field in kind.fields}
    if len(kinds) == 1:
        names = ", ".join(f"`{field.encode_name}`" for field in kind.fields)
        return [
            (
                names,
                *kinds.pop(),
                "; ".join(meanings[field.name] for field in kind.fields),
            )
        ]
    rows = [
        (
            f"`{field.encode_name}`",
            _shown(field.type),
            _default(field),
            meanings.get(field.name, ""),
        )
        for field in kind.fields
    ]
    alike = itertools.groupby(rows, lambda row: row[1:])
    return [(", ".join(name for name, *_ in same), *rest) for rest, same in alike]


def _default(field: types.Field) -> str:
    if field.required:
        return "required"
    return f"`{_json(field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory())}`"


def _json(value: Any) -> str:
    if isinstance(value, msgspec.Raw):
        value = msgspec.msgpack.decode(value)
    return msgspec.json.encode(value).decode()


def _shown(kind: types.Type) -> str:
    """A type and its bounds in words."""
    match kind:
        case types.StructType():
            return kind.cls.__name__
        case types.LiteralType():
            return ", ".join(f"`{_json(value)}`" for value in kind.values)
        case types.VarTupleType() | types.ListType():
            length = _span(kind.min_length, kind.max_length)
            return f"list{f' ({length})' if length else ''} of {_shown(kind.item_type)}"
        case types.BytesType():
            return f"bytes, {_span(kind.min_length, kind.max_length)} bytes".replace(
                ",  bytes", ""
            )
        case types.StrType():
            named = [name for one, name in _NAMED if types.type_info(one) == kind]
            length = _span(kind.min_length, kind.max_length)
            like = f" like `{kind.pattern}`" if kind.pattern else ""
            return (
                named[0]
                if named
                else f"text{f', {length} characters' if length else ''}{like}"
            )
        case types.IntType() | types.FloatType():
            bounds = (("from", kind.ge), ("to", kind.le), ("below", kind.lt))
            words = " ".join(
                f"{word} {_number(bound)}"
                for word, bound in bounds
                if bound is not None
            )
            name = "integer" if isinstance(kind, types.IntType) else "number"
            return f"{name}, {words}" if words else name
        case types.UnionType():
            return " or ".join(map(_shown, kind.types))
        case types.EnumType():
            return ", ".join(f"`{member.value}`" for member in kind.cls)
        case types.RawType():
            return "any msgpack"
        case types.BoolType() | types.DictType() | types.NoneType():
            return {
                types.BoolType: "true or false",
                types.DictType: "map",
                types.NoneType: "null",
            }[type(kind)]
    raise TypeError(f"a type that the reference cannot show: {kind!r}")


def _span(low: int | None, high: int | None) -> str:
    if high is None:
        return "" if low is None else f"at least {low}"
    return f"{high:,}" if low == high else f"{low or 0} to {high:,}"


def _number(value: float) -> str:
    """A bound; powers of two as such: `2²⁴`, `2⁶³ − 1`."""
    for missing, shown in ((0, ""), (1, " − 1")):
        power = int(value + missing).bit_length() - 1
        if power > 16 and int(value) + missing == 1 << power:
            return f"2{str(power).translate(_RAISED)}{shown}"
    return (
        f"{value:,.0f}"
        if value == int(value) and abs(value) < 1 << 64
        else f"{value:g}"
    )
