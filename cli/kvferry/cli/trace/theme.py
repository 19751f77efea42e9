"""The theme of timelines: names, meanings and colours of phases. Waiting is pale or warm, work is saturated."""

from __future__ import annotations

from kvferry.trace.phases import Phase
from kvferry.trace.summary import HANDOVER

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

_PHASES = {phase.value: phase for phase in Phase}


def label_of(phase: str) -> str:
    """The phase's name for people; as it is for phases of later versions."""
    return _PHASES[phase].label if phase in _PHASES else phase


def meaning_of(phase: str) -> str:
    """A short description of the phase; empty for phases of later versions."""
    if phase == HANDOVER:
        return "from the prompt's end until it is loaded, or computed here"
    return _PHASES[phase].meaning if phase in _PHASES else ""


def class_of(phase: str) -> str:
    """The phase's CSS class."""
    return f"p-{phase}" if phase in _PHASES else "p-other"


def style() -> str:
    """The CSS of every picture; it follows the system's light or dark mode."""
    colours = [
        f".p-{phase.value}{{fill:{colour}}}.on-{phase.value}{{fill:{'#ffffff' if phase in _DARK else '#111827'}}}"
        for phase, colour in _COLOURS.items()
    ]
    return "".join((_STYLE, ".p-other{fill:#9ca3af}.on-other{fill:#111827}", *colours))


_STYLE = """
.paper{fill:#ffffff}.ink{fill:#0f172a}.muted{fill:#5b6778}.bad{fill:#c02626}.grid{stroke:#dde3ea}.zero{stroke:#64748b}
@media (prefers-color-scheme:dark){
.paper{fill:#12161d}.ink{fill:#e8edf4}.muted{fill:#98a5b6}.bad{fill:#ff8a80}.grid{stroke:#2d3644}.zero{stroke:#7c8a9d}}
"""
