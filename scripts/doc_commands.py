"""The commands of the documentation: found on the pages, with what checks each, and the table of docs/commands.md.

Every fenced block of shell commands is one of these. Above it is a comment that says how its commands are checked:

    <!-- run -->                                   tests/docs/test_commands.py runs them as they stand
    <!-- console -->                               scripts.generate_docs has made the output below
    <!-- tested: TEST; in which way -->            this test runs them, or does what they do
    <!-- needs GPUs: TEST; in which way -->        cannot be run by the tests; this one looks at them

`KNOWN` says it for pages that have no such comments: the README, and what other scripts write.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LARGEST_SHARE = 0.2
"""Of the commands, those that may be marked as needing what the tests do not have."""
_BLOCK = re.compile(
    r"^(?: *<!-- (?P<mark>[^\n]*) -->\n)? *```(?P<language>[^\n`]*)\n(?P<body>.*?)^ *```$", re.MULTILINE | re.DOTALL
)
_SHELLS = ("sh", "bash", "shell", "console")
_MARK = re.compile(r"(?:tested|needs (?P<needs>[^:;]+))(?:: (?P<test>[^;]+?)(?:; (?P<way>.+))?)?")
_RUNNER = "tests/docs/test_commands.py::test_a_command_runs_as_it_stands"
_PRINTED = "tests/docs/test_generated.py::test_what_is_generated_is_up_to_date"
_PARSED = "tests/docs/test_benchmarks.py::test_its_own_parser_takes_the_command_line"
_QUICK = "tests/docs/test_benchmarks.py::test_it_runs_in_small"


@dataclass(frozen=True, slots=True)
class Check:
    """How a command is checked.

    Attributes:
        test: the file of the test, or its node `FILE::FUNCTION`; a script where CI runs the command itself.
        way: what is done with the command, where that is less or other than running it as it stands.
        needs: what the machines of the tests lack; empty where they can run it.
    """

    test: str
    way: str = "as it stands"
    needs: str = ""


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a page: a line, or several that belong together.

    Attributes:
        page: in the repository, e.g. `docs/cli.md`.
        check: None when nothing says how it is checked.
    """

    page: str
    line: int
    text: str
    check: Check | None

    @property
    def shown(self) -> str:
        """Its first line without a comment, for a table."""
        return re.sub(r"\s+#\s.*", "", self.text.splitlines()[0]).replace("|", "\\|").rstrip("\\ ")


_BENCHMARK = "read by its own argument parser, no further: it takes minutes"
KNOWN: Mapping[str, Check] = {
    "scripts/run_accuracy_test.sh": Check(".ci/run"),
    "scripts/test.sh": Check(".ci/run"),
    "scripts/run_demo.sh": Check("tests/vllm/test_demo.py", "what it runs in Python, with `--once`"),
    "pip install .": Check(
        "tests/packaging/test_wheel.py", "the checkout's wheel, by pip into a folder, without a network"
    ),
    "vllm serve MODEL": Check(
        "tests/docs/test_engine_commands.py::test_vllm_and_kvferry_take_the_command_line",
        "parsed by vLLM; the connector's configuration is made from it",
    ),
    "kvferry plan": Check(_RUNNER),
    "python -m bench.plan": Check(_QUICK, "with `--quick`"),
    "python -m bench.soak": Check(_PARSED, f"{_BENCHMARK}; `tests/faults/test_soak.py` runs the same for 3 minutes"),
    "python -m bench.": Check(_PARSED, _BENCHMARK),
}
"""By how a command begins; the first that fits."""
TOP_PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
PAGES_WITHOUT_MARKS = ("README.md", "docs/performance.md")


def commands(page: str, text: str) -> Iterator[Command]:
    """All commands of a page."""
    for block in _BLOCK.finditer(text):
        language, body, mark = block["language"], block["body"], block["mark"]
        first = text.count("\n", 0, block.start("body")) + 1
        for offset, command in _typed(body) if _is_session(language, body) else _lines(language, body):
            yield Command(page, first + offset, command, _check(page, command, mark))


