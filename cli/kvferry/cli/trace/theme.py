"""The theme of timelines: label and colour of each phase. Waiting is pale or warm, work is saturated."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.trace.phases import Phase
from kvferry.trace.summary import HANDOVER


@dataclass(frozen=True, slots=True)
class PhaseTheme:
    """The label and colours of a phase.

    Attributes:
        ink: colour of text on `colour`.
        meaning: a short description.
    """

    label: str
    colour: str
    ink: str
    meaning: str


_DARK, _LIGHT = "#111827", "#ffffff"

PHASE_THEMES = {
    Phase.PREFILL_QUEUE.value: PhaseTheme(
        "prefill queue", "#bccbe4", _DARK, "the producer has no room or no step for it yet"
    ),
    Phase.PREFILL.value: PhaseTheme("prefill", "#4c7fe0", _LIGHT, "the producer computes the prompt"),
    Phase.ROUTER.value: PhaseTheme(
        "router", "#9b7be8", _LIGHT, "from the producer's answer to the consumer, by the router"
    ),
    Phase.DECODE_QUEUE.value: PhaseTheme(
        "decode queue", "#f3b62c", _DARK, "the consumer has no blocks or no step for it yet"
    ),
    Phase.ORDER.value: PhaseTheme("order", "#d8c9a3", _DARK, "the order to load goes to the workers"),
    Phase.LOAD.value: PhaseTheme("load", "#3f9d6b", _LIGHT, "the workers load; their stages are not recorded"),
    Phase.QUEUED.value: PhaseTheme("load queued", "#fbe08b", _DARK, "the worker has other loads to do first"),
    Phase.CONNECTING.value: PhaseTheme(
        "connecting", "#ee7b30", _DARK, "first contact with the producer, or the device is not done"
    ),
    Phase.FENCE.value: PhaseTheme("fence", "#dc4a4a", _LIGHT, "the producer's worker is not ready"),
    Phase.POSTING.value: PhaseTheme("posting", "#45c4b6", _DARK, "reads are prepared and posted"),
    Phase.READING.value: PhaseTheme("reading", "#1f9150", _LIGHT, "bytes are under way"),
    Phase.FENCE_AGAIN.value: PhaseTheme("second fence", "#9bc53d", _DARK, "check that the lease was still valid"),
    Phase.REPORT.value: PhaseTheme("report", "#e46aa7", _DARK, "some workers have not reported to the scheduler yet"),
    Phase.FIRST_STEP.value: PhaseTheme("first step", "#8fa1b8", _DARK, "loaded, and not scheduled yet"),
    Phase.HELD.value: PhaseTheme("held", "#6b7a90", _LIGHT, "the producer keeps the blocks"),
}


def theme_of(phase: str) -> PhaseTheme:
    """The theme of a phase; a default for phases of later versions."""
    return PHASE_THEMES.get(phase) or PhaseTheme(phase, "#9ca3af", _DARK, "")


def class_of(phase: str) -> str:
    """The phase's CSS class."""
    return f"p-{phase}" if phase in PHASE_THEMES else "p-other"


def label_of(phase: str) -> str:
    """The phase's name for people."""
    return HANDOVER if phase == HANDOVER else theme_of(phase).label


def meaning_of(phase: str) -> str:
    """A short description of the phase."""
    return (
        "from the prompt's end until it is loaded, or computed here" if phase == HANDOVER else theme_of(phase).meaning
    )


def style() -> str:
    """The CSS of every picture; it follows the system's light or dark mode."""
    colours = [f".p-{phase}{{fill:{one.colour}}}.on-{phase}{{fill:{one.ink}}}" for phase, one in PHASE_THEMES.items()]
    return "".join((_STYLE, ".p-other{fill:#9ca3af}.on-other{fill:#111827}", *colours))


_STYLE = """
.paper{fill:#ffffff}.ink{fill:#0f172a}.muted{fill:#5b6778}.bad{fill:#c02626}.band{fill:#f5f7fa}.grid{stroke:#dde3ea}
.zero{stroke:#64748b}
@media (prefers-color-scheme: dark){
.paper{fill:#12161d}.ink{fill:#e8edf4}.muted{fill:#98a5b6}.bad{fill:#ff8a80}.band{fill:#1a202a}.grid{stroke:#2d3644}
.zero{stroke:#7c8a9d}}
"""
