"""Prometheus and promtool, where they are installed; where not, a skip that says so aloud."""

from __future__ import annotations

import pytest

from scripts.demo.prometheus import program


def tool(name: str) -> str:
    """The path of a program of Prometheus, installed or beside Python (scripts/bootstrap_prometheus.py), or a skip."""
    found = program(name)
    if found is None:
        pytest.skip(f"NOT TESTED: {name} is not installed, and bootstrap could not fetch it; queries were only parsed")
    return found
