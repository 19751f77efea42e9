"""The part of SVG that the pictures need: elements as text, with all outside text escaped, in light and dark."""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape, quoteattr

from kvferry.protocol.visible import visible_lines

FONT = "Inter, 'Helvetica Neue', Helvetica, Arial, 'DejaVu Sans', sans-serif"
# CSS of every picture; it follows the light or dark mode of the page or system that shows it.
THEME = """
.paper{fill:#ffffff}.card{fill:#f6f8fa}.ink{fill:#0f172a}.muted{fill:#5b6778}.bad{fill:#c02626}
.grid{stroke:#dde3ea}.zero{stroke:#64748b;fill:none}
@media (prefers-color-scheme:dark){
.paper{fill:#12161d}.card{fill:#1b222c}.ink{fill:#e8edf4}.muted{fill:#98a5b6}.bad{fill:#ff8a80}
.grid{stroke:#2d3644}.zero{stroke:#7c8a9d}}
"""


def document(width: float, height: float, parts: Iterable[str]) -> str:
    """A file with one picture."""
    body = "\n".join(parts)
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="{FONT}">\n{body}\n</svg>\n'
    )


def element(name: str, *children: str, hint: str = "", **attributes: str | float) -> str:
    """One element.

    Args:
        hint: its tooltip.
        attributes: `_` in a name stands for `-`, a trailing one for nothing (`class_`).
    """
    tag = name
    for key, value in attributes.items():
        attribute = key.rstrip("_").replace("_", "-")
        tag += f" {attribute}={quoteattr(_clean(_value(value)))}"
    content = "".join(children)
    if hint:
        content = f"<title>{plain(hint)}</title>{content}"
    if not content:
        return f"<{tag}/>"
    return f"<{tag}>{content}</{name}>"


def rect(x: float, y: float, width: float, height: float, **attributes: str | float) -> str:
    """A rectangle."""
    return element("rect", x=x, y=y, width=width, height=height, **attributes)  # type: ignore[arg-type]


def text(content: str, x: float, y: float, size: float, **attributes: str | float) -> str:
    """A line of text; `y` is its baseline."""
    return element("text", plain(content), x=x, y=y, font_size=size, **attributes)  # type: ignore[arg-type]


def plain(content: str) -> str:
    """Text between tags."""
    return escape(_clean(content))


def _clean(content: str) -> str:
    # Line ends stay: tooltips have lines.
    return visible_lines(content)


def _value(value: str | float) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.2f}".rstrip("0").rstrip(".")