def _is_session(language: str, body: str) -> bool:
    return language == "console" or (not language and body.startswith("$ "))


def _typed(body: str) -> Iterator[tuple[int, str]]:
    """Of a session: what stands behind `$ `."""
    for offset, line in enumerate(body.splitlines()):
        if line.startswith("$ "):
            yield offset, line.removeprefix("$ ")


def _lines(language: str, body: str) -> Iterator[tuple[int, str]]:
    """Of a script: lines, with those that go on put together. A block in another language has none."""
    begun: list[str] = []
    for offset, line in enumerate(body.splitlines() if language in _SHELLS else ()):
        if not begun and not line.split("#")[0].strip():
            continue
        begun.append(line)
        text = "\n".join(begun)
        if _is_whole(text):
            yield offset + 1 - len(begun), text
            begun = []
    if begun:
        raise ValueError(f"a command that does not end: {begun[0]!r}")


def _is_whole(text: str) -> bool:
    if text.endswith("\\"):
        return False
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return True


def _check(page: str, command: str, mark: str | None) -> Check | None:
    if mark == "run":
        return Check(_RUNNER)
    if mark == "console":
        return Check(_PRINTED, "as it stands; its output is compared with the page")
    if mark is not None and (found := _MARK.fullmatch(mark)):
        needs = found["needs"] or ""
        if found["test"] or needs:
            return Check(found["test"] or "", found["way"] or ("" if needs else "as it stands"), needs)
    if page in PAGES_WITHOUT_MARKS:
        return next((check for start, check in KNOWN.items() if command.startswith(start)), None)
    return None


def pages(root: Path = ROOT) -> list[Path]:
    """All that may have commands: at the top, in docs/ and deploy/, but for the list itself."""
    top = [root / page for page in TOP_PAGES]
    found = [*top, *sorted((root / "docs").glob("*.md")), *sorted((root / "deploy").rglob("*.md"))]
    return [page for page in found if page.name != "commands.md"]


def of_repository(written: Mapping[Path, str] | None = None) -> list[Command]:
    """All commands of all pages.

    Args:
        written: text of pages that are about to be written, in place of what is on the disk.
    """
    texts = {page: (written or {}).get(page) or page.read_text() for page in pages()}
    return [found for page, text in texts.items() for found in commands(str(page.relative_to(ROOT)), text)]


def checked_by(test: str) -> list[Command]:
    """The commands for which a test is named."""
    return [command for command in of_repository() if command.check and command.check.test == test]


def share_in_need(found: Sequence[Command]) -> float:
    """Of all commands, those marked as needing what the tests do not have."""
    return sum(bool(command.check and command.check.needs) for command in found) / len(found)


def tables(found: Sequence[Command]) -> dict[str, str]:
    """The generated parts of docs/commands.md by name."""
    in_need = [command for command in found if command.check and command.check.needs]
    as_it_stands = [c for c in found if c.check and not c.check.needs and c.check.way.startswith("as it stands")]
    summary = (
        f"{len(found)} commands. {len(as_it_stands)} are run as they stand, "
        f"{len(found) - len(as_it_stands) - len(in_need)} in another way that the table tells, and {len(in_need)} "
        f"({share_in_need(found):.0%}; at most {LARGEST_SHARE:.0%} are allowed) need what the tests' machines lack."
    )
    rows = ["| command | page | how | by |", "| --- | --- | --- | --- |"]
    for command in found:
        check = command.check or Check("", "**nothing checks it**")
        page = command.page.removeprefix("docs/") if command.page.startswith("docs/") else f"../{command.page}"
        how = f"needs {check.needs}. {check.way}".rstrip(". ") if check.needs else check.way
        test = f"`{check.test}`" if check.test else ""
        rows.append(f"| `` {command.shown} `` | [{command.page}]({page}) | {how} | {test} |")
    return {"summary": summary, "commands": "\n".join(rows)}
