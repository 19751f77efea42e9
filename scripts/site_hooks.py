"""Hooks of `mkdocs.yml` for the site's build: pages link to files beside docs/ as they do on a git host.

A link from a page to a file of the repository is turned into one to a copy under `source/`: Markdown becomes a page, a
folder a page that shows its files, JSON and SVG stay files, everything else a page with its text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parent.parent
_SOURCE = "source"
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_FENCE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
_LANGUAGES = {".yaml": "yaml", ".yml": "yaml", ".py": "python", ".sh": "sh", ".sbatch": "sh", ".service": "ini"}
_AS_THEY_ARE = (".json", ".svg", ".png", ".csv")


def relinked(text: str, change: Callable[[str], str]) -> str:
    """Markdown with every relative link outside of fenced blocks changed; anchors stay."""

    def one(found: re.Match[str]) -> str:
        path, hash_, anchor = found[2].partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return found[0]
        return f"{found[1]}{change(path)}{hash_}{anchor}{found[3]}"

    parts = _FENCE.split(text)
    return "".join(part if part.startswith("```") else _LINK.sub(one, part) for part in parts)


def links(text: str) -> Iterator[str]:
    """Paths that a page links to."""
    found: list[str] = []
    relinked(text, lambda path: found.append(path) or path)  # type: ignore[func-returns-value]
    yield from found


def place(target: PurePosixPath) -> PurePosixPath:
    """Where something of the repository is on the site, as a source of it.

    Args:
        target: its path in the repository, e.g. `docs/cli.md`, `deploy/slurm`, `bench/results/plan.json`.
    """
    if target.parts[0] == "docs":
        return target.relative_to("docs")
    if target.suffix in (".md", *_AS_THEY_ARE):
        return _SOURCE / target
    return _SOURCE / target.with_name(f"{target.name}.md")


def resolve(page: PurePosixPath, link: str) -> PurePosixPath:
    """The path in the repository that a page's relative link means."""
    return PurePosixPath(os.path.normpath(page.parent / link))


def shown(path: Path) -> str:
    """A page about a file or a folder that is no Markdown: its text."""
    name = path.relative_to(ROOT)
    files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.is_file())
    parts = [f"# {name}\n"]
    for file in files:
        title = f"## {file.name}\n\n" if path.is_dir() else ""
        fence = "````" if "```" in file.read_text() else "```"
        parts.append(f"{title}{fence}{_LANGUAGES.get(file.suffix, 'text')}\n{file.read_text().rstrip()}\n{fence}\n")
    return "\n".join(parts)


def beside(pages: dict[PurePosixPath, str]) -> dict[PurePosixPath, Path]:
    """All that pages link to outside of docs/, and what those link to in turn: path in the repository → file.

    Args:
        pages: path in the repository → Markdown.
    """
    found: dict[PurePosixPath, Path] = {}
    waiting = list(pages.items())
    while waiting:
        page, text = waiting.pop()
        for link in links(text):
            target = resolve(page, link)
            if target in found or target.parts[0] in ("docs", ".."):
                continue
            if (ROOT / target).exists():
                found[target] = ROOT / target
                if target.suffix == ".md":
                    waiting.append((target, (ROOT / target).read_text()))
    return found


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what the pages link to beside docs/."""
    docs = Path(config.docs_dir)
    pages = {
        PurePosixPath("docs", file.src_uri): (docs / file.src_uri).read_text() for file in files.documentation_pages()
    }
    for target, path in sorted(beside(pages).items()):
        where = str(place(target))
        if target.suffix in (".md", *_AS_THEY_ARE):
            files.append(File.generated(config, where, content=path.read_text(), inclusion=InclusionLevel.NOT_IN_NAV))
        else:
            files.append(File.generated(config, where, content=shown(path), inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """A page whose links lead to the site's places."""
    uri = PurePosixPath(page.file.src_uri)
    here = uri.relative_to(_SOURCE) if uri.parts[0] == _SOURCE else PurePosixPath("docs") / uri

    def change(link: str) -> str:
        return os.path.relpath(place(resolve(here, link)), uri.parent)

    return relinked(markdown, change)
