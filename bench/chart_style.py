"""Colours of charts on light and dark pages, and matplotlib's settings that make a drawing repeatable."""

from __future__ import annotations

import re
from html import escape
from typing import Any

BACKGROUND, INK, MUTED, GRID = "#fcfcfb", "#1b1b1a", "#5b5a57", "#e2e1dd"
COLOURS = ("#2a78d6", "#e0721f", "#1a9e70", "#8250c4", "#c9971c", "#d1447f", "#6f6e69")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
"""Of the first series, the second, …: who sees no colours tells them apart by these."""

DARK = {
    BACKGROUND: "#16181c",
    INK: "#f0efec",
    MUTED: "#b4b2ac",
    GRID: "#34373d",
    "#2a78d6": "#5b9fee",
    "#e0721f": "#f0904a",
    "#1a9e70": "#3fc08f",
    "#8250c4": "#ab8af0",
    "#c9971c": "#dfb546",
    "#d1447f": "#ec72a6",
    "#6f6e69": "#a3a19b",
}

SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",  # words stay words, in a font that the reader has
    "svg.hashsalt": "kvferry",
    "path.simplify": False,
    "font.family": ["DejaVu Sans"],  # comes with matplotlib
    "font.size": 9,
    "figure.dpi": 72,
    "text.parse_math": False,
}


def for_readers(svg: str, title: str) -> str:
    """The SVG as matplotlib wrote it, with the reader's fonts, a label for screen readers and the dark colours.

    The background belongs to the drawing and changes with it, so whatever the page around it does, it can be read.
    """
    rules = "".join(f'[{of}="{light}"]{{{of}:{dark}}}' for light, dark in DARK.items() for of in ("fill", "stroke"))
    sheet = f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>"
    svg = _STYLE.sub(_colours_as_attributes, svg)
    svg = svg.replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, system-ui, sans-serif")
    head, opening, rest = svg.partition("<svg ")
    attributes, closing, body = rest.partition(">")
    label = f'role="img" aria-label="{escape(title, quote=True)}" '
    return f"{head}{opening}{label}{attributes}{closing}\n {sheet}{body}"


_STYLE = re.compile(r' style="([^"]*)"')
_COLOUR = re.compile(r"(fill|stroke): (#[0-9a-f]{6});? ?")


def _colours_as_attributes(found: re.Match[str]) -> str:
    """Any style sheet overrides an attribute; matplotlib writes colours as styles, which none overrides."""
    attributes = "".join(f' {of}="{colour}"' for of, colour in _COLOUR.findall(found[1]))
    rest = _COLOUR.sub("", found[1]).rstrip("; ")
    return attributes + (f' style="{rest}"' if rest else "")
