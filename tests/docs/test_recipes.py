"""`just …` and `scripts/test.sh …` on the pages, the commands of CONTRIBUTING.md, its hooks and the workflow of CI."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from scripts.doc_commands import Command, checked_by
from tests.docs.shell import ROOT, Shell, succeeded

_HERE = "tests/docs/test_recipes.py::"
RECIPES = checked_by(f"{_HERE}test_a_recipe_is_there_and_what_it_calls_is_there")
_RECIPE = re.compile(r"^([\w-]+)((?: [*+]?[\w-]+)*):\n((?: +.*\n?)+)", re.MULTILINE)


def recipes() -> dict[str, tuple[list[str], str]]:
    """Name → parameters and body."""
    return {name: (given.split(), body) for name, given, body in _RECIPE.findall((ROOT / "justfile").read_text())}


@pytest.mark.parametrize("command", RECIPES, ids=[command.text for command in RECIPES])
def test_a_recipe_is_there_and_what_it_calls_is_there(command: Command) -> None:
    just, name, *arguments = shlex.split(command.text, comments=True)
    assert just == "just"
    parameters, body = recipes()[name]
    takes_any = any(parameter.startswith(("*", "+")) for parameter in parameters)
    fixed = [parameter for parameter in parameters if not parameter.startswith(("*", "+"))]
    assert len(fixed) <= len(arguments)
    assert takes_any or len(fixed) == len(arguments)
    for script in re.findall(r"\bscripts/\w+\.sh\b", body):
        assert (ROOT / script).is_file()
    for module in re.findall(r"python -m ((?:scripts|bench|tests)[.\w]+)", body):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file() or (ROOT / module.replace(".", "/")).is_dir()
    called = set(re.findall(r"\.venv/bin/([\w-]+)", body))
    assert called <= {"python", "ruff", "mypy", "lint-imports", "mkdocs"}
    assert body.strip()


def test_a_target_of_the_fuzzer_on_the_pages_is_one() -> None:
    named = [command.text.split()[2] for command in RECIPES if command.text.startswith("just fuzz")]
    sources = "".join(path.read_text() for path in (ROOT / "tests" / "fuzz").glob("*targets.py"))
    assert named
    assert [name for name in named if f"\ndef {name}(data: bytes)" not in sources] == []


def test_the_script_hands_its_arguments_to_pytest(tmp_path: Path) -> None:
    (command,) = checked_by(f"{_HERE}test_the_script_hands_its_arguments_to_pytest")
    shell = Shell.within(tmp_path)
    (shell.folder / "scripts").mkdir()
    for script in ("test.sh", "find_python.sh"):
        shutil.copy(ROOT / "scripts" / script, shell.folder / "scripts" / script)
    shell.stand_in("python", "ruff", "mypy", "lint-imports")
    (shell.folder / ".venv").mkdir()
    (shell.folder / ".venv" / "bin").symlink_to(shell.bin)
    succeeded(shell.run(command.text, {"PYTHON": str(shell.bin / "python")}))
    started = shell.started()
    assert ["python", "-m", "scripts.bootstrap", "cpu", "dev"] in started
    assert {"ruff", "mypy", "lint-imports"} <= {words[0] for words in started}
    assert started[-1][:3] == ["python", "-m", "pytest"]
    assert started[-1][-3:] == shlex.split(command.text)[1:]


def test_the_environment_is_made_by_one_command(tmp_path: Path) -> None:
    (command,) = checked_by(f"{_HERE}test_the_environment_is_made_by_one_command")
    shell = Shell.within(tmp_path)
    (shell.folder / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "find_python.sh", shell.folder / "scripts")
    shell.stand_in("python")
    succeeded(shell.run(command.text, {"PYTHON": str(shell.bin / "python")}))
    assert shell.started()[-1] == ["python", "-m", "scripts.bootstrap"]


def test_quick_tests_are_those_that_are_not_slow() -> None:
    (command,) = checked_by(f"{_HERE}test_quick_tests_are_those_that_are_not_slow")
    program, *arguments = shlex.split(command.text)
    assert program == ".venv/bin/python"
    assert " ".join([program, *arguments[:-1]]) == recipes()["quick"][1].replace('"', "").split(" {{")[0].strip()
    done = subprocess.run(
        [sys.executable, *arguments, "--collect-only"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    slow = [path for path in (ROOT / arguments[-1]).glob("test_*.py") if is_slow(path)]
    assert slow
    assert [path for path in slow if path.name in done.stdout] == []
    assert "test_planner.py" in done.stdout


def is_slow(path: Path) -> bool:
    return "\npytestmark = pytest.mark.slow\n" in path.read_text()


def test_every_folder_of_tests_has_its_time_in_the_table() -> None:
    listed = re.findall(r"\| `tests/([\w/]+)", (ROOT / "CONTRIBUTING.md").read_text())
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").glob("*/**/test_*.py")}
    assert {name.partition("/")[0] for name in listed} == folders - {"faults", "vllm"}
    assert [name for name in listed if not (ROOT / "tests" / name).is_dir()] == []


def test_the_checks_are_those_of_the_script() -> None:
    commands = checked_by(f"{_HERE}test_the_checks_are_those_of_the_script")
    checks = {command.text.removeprefix(".venv/bin/") for command in commands}
    script = (ROOT / "scripts" / "test.sh").read_text()
    assert checks == {"ruff check .", "ruff format --check .", "lint-imports", "mypy"}
    assert [check for check in checks if not re.search(rf"^ *step {re.escape(check)}( |$)", script, re.MULTILINE)] == []
    assert checks == {line.strip().removeprefix(".venv/bin/") for line in recipes()["check"][1].splitlines()}


def test_hooks_and_the_workflow_call_what_is_there() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repository["repo"] for repository in hooks["repos"]] == ["local"]
    called = {hook["id"]: hook["entry"].split() for hook in hooks["repos"][0]["hooks"]}
    assert set(called) == {"ruff", "ruff-format", "lint-imports", "mypy"}
    for program, *_ in called.values():
        assert (Path(sys.executable).parent / program.removeprefix(".venv/bin/")).is_file()
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100
    assert [step["uses"] for step in job["steps"] if "uses" in step and not re.search(r"@v\d+$", step["uses"])] == []
