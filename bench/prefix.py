"""A prompt whose beginning another engine has in its cache: pulled from there, computed, or hit in the engine's own.

    python -m bench.prefix            # about 4 minutes on two cores
    python -m bench.prefix --quick    # 2 minutes

Two real vLLM engines of SmolLM2-135M in float32. It writes `results/prefix.json`. Ctrl-C ends both servers.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from bench.command import quick_or_whole
from bench.figures import Cell, Results, Table, Target, spread
from bench.serve_figures import median, percentile
from bench.serve_load import NO_LOGPROBS, VOCABULARY
from bench.serve_setups import start_all
from scripts.accuracy.client import Answer, Client
from scripts.accuracy.engines import Engine, EngineSpec, Transfer
from scripts.accuracy.model import default_cache_dir, prepare
from scripts.accuracy.prompts import Case
from scripts.accuracy.settings import DEFAULT_MODEL, ROOT

PREFIX_TOKENS = 1024
SUFFIX_TOKENS = 32
ANSWER_TOKENS = 8
TURNS = 24
_QUICK_TURNS = 6
_TIMEOUT_S = 120.0
LIMIT_MS = 25.0
"""How much later than with a local prefix hit a pulled prompt's first token may come, beside one step."""
LIMIT_TIMES = 5.0
"""How many times sooner than computed."""

COMPUTED = "computed"
PULLED = "pulled"
LOCAL = "local prefix hit"

WHAT = (
    f"The time to the first token of a prompt of {PREFIX_TOKENS:,} + {SUFFIX_TOKENS} random tokens at one engine, with "
    "no cache that knows it; when another engine has computed its beginning, which the request names; and when "
    "the engine itself has. One core for each engine, greedy answers of 8 tokens, streamed; the three take turns."
)


@dataclass(slots=True)
class Asked:
    """Answers to prompts that begin in one way.

    Attributes:
        first_s: the time to the first token of each.
        gaps_s: from one token to the next, of all.
    """

    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)


class Words:
    """Prompts of random tokens that no engine knows."""

    def __init__(self) -> None:
        self._chooser = random.Random("bench.prefix")

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._chooser.choice(VOCABULARY) for _ in range(count))

    def after(self, prefix: tuple[int, ...]) -> Case:
        """A prompt that begins so."""
        prompt = prefix + self.tokens(SUFFIX_TOKENS)
        return Case("prompt", prompt, max_tokens=ANSWER_TOKENS, stream=True)


def spec(name: str, core: str, model: str) -> EngineSpec:
    """An engine that answers prefix queries, and asks."""
    options = {"allowed_hosts": ["127.0.0.1"], "prefix_pull_min_tokens": 1}
    return EngineSpec(
        f"prefix-{name}",
        model,
        devices=(core,),
        transfer=Transfer("kv_both", extra_config=options),
        extra_args=("--num-gpu-blocks-override", "96"),
    )


class Pair:
    """The engine that is asked for answers, and the one that its prompts name.

    Attributes:
        asked: by how the prompt's beginning was obtained.
        wrong: pulled prompts whose answer differs from that after the local prefix hit.
    """

    def __init__(self, client: Client, source: Engine, engine: Engine) -> None:
        self.asked = {name: Asked() for name in (COMPUTED, PULLED, LOCAL)}
        self.wrong = 0
        self._client = client
        self._source = source
        self._engine = engine
        self._words = Words()

    async def turn(self, *, is_counted: bool) -> None:
        """Each of the three once."""
        words = self._words
        await self._ask(COMPUTED, words.after(words.tokens(PREFIX_TOKENS)), is_counted)
        prefix = words.tokens(PREFIX_TOKENS)
        await self._client.ask(self._source.base_url, words.after(prefix))
        case = words.after(prefix)
        named = {
            "remote_kv_source": {
                "kv_request_id": "bench",
                "remote_host": "127.0.0.1",
                "remote_port": self._source.side_channel_port,
            }
        }
        pulled = await self._ask(PULLED, case, is_counted, kv_transfer_params=named)
        await self._ask(LOCAL, words.after(prefix), is_counted)
        # What was pulled is in the engine's own cache now, and must be the same as what the source computes.
        alone = await self._client.ask(self._source.base_url, case)
        self.wrong += pulled.tokens != alone.tokens

    async def _ask(
        self, name: str, case: Case, is_counted: bool, **more: Mapping[str, object]
    ) -> Answer:
        answer = await self._client.ask(self._engine.base_url, case, **more)
        if answer.error or answer.first_token_s is None:
            raise RuntimeError(f"{name}: {answer.error or 'no token'}")
        if is_counted:
            self.asked[name].first_s.append(answer.first_token_s)
            self.asked[name].gaps_s += answer.gaps_s
        return answer

    def loaded(self) -> float:
        """Tokens that the engine has loaded of other engines' prefixes."""
        return self._engine.metrics().total("vllm:kvferry_prefix_tokens_loaded_total")


