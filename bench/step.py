"""Time that kvferry adds to the engine's step thread, which must not grow with leases, loads or blocks.

    python -m bench.step            # 10 minutes
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
from pathlib import Path
from typing import Any

from bench.provenance import begin
from bench.step_report import Shown, results_of
from bench.step_scenes import QUICK, SCENES

_STEPS, _QUICK_STEPS = 2000, 150
_TIMEOUT_S = 300.0
_ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps, and only the ends of some sweeps")
    parser.add_argument("--steps", type=int, help=f"steps of each scene; default {_STEPS}")
    parser.add_argument("--scene", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.scene is not None:
        _play(json.loads(asked.scene))
        return
    started = begin()
    steps = asked.steps or (_QUICK_STEPS if asked.quick else _STEPS)
    found: list[Shown] = []
    for sweep in QUICK if asked.quick else SCENES:
        for scene in sweep.scenes:
            seen = _elsewhere({"sweep": sweep.name, "scene": asdict(scene), "steps": steps})
            found.append(Shown(sweep.name, scene, seen))
            print(f"{sweep.name}: {found[-1].line()}", flush=True)
    held = _elsewhere({"held_calls": 5 if asked.quick else 25})
    from bench.figures import publish

    publish("step", results_of(found, held, steps, quick=asked.quick), started)


def _elsewhere(task: dict[str, Any]) -> Any:
    """Do it in a process of its own."""
    command = [sys.executable, "-m", "bench.step", "--scene", json.dumps(task)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{task}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _play(task: dict[str, Any]) -> None:
    """The process of one scene."""
    logging.disable(logging.WARNING)
    if "held_calls" in task:
        from bench.step_nixl import held_calls

        print(json.dumps([asdict(call) for call in held_calls(task["held_calls"])]), flush=True)
    else:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from bench.step_flow import play
        from bench.step_scenes import Scene

        print(json.dumps(asdict(play(Scene(**task["scene"]), task["steps"]))), flush=True)
    os._exit(0)  # loads that are in flight for ever would be waited for


if __name__ == "__main__":
    main()
