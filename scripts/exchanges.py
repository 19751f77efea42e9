"""The drawings of the exchanges between engines, read from the docstrings of `kvferry.protocol`.

Each exchange is drawn once, in the module of its messages: a paragraph `Title: who sends it, when`, and an indented one
that has an arrow in it. There a message is its type's name with its fields in braces, `…` for those that are not shown:

    Hello{engine_id: ?, …} ──────►
        ◄────── EngineDescription{boot, workers: [WorkerDescription{place, …}], …}

Names and fields are compared with the types by `tests/protocol/test_exchanges.py`, so a drawing cannot outlive them.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

from kvferry.protocol import (
    digests,
    handshake,
    orders,
    params,
    queries,
    slots,
)

MODULES: tuple[ModuleType, ...] = (
    handshake,
    queries,
    params,
    digests,
    slots,
    orders,
)
ELSE = "…"
_ARROW = re.compile("[►◄]")
_LINES = str.maketrans(dict.fromkeys("│├┤╡╞─═►◄", " "))
_MESSAGE = re.compile(r"\[?([A-Z]\w*)\{")
_BRACKETS = {"{": 1, "[": 1, "}": -1, "]": -1}


@dataclass(frozen=True, slots=True)
class Exchange:
    """One drawing: its title, the sentences before it, and its lines without their indent."""

    title: str
    caption: str
    drawing: str


@dataclass(frozen=True, slots=True)
class DrawnMessage:
    """A message in a drawing.

    Attributes:
        name: of its type.
        fields: those that are shown, in this order; what stands behind a field's colon, or an empty text.
        is_whole: whether all fields are shown.
        is_answer: whether the arrow on its line points to the left.
    """

    name: str
    fields: dict[str, str]
    is_whole: bool
    is_answer: bool


def exchanges(module: ModuleType) -> Iterator[Exchange]:
    """The drawings in a module's docstring.

    Raises:
        ValueError: one has no title.
    """
    before = ""
    for paragraph in (module.__doc__ or "").split("\n\n"):
        is_drawing = paragraph.startswith("    ") and _ARROW.search(paragraph)
        if is_drawing:
            title, colon, caption = before.partition(": ")
            if not colon or "\n" in title:
                raise ValueError(
                    f"{module.__name__}: a drawing after {before!r} has no title"
                )
            yield Exchange(
                title.strip(), " ".join(caption.split()), textwrap.dedent(paragraph)
            )
        before = paragraph


def drawn_messages(drawing: str) -> Iterator[DrawnMessage]:
    """The messages in a drawing, those within others too."""
    for found in _MESSAGE.finditer(drawing):
        inside = _inside(drawing[found.end() :])
        items = [" ".join(item.split()) for item in _split(inside.translate(_LINES))]
        shown = (item.partition(":") for item in items if item not in ("", ELSE))
        yield DrawnMessage(
            name=found[1],
            fields={name: value.strip() for name, _, value in shown},
            is_whole=ELSE not in items,
            is_answer=_last_arrow(drawing, found.start()) == "◄",
        )


def message_within(value: str) -> str | None:
    """The type that a field's value is drawn as: `Name{…}`, or `[Name{…}]` for a list of them; None for none."""
    found = _MESSAGE.match(value)
    if found is None:
        return None
    return found[1]


def _inside(text: str) -> str:
    """The text up to the brace that closes the one before it."""
    depth = 1
    for index, character in enumerate(text):
        depth += _BRACKETS.get(character, 0)
        if depth == 0:
            return text[:index]
    raise ValueError(f"no closing brace in {text!r}")


def _split(inside: str) -> list[str]:
    """The fields, which commas separate; those within other messages stay together."""
    items = [""]
    depth = 0
    for character in inside:
        depth += _BRACKETS.get(character, 0)
        if character == "," and depth == 0:
            items.append("")
        else:
            items[-1] += character
    return items


def _last_arrow(drawing: str, at: int) -> str | None:
    """The arrow of the line at this place; a line without one belongs to the line before it."""
    line_end = drawing.find("\n", at)
    before = drawing[:line_end] if line_end >= 0 else drawing
    arrows = _ARROW.findall(before)
    if not arrows:
        return None
    return str(arrows[-1])