async def measure(source: Engine, engine: Engine, turns: int) -> Pair:
    """All turns.

    Raises:
        RuntimeError: a prompt was not answered, or no prefix was pulled.
    """
    async with Client("model", _TIMEOUT_S, always=NO_LOGPROBS) as client:
        pair = Pair(client, source, engine)
        # The first contact of both, and what vLLM does once.
        for _ in range(2):
            await pair.turn(is_counted=False)
        before = pair.loaded()
        for _ in range(turns):
            await pair.turn(is_counted=True)
        loaded = pair.loaded() - before
        if loaded != turns * PREFIX_TOKENS:
            raise RuntimeError(f"{loaded:g} tokens were pulled in {turns} turns")
        return pair


def results_of(all_asked: Mapping[str, Asked], wrong: int, *, quick: bool) -> Results:
    """A row for each way.

    Args:
        wrong: see `Pair`.
    """
    rows: list[Sequence[Cell]] = []
    for name, asked in all_asked.items():
        first_ms = [1e3 * first_s for first_s in asked.first_s]
        rows.append(
            (
                name,
                len(first_ms),
                median(first_ms),
                percentile(first_ms, 0.9),
                spread(first_ms),
            )
        )
    step_ms = 1e3 * median(gap for asked in all_asked.values() for gap in asked.gaps_s)
    median_ms = {name: 1e3 * median(asked.first_s) for name, asked in all_asked.items()}
    later_ms = median_ms[PULLED] - median_ms[LOCAL]
    targets = (
        Target.at_most(
            "first token, later than with a local prefix hit",
            later_ms,
            LIMIT_MS + step_ms,
            "ms",
            f"{LIMIT_MS:g} ms and a decode step of {step_ms:.1f} ms",
        ),
        Target.at_least(
            "first token, sooner than computed",
            median_ms[COMPUTED] / median_ms[PULLED],
            LIMIT_TIMES,
            "times",
        ),
        Target.at_most("answers with other tokens", wrong, 0, "answers"),
    )
    columns = ("the beginning is", "n", "p50", "p90", "range")
    return Results(
        command="python -m bench.prefix" + " --quick" * quick,
        what=WHAT,
        tables=(Table("Time to the first token, ms", columns, rows),),
        targets=targets,
        notes=(
            "Each prompt of random tokens is new. A pulled prompt names the other engine in `remote_kv_source`; what "
            "it generates is compared with what that engine generates itself.",
        ),
        quick=quick,
    )


def run(logs: Path, *, quick: bool) -> Results:
    """Start both engines, measure, end them."""
    model = prepare(DEFAULT_MODEL, default_cache_dir(), print)
    specs = [spec("source", "0", model), spec("engine", "1", model)]
    with ExitStack() as stack:
        source, engine = start_all(stack, specs, logs)
        turns = _QUICK_TURNS if quick else TURNS
        pair = asyncio.run(measure(source, engine, turns))
    return results_of(pair.asked, pair.wrong, quick=quick)


def main() -> int:
    """Measure, print, write."""
    return quick_or_whole(
        "prefix",
        __doc__,
        "few prompts",
        lambda quick: run(ROOT / "logs" / "prefix", quick=quick),
    )


if __name__ == "__main__":
    raise SystemExit(main())
