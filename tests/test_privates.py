"""Tests look at kvferry's parts from outside: through results, through `snapshot()`, through constructor arguments."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
OURS = (
    "protocol",
    "plan",
    "trace",
    "link",
    "scheduler",
    "worker",
    "connector",
    "cli",
    "tests",
    "bench",
)
REPLACES_FUNCTIONS = ("tests/faults/switches.py", "tests/worker/device/test_mutants.py")
"""They put other functions in the place of the product's: guards that are switched off, rules that are broken."""
OF_NAMED_TUPLES = {"_replace", "_asdict", "_fields"}
LIMIT = 24


def test_private_attributes_of_other_objects_are_rare() -> None:
    """What a test writes to, to forge memory or to break a part, cannot be a snapshot: that is what the rest is."""
    ours = set[str]()
    for root in OURS:
        for path in (REPOSITORY / root).rglob("*.py"):
            ours |= defined_in(ast.parse(path.read_text()))
    found = [
        f"{path.relative_to(REPOSITORY)}:{line}: {text}"
        for path in sorted((REPOSITORY / "tests").rglob("*.py"))
        if path.relative_to(REPOSITORY).as_posix() not in REPLACES_FUNCTIONS
        for line, text in privates_of_others(ast.parse(path.read_text()), ours)
    ]
    assert len(found) <= LIMIT, (
        f"{len(found)} accesses to private attributes of other objects; expected at most {LIMIT}. What an engineer "
        "would look at in a debugger belongs in the part's snapshot(), a bound or a clock in its constructor:\n"
        + "\n".join(found)
    )


def privates_of_others(module: ast.Module, ours: set[str]) -> Iterator[tuple[int, str]]:
    """Accesses `x._name` to a name of this project (nothing else of vLLM's or torch's can be asked for a snapshot) that
    the module does not define itself."""
    own = defined_in(module)
    for node in ast.walk(module):
        if (
            isinstance(node, ast.Attribute)
            and node.attr in ours - own - OF_NAMED_TUPLES
        ):
            yield node.lineno, ast.unparse(node)


def defined_in(module: ast.Module) -> set[str]:
    """The private names that a module defines: functions, classes, variables, attributes of `self`."""
    found = set[str]()
    for node in ast.walk(module):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and is_own(node)
        ):
            found.add(node.attr)
    return {
        name for name in found if name.startswith("_") and not name.startswith("__")
    }


def is_own(attribute: ast.Attribute) -> bool:
    return isinstance(attribute.value, ast.Name) and attribute.value.id in (
        "self",
        "cls",
    )
