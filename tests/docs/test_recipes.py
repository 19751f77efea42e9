"""`just …` and `scripts/test.sh …` on the pages."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

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
