"""Every command of the documentation has something that checks it, and that exists."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import doc_commands
from scripts.doc_commands import LARGEST_SHARE, Command, checked_by, of_repository, share_in_need
from tests.docs.shell import ROOT, Shell, succeeded

COMMANDS = of_repository()
AS_THEY_STAND = checked_by("tests/docs/test_commands.py::test_a_command_runs_as_it_stands")
PROGRAMS = ("kvferry", "python", "vllm", "pip", "just", "curl", "kubectl", "docker", "scripts/", "openssl", "systemctl")


def named(commands: list[Command]) -> list[str]:
    return [f"{command.page}:{command.line} {command.shown[:40]}" for command in commands]


def unmarked(commands: list[Command]) -> list[str]:
    return named([command for command in commands if command.check is None])


def test_every_command_says_how_it_is_checked() -> None:
    assert len(COMMANDS) > 40
    assert unmarked(COMMANDS) == []


@pytest.mark.parametrize(
    "text",
    [
        "```sh\nkvferry fly\n```\n",
        "```bash\nkvferry fly\n```\n",
        "```console\n$ kvferry fly\n```\n",
        "```\n$ kvferry fly\n```\n",
    ],
    ids=["sh", "bash", "console", "none"],
)
def test_a_command_that_nothing_checks_is_seen(text: str) -> None:
    (found,) = doc_commands.commands("docs/new.md", text)
    assert (found.text, found.check) == ("kvferry fly", None)


def test_commands_are_taken_apart_by_lines_that_go_on_and_quotes_that_are_open() -> None:
    script = "a --one \\\n    two\n\n# nothing\nb '{\n}'    # said\nc \"it's\" && d\n"
    found = doc_commands.commands("docs/new.md", f"<!-- needs a moon -->\n```sh\n{script}```\n")
    assert [(each.line, each.text) for each in found] == [
        (3, "a --one \\\n    two"),
        (7, "b '{\n}'    # said"),
        (9, 'c "it\'s" && d'),
    ]


@pytest.mark.parametrize("mark", ["not run", "tested", "tested:", "needs", "run it"])
def test_a_mark_that_says_nothing_is_none(mark: str) -> None:
    (found,) = doc_commands.commands("docs/new.md", f"<!-- {mark} -->\n```sh\nkvferry fly\n```\n")
    assert found.check is None


def test_few_commands_need_what_the_tests_do_not_have() -> None:
    assert 0 < share_in_need(COMMANDS) <= LARGEST_SHARE


def test_the_share_counts_every_command_in_need() -> None:
    text = "<!-- needs GPUs -->\n```sh\na\nb\n```\n<!-- run -->\n```sh\nc\nd\n```\n"
    assert share_in_need(list(doc_commands.commands("docs/new.md", text))) == 0.5


@pytest.mark.parametrize("command", COMMANDS, ids=named(COMMANDS))
def test_what_is_said_to_check_a_command_exists(command: Command) -> None:
    check = command.check
    assert check is not None
    assert check.test or check.needs
    file, _, name = check.test.partition("::")
    if file:
        assert (ROOT / file).is_file()
    if name:
        assert f"\ndef {name}(" in (ROOT / file).read_text(), check.test
    if file == ".ci/run":
        assert f"\n{command.text.split('#')[0].strip()} || status=$?\n" in (ROOT / file).read_text()


@pytest.mark.parametrize("command", COMMANDS, ids=named(COMMANDS))
def test_bash_can_read_it(command: Command) -> None:
    subprocess.run(["bash", "-n"], input=command.text, text=True, check=True, timeout=20)


def indented_commands(page: Path) -> Iterator[str]:
    fenced = False
    for line in page.read_text().splitlines():
        fenced ^= line.lstrip().startswith("```")
        if not fenced and line.startswith("    ") and line.strip().removeprefix("$ ").startswith(PROGRAMS):
            yield line


@pytest.mark.parametrize("page", [*doc_commands.pages()], ids=lambda page: page.name)
def test_no_command_hides_in_a_block_that_is_only_indented(page: Path) -> None:
    assert list(indented_commands(page)) == []


@pytest.mark.parametrize("command", AS_THEY_STAND, ids=named(AS_THEY_STAND))
def test_a_command_runs_as_it_stands(command: Command, tmp_path: Path) -> None:
    shell = Shell.within(tmp_path)
    assert succeeded(shell.run(command.text)) or list(shell.folder.iterdir()), "it printed nothing and wrote nothing"
