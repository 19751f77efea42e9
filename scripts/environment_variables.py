"""The environment variables that kvferry's code reads, for docs/configuration.md.

`read_by_code` finds the names that begin with `KVFERRY_` in the source; a test compares them with this table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("protocol", "plan", "scheduler", "worker", "connector", "cli", "bench", "scripts", "tests", "deploy")
_NAME = re.compile(r"\bKVFERRY_[A-Z0-9_]+\b")


@dataclass(frozen=True, slots=True)
class EnvironmentVariable:
    """One variable.

    Attributes:
        owner: who else defines it: an engine, a library; empty for kvferry's own.
        default: as a text; empty when there is none.
    """

    name: str
    default: str
    meaning: str
    owner: str = ""


OF_ENGINES = (
    EnvironmentVariable(
        "KVFERRY_SECRET_FILE",
        "",
        "the file of secrets of the side channel; without it, any client that reaches the port gets answers "
        "([operations.md](operations.md#a-secret-for-the-side-channel)). Read by `describe`, `doctor` and `bench` too",
    ),
    EnvironmentVariable(
        "KVFERRY_ALLOW_VLLM",
        "",
        "a vLLM version that is tried although kvferry was not run with it, exactly as `vllm.__version__` has it; any "
        "other that is not supported stops the start ([compatibility.md](compatibility.md#versions))",
    ),
    EnvironmentVariable(
        "VLLM_NIXL_SIDE_CHANNEL_HOST",
        "localhost",
        "the address of the producer's side channel: bound, and written into every prompt's params, so decoders must "
        "reach it",
        "vLLM",
    ),
    EnvironmentVariable(
        "VLLM_NIXL_SIDE_CHANNEL_PORT",
        "5600",
        "its port; data-parallel rank *i* takes this plus *i*",
        "vLLM",
    ),
    EnvironmentVariable("VLLM_LOGGING_LEVEL", "INFO", "`DEBUG`: every step of a request's life is logged", "vLLM"),
    EnvironmentVariable(
        "VLLM_SSM_CONV_STATE_LAYOUT",
        "",
        "how vLLM keeps convolution states, `SD` or `DS`; the two sides of a pair may differ",
        "vLLM",
    ),
    EnvironmentVariable(
        "UCX_*",
        "",
        "the fabric's own; kvferry sets four of them where they are left open ([operations.md](operations.md#ucx)), "
        "the doctor judges them",
        "UCX",
    ),
    EnvironmentVariable(
        "NIXL_TELEMETRY_ENABLE",
        "",
        "NIXL's own exporter; not needed, its figures are in the engine's `/metrics`. "
        "`NIXL_TELEMETRY_EXPORTER` and `NIXL_TELEMETRY_PROMETHEUS_PORT` go with it",
        "NIXL",
    ),
    EnvironmentVariable(
        "OMP_NUM_THREADS", "", "threads of torch on CPUs; the doctor compares it with the processors", "OpenMP"
    ),
)

OF_SCRIPTS = (
    EnvironmentVariable("KVFERRY_DEVICE", "auto", "the accuracy test: `cpu`, `cuda`, or what is there"),
    EnvironmentVariable(
        "KVFERRY_CACHE_DIR", "~/.cache/kvferry", "the accuracy test: where the converted default model is kept"
    ),
    EnvironmentVariable("KVFERRY_COMMAND", "", "set by the scripts: what messages call the command that was typed"),
    EnvironmentVariable("KVFERRY_SEED", "", "soaks of the tests: the seed that a failure printed"),
    EnvironmentVariable("KVFERRY_SOAK_S", "1.5", "the soak of `tests/engine_core`: seconds"),
    EnvironmentVariable("KVFERRY_FAULT_SOAK_MINUTES", "3", "the soak of `tests/faults`: minutes"),
    EnvironmentVariable("KVFERRY_ANY_PAIR_DRAWS", "1500", "random pairs of engines in `tests/plan/test_any_pair.py`"),
    EnvironmentVariable(
        "KVFERRY_GUARD_OFF",
        "",
        "with `-p tests.faults.guards_off`: the guard that is switched off ([reliability.md](reliability.md))",
    ),
)


def table(variables: Iterable[EnvironmentVariable]) -> str:
    """As Markdown."""
    rows = ["| variable | default | meaning | of |", "| --- | --- | --- | --- |"]
    for each in variables:
        default = f"`{each.default}`" if each.default else "none"
        rows.append(f"| `{each.name}` | {default} | {each.meaning} | {each.owner or 'kvferry'} |")
    return "\n".join(rows)


def read_by_code(root: Path = ROOT) -> dict[str, set[str]]:
    """Names that begin with `KVFERRY_`, and the files that have them."""
    files = [root / "Dockerfile", *(path for folder in SOURCES for path in (root / folder).rglob("*"))]
    found: dict[str, set[str]] = {}
    for path in files:
        if path == Path(__file__) or not path.is_file():
            continue
        if path.suffix in (".py", ".sh", ".sbatch", ".service", ".env", ".yaml", ""):
            for name in _NAME.findall(path.read_text(errors="replace")):
                found.setdefault(name, set()).add(str(path.relative_to(root)))
    return found
