"""The site is built without a network; mkdocs checks its links, anchors and navigation (`strict` in mkdocs.yml)."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from markdown_it import MarkdownIt

from tests.docs.commands import ROOT, TOP_PAGES
from tests.docs.site import Page, anchors_on_a_git_host, read_page

SOURCES = sorted((ROOT / "docs").glob("*.md"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with a network that answers nothing."""
    folder = tmp_path_factory.mktemp("site")
    dead = dict.fromkeys(
        ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "mkdocs",
            "build",
            "--strict",
            "-d",
            folder,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, **dead, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def read(site: Path) -> dict[Path, Page]:
    return {path: read_page(path) for path in site.rglob("*.html")}


def is_elsewhere(link: str) -> bool:
    return bool(urlsplit(link).scheme or urlsplit(link).netloc)


def test_no_page_asks_for_anything_from_another_host(
    site: Path, read: dict[Path, Page]
) -> None:
    """The theme's own script fetches mermaid where a page has a diagram of it, and GitHub's counts for a `repo_url`."""
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    loaded = [*re.findall(r"(?:url\(|@import )[\"']?(?!data:)([^\"')]+)", styles)]
    loaded += [link for page in read.values() for link in page.loaded]
    assert [link for link in loaded if is_elsewhere(link)] == []
    asks = re.compile(
        r'class="mermaid"|data-md-component="source"|<script[^>]*>[^<]*(?:https?:)?//[a-z]'
    )
    assert [path.name for path in read if asks.search(path.read_text())] == []


@pytest.mark.parametrize(
    "source", [*SOURCES, *TOP_PAGES], ids=lambda source: source.name
)
def test_links_hold_on_a_git_host_as_well(source: Path) -> None:
    page = read_markdown(source)
    missing: list[str] = []
    for link in page:
        path, _, anchor = link.partition("#")
        target = (source.parent / path).resolve() if path else source
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            missing.append(link)
    assert missing == []


@functools.cache
def anchors_of(page: Path) -> set[str]:
    return anchors_on_a_git_host(page.read_text())


def read_markdown(source: Path) -> list[str]:
    """The relative links of a page."""
    found: list[str] = []
    for token in MarkdownIt("commonmark").enable("table").parse(source.read_text()):
        for child in token.children or ():
            link = child.attrGet("href") or child.attrGet("src")
            if isinstance(link, str) and not is_elsewhere(link):
                found.append(unquote(link))
    return found
