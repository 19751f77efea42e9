"""Time that kvferry adds to the engine's step thread, which must not grow with leases, loads or blocks.

    python -m bench.step
    python -m bench.step --quick    # 50 seconds, for orientation

vLLM's real scheduler drives real connectors at both ends; the model is left out. Every step hands one request over:
one prompt arrives at the producer and is answered there, one arrives at the consumer and begins to load, another has
been loaded. Beside that, leases are held that no consumer reads, and loads are in flight that never end.

Every scene runs in a process of its own, so that none inherits another's garbage.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from bench.figures import publish
from bench.provenance import REPOSITORY, begin
from bench.step_report import Shown, results_of
from bench.step_scenes import QUICK, SCENES, Scene

_STEPS, _QUICK_STEPS = 2000, 150
_TIMEOUT_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="few steps, and only the ends of some sweeps",
    )
    parser.add_argument("--scene", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    steps = _QUICK_STEPS if asked.quick else _STEPS
    if asked.scene is not None:
        _play(Scene(**json.loads(asked.scene)), steps)
        return
    started = begin()
    found: list[Shown] = []
    for sweep in QUICK if asked.quick else SCENES:
        for scene in sweep.scenes:
            found.append(
                Shown(sweep.name, scene, _in_a_process(scene, quick=asked.quick))
            )
            print(f"{sweep.name}: {scene}", flush=True)
    publish("step", results_of(found, steps, quick=asked.quick), started)


def _in_a_process(scene: Scene, *, quick: bool) -> Any:
    command = [
        sys.executable,
        "-m",
        "bench.step",
        "--scene",
        json.dumps(asdict(scene)),
        *["--quick"] * quick,
    ]
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{scene}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _play(scene: Scene, steps: int) -> None:
    """The process of one scene."""
    logging.disable(logging.WARNING)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from bench.step_flow import play

    print(json.dumps(asdict(play(scene, steps))), flush=True)
    os._exit(0)  # loads that are in flight for ever would be waited for


if __name__ == "__main__":
    main()
