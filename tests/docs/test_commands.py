"""The commands of the documentation can be typed: programs, subcommands, options, recipes and files are there.

Command lines of engines and routers are judged by `tests/deploy/test_launches.py`, what `kvferry` prints in a `console`
block by `test_generated.py`.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from kvferry.cli.main import main as kvferry
from kvferry.connector.metrics.tables import COUNTERS
from tests.docs.commands import PAGES, ROOT, Command, blocks, commands_of, typed

CHECKED_HERE = {"kvferry", "python", "-m", "just", "curl", "grep", "ruff", "lint-imports", "mypy", "pre-commit"}
CHECKED_ELSEWHERE = {
    **dict.fromkeys(("docker", "kubectl", "helm", "sbatch", "install", "systemctl", "openssl", "chown"), "platforms"),
    "vllm": "tests/deploy/test_launches.py",
    "pip": "tests/packaging/test_wheel.py",
    **dict.fromkeys(("run_accuracy_test.sh", "test.sh", "run_demo.sh"), ".ci/run, tests/vllm/test_demo.py"),
}
BASE = {"python", "ruff", "mypy", "lint-imports", "mkdocs"}
"""Programs of the environment that recipes start."""


def test_every_command_has_a_program_that_something_checks() -> None:
    found = typed()
    assert len(found) > 60
    known = {*CHECKED_HERE, *CHECKED_ELSEWHERE}
    # "$(scripts/find_python.sh)" stands for a Python.
    assert {c.program for c in found if "find_python" not in c.words[0]} - known == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_bash_can_read_every_block(page: Path) -> None:
    text = "\n".join(block for _, block in blocks(page))
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=20)


def test_scripts_are_taken_apart_into_simple_commands() -> None:
    script = "A=1 a --one \\\n    two    # said\n\n# nothing\n(umask 077; b '{\n}' > x)\nc \"it's\" | d\n"
    assert commands_of(script) == [("a", "--one", "two"), ("b", "{\n}"), ("c", "it's"), ("d",)]


class Parsed(Exception):
    """The command line was understood; nothing is run."""


@pytest.mark.parametrize("command", typed("kvferry"), ids=lambda command: f"{command.page}:{command.line}")
def test_kvferry_understands_its_command_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: Command
) -> None:
    """Plans of two short forms, which need no engine, are made as well."""
    monkeypatch.chdir(tmp_path)
    if sum("layers=" in word for word in command.words) == 2 and "layers=32,head=8" not in str(command.words):
        assert kvferry(command.words[1:]) in (0, 2)
        return
    parse = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, *given: Any) -> None:
        parse(parser, *given)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    with pytest.raises((Parsed, SystemExit)) as ended:
        kvferry(command.words[1:])
    assert not isinstance(ended.value, SystemExit) or ended.value.code == 0, "unknown to the parser"


@pytest.mark.parametrize("command", typed("python"), ids=lambda command: " ".join(command.words[2:]))
def test_modules_are_there_and_have_the_options(command: Command) -> None:
    module, *rest = command.words[command.words.index("-m") + 1 :]
    if module == "pytest":
        assert [word for word in rest if word.startswith("tests/") and not (ROOT / word).exists()] == []
        return
    assert (ROOT / f"{module.replace('.', '/')}.py").is_file()
    sources = "".join(path.read_text() for path in (ROOT / module.partition(".")[0]).glob("*.py"))
    assert [word for word in rest if word.startswith("--") and f'"{word}"' not in sources] == []


RECIPES = dict(
    re.findall(r"^([\w-]+)(?: [*+]?[\w-]+)*:\n((?: +.*\n?)+)", (ROOT / "justfile").read_text(), re.MULTILINE)
)


def test_recipes_are_there_and_call_what_is_there() -> None:
    assert {command.words[1] for command in typed("just")} <= set(RECIPES)
    for name, body in RECIPES.items():
        assert [file for file in re.findall(r"\bscripts/\w+\.sh\b", body) if not (ROOT / file).is_file()] == [], name
        for module in re.findall(r"python -m ((?:scripts|bench|tests)[.\w]+)", body):
            path = ROOT / module.rstrip(".").replace(".", "/")
            assert path.with_suffix(".py").is_file() or path.is_dir(), name
        assert set(re.findall(r"\.venv/bin/([\w-]+)", body)) <= BASE, name
    (target,) = (command.words[2] for command in typed("just") if command.words[1] == "fuzz")
    assert any(f"\ndef {target}(data: bytes)" in path.read_text() for path in (ROOT / "tests/fuzz").glob("*targets.py"))


def test_the_workflow_runs_what_the_readme_names() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    named = [command.words[0] for command in typed("run_accuracy_test.sh", "test.sh") if command.page == "README.md"]
    assert [f"{name} || status=$?" in (ROOT / ".ci" / "run").read_text() for name in named] == [True, True]


def test_engines_are_asked_by_their_own_routes_and_for_counters_that_they_have() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    source = "".join(path.read_text() for path in (Path(spec.origin).parent / "entrypoints").rglob("*.py"))
    routes = {*re.findall(r'@router\.(get|post)\("(/\w+)"', source), ("get", "/metrics")}
    asked = typed("curl")
    assert {("post" if "POST" in c.words else "get", urlsplit(c.words[-1]).path) for c in asked} <= routes
    (prefix,) = (command.words[1] for command in typed("grep"))
    assert any(re.match(prefix, f"vllm:{counter.exported}_total") for counter in COUNTERS.values())
