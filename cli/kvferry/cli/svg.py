"""The part of SVG that the pictures need: elements as text, with all outside text escaped."""

from __future__ import annotations

import re
from xml.sax.saxutils import escape, quoteattr

FONT = "Inter, 'Helvetica Neue', Helvetica, Arial, 'DejaVu Sans', sans-serif"

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def element(name: str, *children: str, **attributes: str | float) -> str:
    """One element; `_` in an attribute's name stands for `-`, a trailing one for nothing."""
    shown = "".join(
        f" {key.rstrip('_').replace('_', '-')}={quoteattr(_clean(_value(value)))}" for key, value in attributes.items()
    )
    return f"<{name}{shown}>{''.join(children)}</{name}>" if children else f"<{name}{shown}/>"


def text(
    content: str,
    x: float,
    y: float,
    *,
    size: float = 12,
    fill: str = "#1f2937",
    weight: int = 400,
    anchor: str = "start",
    **more: str | float,
) -> str:
    """A line of text; `y` is its baseline."""
    return element(
        "text", plain(content), x=x, y=y, font_size=size, fill=fill, font_weight=weight, text_anchor=anchor, **more
    )


def plain(content: str) -> str:
    """Text between tags."""
    return escape(_clean(content))


def _clean(content: str) -> str:
    return _NOT_XML.sub("\ufffd", content)


def _value(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
