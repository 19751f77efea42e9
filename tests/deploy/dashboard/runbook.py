"""Addresses of the documentation that an alert or a panel names: absolute, since Grafana and Alertmanager show them."""

from __future__ import annotations

from collections.abc import Sequence

from scripts.accuracy.settings import ROOT
from tests.docs.site import anchors_on_a_git_host

BASE = "https://github.com/kvferry/kvferry/blob/main/"


def dead_links(urls: Sequence[str]) -> list[str]:
    """Those that are not absolute, or lead to no page, or no heading, of this repository."""
    dead = []
    for url in urls:
        page, _, anchor = url.removeprefix(BASE).partition("#")
        known = url.startswith(BASE) and (ROOT / page).is_file()
        if not known or (
            anchor and anchor not in anchors_on_a_git_host((ROOT / page).read_text())
        ):
            dead.append(url)
    return dead
