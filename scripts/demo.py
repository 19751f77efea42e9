"""The demonstration: two engines behind vllm-router, some load with one slow request, and that request's timeline; then
a prompt that is read from the cache of the engine that has its beginning."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from kvferry.trace.reading import InvalidTrace, read_recording
from kvferry.trace.summary import summarize
from scripts.accuracy.client import Answer, Client
from scripts.accuracy.engines import Engine, EngineSpec, Router
from scripts.accuracy.fleet import plan_fleet
from scripts.accuracy.model import NoModel, prepare
from scripts.accuracy.processes import ServerFailed
from scripts.accuracy.prompts import Case
from scripts.accuracy.settings import BadSetting, Settings, read_settings
from scripts.console import STOPPED, Progress, raise_when_stopped, shown
from scripts.demo_prefix import OPTIONS, SecondPrompt, lines_of

SLOW = "demo-slow"
"""The id of the slow request, which both engines' ids contain."""
SLOW_S = 1.5
_REQUESTS = 30
_LENGTHS = (48, 130, 300, 520, 760)
_RECORDED_S = 30.0
"""Most time for the recorders to write the last handover; it takes a fraction of a second where nothing is wrong."""
_LOOK_S = 0.2


def prompts(count: int, name: str) -> list[Case]:
    """So many prompts of random tokens, the same for the same name."""
    chooser = random.Random(name)
    return [
        Case(
            f"{name}-{number}",
            tuple(chooser.choices(range(100, 40_000), k=_LENGTHS[number % 5])),
        )
        for number in range(count)
    ]


async def load(
    router: str, prefill: str, decode: str, served_name: str, timeout_s: float
) -> list[Answer]:
    """The requests through the router, and one as a router sends it that waits between the two engines."""
    async with Client(served_name, timeout_s) as client:
        answers = await client.ask_all(router, prompts(_REQUESTS, "demo"), 3)
        (case,) = prompts(1, SLOW)
        params = await client.prefill(prefill, case, request_id=SLOW)
        await asyncio.sleep(SLOW_S)
        return [
            *answers,
            await client.ask(decode, case, kv_transfer_params=params, request_id=SLOW),
        ]


async def show_prefix(source: Engine, engine: Engine, timeout_s: float) -> list[Answer]:
    """A prompt whose beginning `source` has, at `engine`, beside one that it computes. Returns both answers."""
    async with Client(source.spec.served_name, timeout_s) as client:
        second = SecondPrompt(client, source, engine)
        computed = await second.compute()
        pulled = await second.pull()
    print()
    for line in lines_of(computed, pulled, source.spec.name, engine.spec.name):
        print(line)
    return [computed, pulled.answer]


def demonstrate(settings: Settings, stack: ExitStack) -> bool:
    """Start, load, show; whether everything was answered and shown. Everything that it starts is in `stack`.

    Raises:
        ServerFailed: a server did not start; the text ends with its log.
    """
    say = Progress().say
    folder = settings.log_dir / "demo" / time.strftime("%Y%m%d-%H%M%S")
    config = {
        **OPTIONS,
        **settings.extra_config,
        "trace_dir": str(folder / "traces"),
    }
    model = prepare(settings.models[0], settings.cache_dir, say)
    fleet = plan_fleet(replace(settings, extra_config=config), model, os.environ)
    say(
        f"start {len(fleet.prefill)} prefill and {len(fleet.decode)} decode engines; logs: {shown(folder)}"
    )
    prefill, decode = (
        [stack.enter_context(Engine(_called_by_name(spec), folder)) for spec in specs]
        for specs in (fleet.prefill, fleet.decode)
    )
    for engine in (*prefill, *decode):
        engine.wait_ready(settings.start_timeout_s)
        say(f"{engine.name} is ready: {engine.base_url}")
    from_, to = ([engine.base_url for engine in some] for some in (prefill, decode))
    router = stack.enter_context(Router(from_, to, folder, settings.request_timeout_s))
    router.wait_ready(60)
    say(
        f"{_REQUESTS} requests through the router, and one that a slow router hands over"
    )
    served_name = prefill[0].spec.served_name
    answers = asyncio.run(
        load(router.base_url, from_[0], to[0], served_name, settings.request_timeout_s)
    )
    _wait_until_recorded(folder / "traces", len(answers))
    traces, out = shown(folder / "traces"), shown(folder / "trace.json.gz")
    good = _kvferry("trace", traces, "-o", out, "--slowest", "5") and _kvferry(
        "trace", traces, "--request", SLOW
    )
    answers += asyncio.run(
        show_prefix(prefill[0], decode[0], settings.request_timeout_s)
    )
    failed = [answer.error for answer in answers if answer.error]
    if failed:
        print(
            f"{len(failed)} of {len(answers)} requests failed: {failed[0]}",
            file=sys.stderr,
        )
    print(
        f"\nThe router: {router.base_url}/v1/completions, model `{served_name}`. Logs: {shown(folder)}"
    )
    return good and not failed


def _wait_until_recorded(traces: Path, handovers: int) -> None:
    """Wait until so many handovers are recorded to their end: a busy machine lets the recorders wait."""
    end_s = time.monotonic() + _RECORDED_S
    while time.monotonic() < end_s:
        with suppress(InvalidTrace):  # nothing is written yet
            found = summarize(read_recording([traces])).handovers
            whole = [one for one in found if one.handover_ms is not None and one.held]
            if len(whole) >= handovers:
                return
        time.sleep(_LOOK_S)


def _called_by_name(spec: EngineSpec) -> EngineSpec:
    """An engine whose id is its name, so that people know it again in a timeline."""
    return (
        replace(spec, transfer=replace(spec.transfer, engine_id=spec.name))
        if spec.transfer
        else spec
    )


def _kvferry(*arguments: str) -> bool:
    """Run the command as an operator would; whether its exit status is 0."""
    print(f"\n$ kvferry {' '.join(arguments)}", flush=True)
    return (
        subprocess.run(
            [Path(sys.executable).parent / "kvferry", *arguments], check=False
        ).returncode
        == 0
    )


def main(arguments: Sequence[str]) -> int:
    """Entry point; `--once` ends when everything has been shown, scripts/run_demo.sh checks what it is given.

    Exit status: 0 all is well, 1 something was not shown, 2 a setting is wrong, 3 a server failed.
    """
    raise_when_stopped()
    try:
        with ExitStack() as stack:
            status = 0 if demonstrate(read_settings(os.environ), stack) else 1
            if "--once" not in arguments:
                print("Everything stays up until Ctrl-C.", flush=True)
                while True:
                    time.sleep(3600)
            return status
    except BadSetting as error:
        print(error, file=sys.stderr)
        return 2
    except (ServerFailed, NoModel) as error:
        print(f"\n{error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print(f"\n{STOPPED}", file=sys.stderr)
        return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
