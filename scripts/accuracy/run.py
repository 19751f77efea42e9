"""One model from its first engine to its table: what is started when, what is asked, what is judged."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx

from scripts.accuracy import checks, phases, scores
from scripts.accuracy.checks import Check, Formula
from scripts.accuracy.client import Client, NoAnswer
from scripts.accuracy.engines import Engine, EngineSpec, Router
from scripts.accuracy.fleet import plan_fleet
from scripts.accuracy.judging import Expected, ThroughTheRouter, judge_router
from scripts.accuracy.model import config_of, has_states, prepare, token_size
from scripts.accuracy.processes import Server, ServerFailed, tail
from scripts.accuracy.prompts import CaseSet, make_cases
from scripts.accuracy.report import Report
from scripts.accuracy.settings import (
    DEFAULT_MODEL,
    RANDOM_MODELS,
    TINY_MODELS,
    Settings,
    check_heads,
)
from scripts.console import Progress

_SENTENCES = 2000
_SMALL_STEPS = ("--max-num-batched-tokens", "512")
"""So that long prompts are read while they are computed. Models with states may need larger steps."""
_LEASE_WAIT_S = 45.0


class Run:
    """One model's run. Everything that it starts is in `stack` and ends with it."""

    def __init__(
        self, settings: Settings, name: str, log_dir: Path, stack: ExitStack
    ) -> None:
        self._settings = settings
        self._name = name
        self._log_dir = log_dir
        self._stack = stack
        self._say = Progress().say
        self._servers: list[Server] = []
        self._ahead: dict[str, Engine] = {}
        self._questions = scores.questions()
        self._sums = scores.cases(self._questions)
        self._model = prepare(name, settings.cache_dir, self._say)
        check_heads(name, config_of(self._model).get("num_attention_heads"), settings)
        self._streams = settings.ferry and name in (DEFAULT_MODEL, *TINY_MODELS)
        self._fleet = plan_fleet(
            settings, self._model, os.environ, _SMALL_STEPS if self._streams else ()
        )
        workers = sum(
            len(spec.devices) for spec in (*self._fleet.prefill, *self._fleet.decode)
        )
        cores = len(os.sched_getaffinity(0))
        self._cores_suffice = settings.device == "cpu" and workers <= cores
        if settings.device == "cpu" and not self._cores_suffice:
            self._say(
                f"{workers} workers share {cores} cores: tensor parallel engines spin while they wait: slow"
            )
        what = "kvferry" if settings.ferry else "vLLM's own NixlConnector"
        engines = " → ".join(settings.engines)
        self.report = Report(
            f"{name} · {settings.dtype} on {settings.device} · {engines} · {what}"
        )

    async def go(self) -> Report:
        """All of it.

        Raises:
            ServerFailed: a server did not start, ended or stopped answering; the text ends with its log.
        """
        try:
            await self._go()
        except (NoAnswer, httpx.HTTPError) as error:
            raise self._explained(str(error) or repr(error)) from error
        return self.report

    async def _go(self) -> None:
        # The prefill engines start beside the baseline: they have devices of their own, and starting takes longest.
        baseline, *prefill = self._start_all(
            [self._fleet.baseline, *self._fleet.prefill]
        )
        self._start_ahead(self._fleet.decode)
        timeout_s = self._settings.request_timeout_s
        always = {"likeliest": checks.LIKELIEST}
        async with Client(
            self._fleet.baseline.served_name, timeout_s, always=always
        ) as client:
            blocks = _block_of(prefill[0]), _block_of(baseline)
            longest = min(1500, self._settings.max_model_len - 500)
            tokens = phases.tokenize(baseline, _SENTENCES)
            # Of a model with states, a prompt of one token is not handed over.
            shortest = 2 if has_states(config_of(self._model)) else 1
            cases = make_cases(
                tokens, blocks[1], longest, self._settings.concurrency, shortest
            )
            expected = await self._baseline(client, baseline, cases)
            self._stop(baseline)
            decode = self._start_all(self._fleet.decode)
            if not self._why_not_poisoned():
                self._start_ahead([self._fleet.poisoner])
            urls = (
                [engine.base_url for engine in prefill],
                [engine.base_url for engine in decode],
            )
            router = Router(*urls, self._log_dir, timeout_s)
            self._enter(router)
            router.wait_ready(60)
            self._say("vllm-router is ready")
            await phases.warm_up(client, [*urls[0], *urls[1]], cases)
            for case in cases.warm:
                await client.ask(router.base_url, case)
            decoders = phases.Decoders(decode)
            warm = await decoders.scrape()
            found = await self._through_the_router(
                client, router.base_url, decoders, cases
            )
            formula = self._formula(blocks, phases.anything_staged(decode))
            judged, self.report.figures = judge_router(
                expected, found, cases, self._settings, formula, blocks
            )
            self.report.checks += [
                *judged,
                await self._arithmetic(client, router.base_url, expected),
            ]
            if self._settings.ferry:
                counters = await decoders.scrape() - warm - found.left
                self.report.checks.append(checks.judge_recomputes(counters))
                if self._streams:
                    self.report.checks.append(checks.judge_streams(counters))
                self.report.checks.append(
                    checks.judge_leases(
                        *await phases.leases_over(prefill, _LEASE_WAIT_S)
                    )
                )
                await self._in_turn(client, prefill[0], decode[0], cases, expected)
            await self._poisoned(client, prefill, decode[0], cases, expected)

    # Phases.

    async def _baseline(
        self, client: Client, engine: Engine, cases: CaseSet
    ) -> Expected:
        url = engine.base_url
        await phases.warm_up(client, [url], cases)
        self._say(
            f"single engine, {len(cases.compared)} prompts one by one, {len(self._sums)} questions"
        )
        asked = [*cases.compared, *self._sums]
        answers = await client.ask_all(url, cases.compared, 1)
        answers += await client.ask_all(url, self._sums, self._settings.concurrency)
        expected = {
            case.name: answer for case, answer in zip(asked, answers, strict=True)
        }
        failed = [
            f"{name}: {answer.error}"
            for name, answer in expected.items()
            if answer.error
        ]
        if failed:
            raise engine.failure(
                f"could not answer {len(failed)} prompts itself ({failed[0]})"
            )
        return expected

    async def _arithmetic(self, client: Client, url: str, expected: Expected) -> Check:
        self._say(f"arithmetic through the router, {len(self._sums)} questions")
        answers = await client.ask_all(url, self._sums, self._settings.concurrency)
        right = (
            scores.right(self._questions, [expected[case.name] for case in self._sums]),
            scores.right(self._questions, answers),
        )
        compared = checks.compare(self._sums, expected, answers)
        random_weights = self._name in RANDOM_MODELS
        return checks.judge_arithmetic(
            compared, right, self._settings.dtype, random_weights=random_weights
        )

    async def _through_the_router(
        self, client: Client, url: str, decoders: phases.Decoders, cases: CaseSet
    ) -> ThroughTheRouter:
        self._say(f"through the router, {len(cases.sequence)} prompts one by one")
        answers = []
        for case in cases.sequence:
            answers += await decoders.counted(case.name, client.ask_all(url, [case], 1))
        at_once = self._settings.concurrency
        self._say(f"through the router, {len(cases.crowd)} prompts, {at_once} at once")
        answers += await decoders.counted(
            "all at once", client.ask_all(url, cases.crowd, at_once)
        )
        computed = await decoders.computed(len(answers))
        self._say("through the router, clients that leave half way")
        before = await decoders.scrape()
        came = await phases.leave_early(client, url, cases.aborted)
        left = await decoders.idle() - before
        again = await client.ask_all(url, cases.aborted, 1)
        self._check_alive()
        return ThroughTheRouter(answers, again, came, left, decoders.seen, computed)

    async def _in_turn(
        self,
        client: Client,
        prefill: Engine,
        decode: Engine,
        cases: CaseSet,
        expected: Expected,
    ) -> None:
        """The router sends both legs at once; here the second leaves when the first is answered. A salt of their own
        keeps the prompts out of what the engines have cached."""
        self._say(f"one leg after the other, {len(cases.poisoned)} prompts")
        decoders = phases.Decoders([decode])
        salted = client.hand_over_all(
            prefill.base_url, decode.base_url, cases.poisoned, cache_salt="legs in turn"
        )
        before = await decoders.scrape()
        answers = await decoders.counted("in turn", salted)
        recomputed = (await decoders.scrape() - before).total(
            "vllm:kvferry_local_recomputes_total"
        )
        self._check_alive()
        compared = checks.compare(cases.poisoned, expected, answers)
        moved = decoders.seen["in turn"].nixl_bytes
        self.report.checks.append(
            checks.judge_in_turn(compared, moved, recomputed, self._settings.dtype)
        )

    async def _poisoned(
        self,
        client: Client,
        prefill: Sequence[Engine],
        decode: Engine,
        cases: CaseSet,
        expected: Expected,
    ) -> None:
        if why := self._why_not_poisoned():
            self.report.checks.append(Check(checks.POISON, None, why))
            return
        self._say("a prefill engine with a connector that overwrites its cache")
        for engine in prefill:
            self._stop(engine)
        (poisoner,) = self._start_all([self._fleet.poisoner])
        await phases.warm_up(client, [poisoner.base_url], cases)
        decoders = phases.Decoders([decode])
        asking = client.hand_over_all(
            poisoner.base_url, decode.base_url, cases.poisoned
        )
        answers = await decoders.counted("poisoned", asking)
        self._check_alive()
        moved = decoders.seen["poisoned"].nixl_bytes
        self.report.checks.append(
            checks.judge_poison(
                cases.poisoned, expected, answers, moved, self._settings.dtype
            )
        )

    def _why_not_poisoned(self) -> str:
        if not self._settings.ferry:
            return "for kvferry only"
        if has_states(config_of(self._model)):
            return "a model with states offers a prompt after the step that this check overwrites"
        return ""

    def _formula(self, blocks: tuple[int, int], staged: bool) -> Formula | None:
        """For the bytes that move; none where the cache has another dtype than the model.

        Args:
            blocks: tokens in a block of the prefill engines and of the decode engines.
            staged: whether decoders read anything into a staging pool.
        """
        size = token_size(
            config_of(self._model), self._settings.decode_tp, self._settings.dtype
        )
        if not size or any(
            argument.startswith("--kv-cache-dtype")
            for argument in self._settings.extra_args
        ):
            return None
        return Formula(math.gcd(*blocks), *size, staged)

    # Servers.

    def _start_all(self, specs: Sequence[EngineSpec]) -> list[Engine]:
        """Start engines beside each other and wait until all are ready.

        Those that share a GPU start one after the other: vLLM measures its free memory at the start, and ends when
        another engine takes some meanwhile.
        """
        engines: list[Engine] = []
        starting: list[Engine] = []
        for spec in specs:
            if any(spec.shares_gpu_with(engine.spec) for engine in starting):
                self._await(starting)
                starting = []
            engine = self._start(spec)
            engines.append(engine)
            starting.append(engine)
        self._await(starting)
        return engines

    def _start_ahead(self, specs: Sequence[EngineSpec]) -> None:
        """Start engines that are needed later, unless they would take what others need meanwhile.

        While prompts are asked one by one, one core has little to do; an engine's start takes a core for half a minute.
        On a GPU two engines of the same place do not fit beside each other. Tensor parallel workers without a core of
        their own spin, so another engine beside them would slow everything down.
        """
        if self._cores_suffice:
            self._ahead |= {spec.name: self._start(spec) for spec in specs}

    def _start(self, spec: EngineSpec) -> Engine:
        if engine := self._ahead.pop(spec.name, None):
            return engine
        engine = Engine(spec, self._log_dir)
        self._enter(engine)
        self._say(
            f"start {engine.name} on {spec.device} {','.join(spec.devices)}, {engine.base_url}"
        )
        return engine

    def _enter(self, server: Server) -> None:
        self._stack.callback(server.stop)
        server.start()
        self._servers.append(server)

    def _await(self, engines: Sequence[Engine]) -> None:
        for engine in engines:
            engine.wait_ready(self._settings.start_timeout_s, say=self._say)
            self._say(f"{engine.name} is ready")

    def _stop(self, server: Server) -> None:
        server.stop()
        self._servers.remove(server)

    def _check_alive(self) -> None:
        """Errors of answers are counted; a server that has ended is reported with the end of its log."""
        ended = [server.name for server in self._servers if not server.alive]
        if ended:
            raise self._explained(f"{', '.join(ended)} ended while prompts were asked")

    def _explained(self, error: str) -> ServerFailed:
        """The error with the end of every log that could explain it: first of those that have ended."""
        servers = sorted(self._servers, key=lambda server: server.alive)
        parts = [
            f"{server.name} ({'runs' if server.alive else 'has ended'}), the end of {server.log_path}:\n"
            f"{tail(server.log_path, 15)}"
            for server in servers
        ]
        return ServerFailed("\n\n".join([error, *parts]))


def _block_of(engine: Engine) -> int:
    """Tokens in a block, as the engine says."""
    text = engine.metrics().label("vllm:cache_config_info", "block_size")
    if text is None:
        raise engine.failure("does not tell its block size in /metrics")
    return int(text)
