"""Fills the generated tables of docs/operations.md from the configuration class and the metrics tables.

python -m scripts.generate_docs            # write
python -m scripts.generate_docs --check    # exit 1 when something is out of date; the tests call this
"""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "operations.md"


def tables() -> dict[str, str]:
    """Every generated part by name, as Markdown."""
    from kvferry.connector.config import WITHOUT_MEANING, FerryConfig

    options = ["| key | default | meaning | |", "| --- | --- | --- | --- |"]
    for option in fields(FerryConfig):
        default = list(option.default) if isinstance(option.default, tuple) else option.default
        shown = "none" if default is None else f"`{default}`".replace("'", '"')
        whose = "as in NixlConnector" if option.metadata["peer"] else ""
        options.append(f"| `{option.name}` | {shown} | {option.metadata['doc']} | {whose} |")
    ignored = [f"- `{key}`: {why}" for key, why in WITHOUT_MEANING.items()]
    return {"config": "\n".join(options), "ignored": "\n".join(ignored), "metrics": _metrics()}


def _metrics() -> str:
    from kvferry.connector.metrics import COUNTERS, HISTOGRAMS

    rows = ["| metric | kind | meaning |", "| --- | --- | --- |"]
    for counter in COUNTERS.values():
        label = f"{{{counter.label}}}" if counter.label else ""
        values = f" {counter.label}: {', '.join(counter.values)}." if counter.values else ""
        rows.append(f"| `vllm:{counter.exported}_total{label}` | counter | {counter.doc}{values} |")
    rows += [f"| `vllm:{histogram.exported}` | histogram | {histogram.doc} |" for histogram in HISTOGRAMS.values()]
    return "\n".join(rows)


def filled(text: str) -> str:
    """The page with every part between its markers replaced."""
    for name, table in tables().items():
        begin, end = f"<!-- generated: {name} -->\n", "\n<!-- end -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise SystemExit(f"{PAGE}: no place for the generated part {name!r}")
        text = before + begin + table + end + after
    return text


def main(arguments: list[str]) -> int:
    """Write or check the page."""
    now = PAGE.read_text()
    wanted = filled(now)
    if "--check" in arguments:
        if now != wanted:
            print(f"{PAGE} is out of date: run `python -m scripts.generate_docs`", file=sys.stderr)
        return int(now != wanted)
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
