"""docs/deployment.md and docs/migration.md: facts are those of the code. Their commands and links: tests/docs."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import fields
from pathlib import Path

from kvferry.connector.config import WITHOUT_MEANING, FerryConfig
from tests.deploy.launches import REPOSITORY

DOCS = REPOSITORY / "docs"
PAGES = ("deployment.md", "migration.md")


def section(page: str, title: str) -> str:
    return (DOCS / page).read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_table_of_keys_has_all_of_the_stock_connectors() -> None:
    rows = [
        row.split("|")[1:3]
        for row in section("migration.md", "Configuration keys").splitlines()
        if "|" in row
    ]
    reported = {
        key: meaning for keys, meaning in rows for key in re.findall(r"`(\w+)`", keys)
    }
    as_before = {
        key for key, meaning in reported.items() if meaning.strip() == "as before"
    }
    assert as_before == {
        option.name for option in fields(FerryConfig) if option.metadata["peer"]
    }
    assert {
        key
        for key, meaning in reported.items()
        if "ignored with a warning: " in meaning
    } == set(WITHOUT_MEANING)


def documented_metrics() -> dict[str, str]:
    """Name → meaning, from the table of operations.md, which another test compares with the code."""
    rows = re.findall(
        r"^\| `vllm:(\w+)(?:\{\w+\})?` \| \w+ \| (.*) \|$",
        (DOCS / "operations.md").read_text(),
        re.MULTILINE,
    )
    return dict(rows)


def test_the_table_of_metrics_has_all_that_both_connectors_have() -> None:
    vllm = importlib.util.find_spec("vllm")
    assert vllm is not None
    assert vllm.origin is not None
    folder = Path(vllm.origin).parent
    source = (
        folder / "distributed/kv_transfer/kv_connector/v1/nixl/stats.py"
    ).read_text()
    stock = set(re.findall(r'name="vllm:(nixl_\w+)"', source))
    text = section("migration.md", "Metrics")
    reported = set(re.findall(r"`vllm:(nixl_\w+)`", text))
    assert reported <= set(documented_metrics())
    assert {name.removesuffix("_total") for name in reported} == stock
