"""The site as it was built, read back: links and what a browser loads."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt


@dataclass
class Page:
    """One HTML page.

    Attributes:
        loaded: what a browser fetches for it: scripts, styles, images.
    """

    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.page = Page()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "a" and "href" in given:
            self.page.links.append(given["href"])
        loads = tag in ("script", "img", "source", "iframe") or (
            tag == "link" and given.get("rel") != "canonical"
        )
        if loads and (
            target := given.get("src") or given.get("srcset") or given.get("href")
        ):
            self.page.loaded.append(target)


def read_page(path: Path) -> Page:
    """A page of the site."""
    reader = _Reader()
    reader.feed(path.read_text())
    return reader.page


def anchors_on_a_git_host(text: str) -> set[str]:
    """Git hosts' anchors of the headings: lower case, blanks become hyphens, the n-th of the same name gets `-n`."""
    seen: Counter[str] = Counter()
    anchors: set[str] = set()
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    for opened, inline in pairwise(tokens):
        if opened.type == "heading_open":
            parts = (
                each.content
                for each in inline.children or ()
                if each.type in ("text", "code_inline")
            )
            slug = re.sub(r"[^\w\- ]", "", "".join(parts).lower()).replace(" ", "-")
            anchors.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
    return anchors
