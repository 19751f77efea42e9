"""The demonstration on real engines: what an operator sees first.

The engines are forked. That the demonstration starts them as users do is what the run of every night shows, and in
every run the accuracy test, which starts its engines by the same class.
"""

from __future__ import annotations

import gzip
import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path

import pytest

from scripts.accuracy.engines import EngineSpec
from scripts.accuracy.settings import TINY_MODEL, read_settings
from scripts.demo import SLOW, SLOW_S, demonstrate
from tests.vllm.forked_server import ForkedServer


class NamedServer(ForkedServer):
    """In the place of the engines that the demonstration starts."""

    def __init__(self, spec: EngineSpec, logs: Path) -> None:
        super().__init__(spec, logs)
        self.name = spec.name
        logs.mkdir(parents=True, exist_ok=True)


@contextmanager
def written_to(file: Path) -> Iterator[None]:
    """What this process and its children say goes to the file meanwhile."""
    sys.stdout.flush()
    said_before = os.dup(1)
    with file.open("a", buffering=1) as out, redirect_stdout(out):
        os.dup2(out.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(said_before, 1)
            os.close(said_before)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The demo's output and folder."""
    folder = tmp_path_factory.mktemp("demo")
    # Of what the demonstration shows, nothing depends on the model, and the default one computes for minutes.
    chosen = {"LOG_DIR": str(folder), "MODEL_NAMES": TINY_MODEL}
    settings = read_settings({**os.environ, **chosen})
    said = folder / "said"
    with pytest.MonkeyPatch.context() as patched, ExitStack() as running:
        patched.setattr("scripts.demo.Engine", NamedServer)
        with written_to(said):
            is_good = demonstrate(settings, running)
    assert is_good, said.read_text()[-4000:]
    (run,) = (folder / "demo").iterdir()
    return said.read_text(), run


def test_the_slow_request_is_found_by_its_name_and_its_long_phase_is_reported(
    demo: tuple[str, Path],
) -> None:
    said, folder = demo
    asked = said.partition(f"--request {SLOW}")[2]
    table = asked.partition("the slowest handovers:")[2].partition("their phases")[0]
    row = table.rpartition("─")[2]
    assert {f"{name}-0" for name in ("prefill", "decode")} < set(row.split()), row
    assert SLOW in row.split()[0]
    assert "router" in row.split(), "the cause"
    found = re.search(r"^router +1 +([\d.]+) s ", asked, re.MULTILINE)
    assert found is not None, asked
    assert float(found[1]) >= SLOW_S
    with gzip.open(folder / "trace.json.gz") as trace:
        assert SLOW in trace.read().decode()


def test_a_prompt_is_read_from_the_cache_that_has_its_beginning(
    demo: tuple[str, Path],
) -> None:
    said, _ = demo
    shown = said.partition("prefill-0 has the first 1,024 in its cache:")[2]
    assert re.search(r"computed +first token after [\d,]+ ms$", shown, re.MULTILINE)
    read = re.search(
        r"^ +read +first token after [\d,]+ ms: 1,024 tokens, ([\d.]+) MB in ([\d.]+) ms, from prefill-0$",
        shown,
        re.MULTILINE,
    )
    if read is None:
        # Three times on a machine that is too busy; any other reason is a fault.
        assert re.search(r"not read from prefill-0 \((too_late|no_answer)\)", shown)
        return
    assert float(read[1]) > 1.0
    assert float(read[2]) > 0.0


def test_every_process_of_both_engines_has_recorded(demo: tuple[str, Path]) -> None:
    said, folder = demo
    assert re.search(r"^31 handovers of 4 processes: 31 loaded$", said, re.MULTILINE)
    assert len(list((folder / "traces").rglob("*.jsonl"))) == 4
