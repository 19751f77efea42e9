"""The commands of the documentation can be typed: subcommands, options, recipes and files are there.

Command lines of engines and routers are judged by `tests/deploy/test_launches.py`, what `kvferry` prints in a `console`
block by `test_generated.py`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvferry.cli.main import main as kvferry
from kvferry.link.secrets import read_secrets
from tests.docs.commands import ROOT, Command, typed


class Parsed(Exception):
    """The command line was understood; nothing is run."""


@pytest.mark.parametrize(
    "command", typed("kvferry"), ids=lambda command: f"{command.page}:{command.line}"
)
def test_kvferry_understands_its_command_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: Command
) -> None:
    """Plans of two short forms, which need no engine, are made as well."""
    monkeypatch.chdir(tmp_path)
    if sum(
        "layers=" in word for word in command.words
    ) == 2 and "layers=32,head=8" not in str(command.words):
        assert kvferry(command.words[1:]) in (0, 1)
        return
    parse = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, *given: Any) -> None:
        parse(parser, *given)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    with pytest.raises((Parsed, SystemExit)) as ended:
        kvferry(command.words[1:])
    assert not isinstance(ended.value, SystemExit) or ended.value.code == 0, (
        "unknown to the parser"
    )


@pytest.mark.parametrize(
    "command", typed("python"), ids=lambda command: " ".join(command.words[2:])
)
def test_modules_are_there_and_have_the_options(command: Command) -> None:
    module, *rest = command.words[command.words.index("-m") + 1 :]
    if module == "pytest":
        assert [
            word
            for word in rest
            if word.startswith("tests/") and not (ROOT / word).exists()
        ] == []
        return
    file = ROOT / f"{module.replace('.', '/')}.py"
    assert file.is_file()
    folders = {ROOT / module.partition(".")[0], file.parent}
    sources = "".join(
        path.read_text() for folder in folders for path in folder.glob("*.py")
    )
    assert [
        word for word in rest if word.startswith("--") and f'"{word}"' not in sources
    ] == []


RECIPES = dict(
    re.findall(
        r"^([\w-]+)(?: [*+]?[\w-]+)*:(?: [\w-]+)*\n((?: +.*\n?)+)",
        (ROOT / "justfile").read_text(),
        re.MULTILINE,
    )
)


def test_recipes_are_there_and_call_what_is_there() -> None:
    assert {command.words[1] for command in typed("just")} <= set(RECIPES)
    for name, body in RECIPES.items():
        assert [
            file
            for file in re.findall(r"\bscripts/\w+\.sh\b", body)
            if not (ROOT / file).is_file()
        ] == [], name
        for module in re.findall(r"python -m ((?:scripts|bench|tests)[.\w]+)", body):
            path = ROOT / module.rstrip(".").replace(".", "/")
            assert path.with_suffix(".py").is_file() or path.is_dir(), name


def test_the_workflow_runs_what_the_readme_names() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert commands_of(workflow["jobs"]["tests"]) == [".ci/run"]
    named = [
        command.words[0]
        for command in typed("run_accuracy_test.sh", "test.sh")
        if command.page == "README.md"
    ]
    assert [
        f"{name} || status=$?" in (ROOT / ".ci" / "run").read_text() for name in named
    ] == [
        True,
        True,
    ]


def test_every_night_the_contract_is_the_first_test_under_the_newest_vllm() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    # YAML takes `on` for a truth value.
    assert workflow[True]["schedule"] == [{"cron": "23 4 * * *"}]
    job = workflow["jobs"]["newest-vllm"]
    assert "schedule" in job["if"]
    newest, contract, *_ = [
        command for command in commands_of(job) if "tests.next_vllm" in command
    ]
    assert newest.endswith("tests.next_vllm.build --newest")
    assert contract.endswith("tests.next_vllm.run tests/engine_core/test_contract.py")
    for path in re.findall(r"tests/\w+/\w+\.py", " ".join(commands_of(job))):
        assert (ROOT / path).is_file(), path


def commands_of(job: Any) -> list[str]:
    """What a job of the workflow runs."""
    return [step["run"] for step in job["steps"] if "run" in step]


_SECRET = "umask 077; openssl rand -hex 32 > "


def test_the_command_for_a_secret_makes_one_that_kvferry_takes(tmp_path: Path) -> None:
    pages = [
        page for page in (ROOT / "docs").glob("*.md") if _SECRET in page.read_text()
    ]
    assert {"deployment.md", "operations.md"} <= {page.name for page in pages}
    subprocess.run(
        ["bash", "-c", f"{_SECRET} {tmp_path}/secrets"], check=True, timeout=20
    )
    assert len(read_secrets(str(tmp_path / "secrets"))) == 1
