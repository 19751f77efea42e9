"""Hooks of `mkdocs.yml`: pages link to files beside docs/ as they do on a git host.

Everything that a page links to outside of docs/ is copied to `source/`: Markdown becomes a page, JSON and SVG stay
files, any other file, or the files of a folder, a page with their text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(
    r"^```.*?^```$|(?<=\]\()(?!\w+:|/)([^)\s#]+)", re.MULTILINE | re.DOTALL
)
"""A fenced block, or the path of a relative link (group 1)."""
_AS_THEY_ARE = (".md", ".json", ".svg", ".png", ".csv")


def place(path: str) -> str:
    """Where a file of the repository is on the site, as a source of it: `source/deploy/slurm.md` for `deploy/slurm`."""
    known = path.endswith(_AS_THEY_ARE)
    return (
        path.removeprefix("docs/")
        if path.startswith("docs/")
        else f"source/{path}{'' if known else '.md'}"
    )


def content(path: Path) -> str:
    """A file as it is, or a page with its text, or with the text of a folder's files."""
    if path.suffix in _AS_THEY_ARE:
        return path.read_text()
    files = (
        [path]
        if path.is_file()
        else sorted(each for each in path.iterdir() if each.is_file())
    )
    parts = [
        f"## {each.name}\n\n````{each.suffix[1:] or 'text'}\n{each.read_text().rstrip()}\n````\n"
        for each in files
    ]
    return "\n".join([f"# {path.relative_to(ROOT)}\n", *parts])


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what the pages link to beside docs/, and what those pages link to in turn."""
    waiting = [
        (f"docs/{file.src_uri}", file.content_string)
        for file in files.documentation_pages()
    ]
    seen: set[str] = set()
    while waiting:
        page, text = waiting.pop()
        for link in filter(None, _LINK.findall(text)):
            path = os.path.normpath(os.path.join(os.path.dirname(page), link))
            if (
                path in seen
                or path.startswith(("docs/", ".."))
                or not (ROOT / path).exists()
            ):
                continue
            seen.add(path)
            copy = content(ROOT / path)
            files.append(
                File.generated(
                    config,
                    place(path),
                    content=copy,
                    inclusion=InclusionLevel.NOT_IN_NAV,
                )
            )
            if path.endswith(".md"):
                waiting.append((path, copy))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """A page whose links lead to the site's places."""
    uri: str = page.file.src_uri
    here = os.path.dirname(
        uri.removeprefix("source/") if uri.startswith("source/") else f"docs/{uri}"
    )

    def change(found: re.Match[str]) -> str:
        if found[1] is None:
            return found[0]
        return os.path.relpath(
            place(os.path.normpath(os.path.join(here, found[1]))),
            os.path.dirname(uri) or ".",
        )

    return _LINK.sub(change, markdown)
