"""The commands in fenced blocks of the documentation."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
TOP_PAGES = tuple(
    ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")
)
PAGES = (*TOP_PAGES, *sorted((ROOT / "docs").glob("*.md")))
_COMMENT = re.compile(r"(?:^|\s+)#\s.*$", re.MULTILINE)
_ENDS = re.compile(r"[|;&()<>\n]+")


@dataclass(frozen=True, slots=True)
class Command:
    """A simple command of a page, without variables before it, redirections and comments. `line`: of its block."""

    page: str
    line: int
    words: tuple[str, ...]

    @property
    def program(self) -> str:
        """The name of the program, without its folder."""
        return self.words[0].rpartition("/")[2]


def blocks(page: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every block of shell commands; of a session, what is typed."""
    for token in MarkdownIt().parse(page.read_text()):
        language = token.info.strip()
        session = language == "console" or (
            not language and token.content.startswith("$ ")
        )
        if (
            token.type == "fence"
            and token.map
            and (session or language in ("sh", "bash", "shell"))
        ):
            lines = token.content.splitlines()
            typed = (
                [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
                if session
                else lines
            )
            yield token.map[0] + 1, "\n".join(typed)


def commands_of(text: str) -> list[tuple[str, ...]]:
    """The simple commands of a script: words between `;`, `|`, line ends and such."""
    lexer = shlex.shlex(
        _COMMENT.sub("", text).replace("\\\n", " "),
        posix=True,
        punctuation_chars="|;&()<>\n",
    )
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    found: list[list[str]] = [[]]
    for word in lexer:
        if _ENDS.fullmatch(word):
            found.append([">"] if ">" in word else [])
        elif found[-1] or not re.match(r"[A-Z_]+=", word):
            found[-1].append(word)
    return [tuple(words) for words in found if words and words[0] not in (">", "umask")]


def typed(*programs: str) -> list[Command]:
    """The commands of all pages that start one of these programs; of all programs if none is named."""
    every = [
        Command(page.relative_to(ROOT).as_posix(), line, words)
        for page in PAGES
        for line, text in blocks(page)
        for words in commands_of(text)
    ]
    return [command for command in every if not programs or command.program in programs]
