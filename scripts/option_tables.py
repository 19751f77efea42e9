"""The tables of configuration keys, from the class that reads them."""

from __future__ import annotations

from dataclasses import fields


def options() -> str:
    """Every key with its default and its meaning, as Markdown."""
    from kvferry.connector.config import FerryConfig

    rows = ["| key | default | meaning | |", "| --- | --- | --- | --- |"]
    for option in fields(FerryConfig):
        default = list(option.default) if isinstance(option.default, tuple) else option.default
        shown = "none" if default is None else f"`{default}`".replace("'", '"')
        whose = "as in NixlConnector" if option.metadata["peer"] else ""
        rows.append(f"| `{option.name}` | {shown} | {option.metadata['doc']} | {whose} |")
    return "\n".join(rows)


def ignored() -> str:
    """The keys that are accepted and mean nothing."""
    from kvferry.connector.config import WITHOUT_MEANING

    return "\n".join(f"- `{key}`: {why}" for key, why in WITHOUT_MEANING.items())
