"""The colours of timelines. Waiting is pale or warm, work is saturated."""

from __future__ import annotations

from kvferry.trace.phases import Phase

_COLOURS = {
    Phase.PREFILL_QUEUE: "#bccbe4",
    Phase.PREFILL: "#4c7fe0",
    Phase.ROUTER: "#9b7be8",
    Phase.DECODE_QUEUE: "#f3b62c",
    Phase.ORDER: "#d8c9a3",
    Phase.LOAD: "#3f9d6b",
    Phase.QUEUED: "#fbe08b",
    Phase.CONNECTING: "#ee7b30",
    Phase.FENCE: "#dc4a4a",
    Phase.POSTING: "#45c4b6",
    Phase.READING: "#1f9150",
    Phase.FENCE_AGAIN: "#9bc53d",
    Phase.REPORT: "#e46aa7",
    Phase.FIRST_STEP: "#8fa1b8",
    Phase.HELD: "#6b7a90",
}
_DARK = {Phase.PREFILL, Phase.ROUTER, Phase.LOAD, Phase.FENCE, Phase.READING, Phase.HELD}
"""Phases whose colour needs light text."""


def style() -> str:
    """The CSS of every picture; it follows the system's light or dark mode."""
    colours = [
        f".p-{phase}{{fill:{colour}}}.on-{phase}{{fill:{'#ffffff' if phase in _DARK else '#111827'}}}"
        for phase, colour in _COLOURS.items()
    ]
    return "".join((_STYLE, *colours))


_STYLE = """
.paper{fill:#ffffff}.ink{fill:#0f172a}.muted{fill:#5b6778}.bad{fill:#c02626}.grid{stroke:#dde3ea}.zero{stroke:#64748b}
@media (prefers-color-scheme:dark){
.paper{fill:#12161d}.ink{fill:#e8edf4}.muted{fill:#98a5b6}.bad{fill:#ff8a80}.grid{stroke:#2d3644}.zero{stroke:#7c8a9d}}
"""
