"""One target under atheris, a coverage-guided fuzzer; `just fuzz TARGET` calls this.

python -m tests.fuzz.run_atheris planning -max_total_time=300      # what follows the target goes to libFuzzer

What raises is a bug; libFuzzer writes the bytes to a file `crash-…`, and the same command with that file as its last
argument runs it again. Seeds come from `tests.fuzz.targets`, what was found from `.fuzz/TARGET`.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

FOUND = Path(".fuzz")
INSTALL = """atheris is not installed here. It is no dependency: the tests run the same targets under hypothesis.
To install it beside them (version 3.0.0 has a wheel for CPython 3.11 on Linux x86-64; without a wheel it needs clang):

    .venv/bin/pip install atheris
"""


def main(arguments: list[str]) -> int:
    try:
        atheris: Any = importlib.import_module("atheris")
    except ImportError:
        print(INSTALL, file=sys.stderr)
        return 2
    with atheris.instrument_imports(include=["kvferry"]):
        from tests.fuzz.targets import ALL, seeds
    if not arguments or arguments[0] not in ALL:
        print(f"which target? one of: {', '.join(ALL)}", file=sys.stderr)
        return 2
    name, *options = arguments
    corpus = FOUND / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds(name)):
        (corpus / f"seed-{number}").write_bytes(seed)
    atheris.Setup(
        [
            sys.argv[0],
            *options,
            *([] if any(Path(x).is_file() for x in options) else [str(corpus)]),
        ],
        ALL[name],
    )
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
