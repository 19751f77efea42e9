"""One model from its first engine to its table: what is started when, what is asked, what is judged."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx

from scripts.accuracy import checks, gsm8k, judging, phases
from scripts.accuracy.arithmetic import QUESTIONS, Score
from scripts.accuracy.client import Answer, Client, NoAnswer
from scripts.accuracy.engines import Engine, EngineSpec
from scripts.accuracy.fleet import plan_fleet
from scripts.accuracy.judging import Expected
from scripts.accuracy.model import CacheShape, cache_shape, check_sizes, config_of, prepare
from scripts.accuracy.processes import Server, ServerFailed, tail
from scripts.accuracy.prompts import Case, CaseSet, make_cases
from scripts.accuracy.report import Report, milliseconds
from scripts.accuracy.router import Router
from scripts.accuracy.settings import Settings, parallel
from scripts.accuracy.variables import TINY_MODELS

_SENTENCES = 2000
_LEASE_WAIT_S = 45.0


class Run:
    """One model's run. Everything that it starts is in `stack` and ends with it."""

    def __init__(self, settings: Settings, name: str, log_dir: Path, stack: ExitStack) -> None:
        self._settings = settings
        self._name = name
        self._log_dir = log_dir
        self._stack = stack
        self._started_s = time.monotonic()
        self._servers: list[Server] = []
        self._model = prepare(name, settings.cache_dir, self.say)
        sizes = {"PREFILLER_TP_SIZE": settings.prefill_tp, "DECODER_TP_SIZE": settings.decode_tp}
        check_sizes(name, config_of(self._model), sizes)
        self._fleet = plan_fleet(settings, self._model, os.environ)
        self._gsm8k = gsm8k.availability(settings)
        workers = sum(len(spec.devices) for spec in (*self._fleet.prefill, *self._fleet.decode))
        cores = len(os.sched_getaffinity(0))
        if settings.device == "cpu" and workers > cores:
            self.say(
                f"{workers} workers share {cores} cores: tensor parallel engines spin while they wait and are slow"
            )
        what = "kvferry" if settings.ferry else "vLLM's own NixlConnector"
        self.report = Report(
            f"{name} · {settings.dtype} on {settings.device} · {settings.prefill_instances} × "
            f"{parallel(settings.prefill_tp, settings.prefill_pp)} prefill → {settings.decode_instances} × "
            f"{parallel(settings.decode_tp, settings.decode_pp, settings.decode_dp)} decode · {what}"
        )

    def say(self, text: str) -> None:
        """A line of progress with the time since the run began."""
        print(f"[{time.monotonic() - self._started_s:6.1f} s] {text}", flush=True)

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
        baseline = self._start(self._fleet.baseline)
        prefill = [self._start(spec) for spec in self._fleet.prefill]
        self._await([baseline, *prefill])
        async with Client(self._fleet.baseline.served_name, self._settings.request_timeout_s) as client:
            block = _block_of(baseline)
            cases = self._cases(baseline, block)
            expected = await self._baseline(client, baseline, cases)
            expected.block, expected.prefill_block = block, _block_of(prefill[0])
            self._stop(baseline)
            decode = [self._start(spec) for spec in self._fleet.decode]
            self._await(decode)
            router = Router(
                [engine.base_url for engine in prefill],
                [engine.base_url for engine in decode],
                self._log_dir,
                self._settings.request_timeout_s,
            )
            self._enter(router)
            router.wait_ready(60)
            self.say("vllm-router is ready")
            await phases.warm_up(client, [engine.base_url for engine in [*prefill, *decode]], cases)
            for case in cases.warm:
                await client.ask(router.base_url, case)
            await self._through_the_router(client, router, prefill, decode, cases, expected)
            await self._directly(client, prefill, decode, cases, expected)

    # Phases.

    def _cases(self, engine: Engine, block: int) -> CaseSet:
        longest = min(1500, self._settings.max_model_len - 500)
        tokens = phases.tokenize(engine, _SENTENCES)
        return make_cases(tokens, block, longest, self._settings.concurrency)

    async def _baseline(self, client: Client, engine: Engine, cases: CaseSet) -> Expected:
        await phases.warm_up(client, [engine.base_url], cases)
        compared = cases.compared
        answers = await phases.ask_plainly(client, engine.base_url, compared, self.say, "single engine")
        expected = Expected({case.name: answer for case, answer in zip(compared, answers, strict=True)})
        failed = [f"{case.name}: {a.error}" for case, a in zip(compared, answers, strict=True) if a.error]
        if failed:
            raise engine.failure(f"could not answer {len(failed)} prompts itself ({failed[0]})")
        if not self._settings.exact:
            self.say(f"single engine, {self._settings.concurrency} at once, against itself")
            expected.itself = await self._against_itself(client, engine, compared, answers)
        expected.arithmetic = await self._arithmetic(client, engine.base_url, engine.name)
        if not self._settings.exact:
            expected.arithmetic_itself = await self._arithmetic(client, engine.base_url, f"{engine.name}, again")
        if self._gsm8k.can_run:
            expected.gsm8k = self._score(engine.base_url, "baseline")
        return expected

    async def _against_itself(
        self, client: Client, engine: Engine, compared: Sequence[Case], answers: Sequence[Answer]
    ) -> checks.Comparison:
        """Twice, in both orders: which prompts meet in a batch decides which of them round otherwise."""
        at_once = self._settings.concurrency
        there = await client.ask_all(engine.base_url, compared, at_once)
        back = (await client.ask_all(engine.base_url, compared[::-1], at_once))[::-1]
        return checks.ever_different([checks.compare(compared, answers, again) for again in (there, back)])

    async def _through_the_router(
        self,
        client: Client,
        router: Router,
        prefill: Sequence[Engine],
        decode: Sequence[Engine],
        cases: CaseSet,
        expected: Expected,
    ) -> None:
        settings = self._settings
        decoders = phases.Decoders(decode)
        url = router.base_url
        warm = await decoders.scrape()
        one_by_one = await phases.ask_counted(client, url, cases.sequence, decoders, self.say, "through the router")
        self.say(f"through the router, {settings.concurrency} at once")
        crowd = await phases.ask_at_once(client, url, cases.crowd, settings.concurrency, decoders)
        self.say("through the router, clients that leave half way")
        again, came = await phases.leave_and_return(client, url, cases.aborted)
        self._check_alive()

        expected.staged = phases.anything_staged(decode)
        seen = judging.ThroughTheRouter(cases, one_by_one, crowd, again, tuple(came))
        self.report.checks += judging.judge_answers(seen, expected)
        shape = self._shape()
        self.report.checks += judging.judge_counters(seen, expected, settings, shape)
        score = await self._arithmetic(client, url, "router")
        self.report.checks.append(
            checks.judge_arithmetic(
                expected.arithmetic, score, expected.arithmetic_itself, random_weights=self._name in TINY_MODELS
            )
        )
        self.report.checks.append(self._judge_gsm8k(url, expected))
        counters = await decoders.scrape() - warm
        self.report.figures |= judging.figures(seen, expected, settings, shape, counters)
        if settings.ferry:
            self.report.checks.append(checks.judge_recomputes(counters))
            still_open, ways = await phases.leases_over(prefill, _LEASE_WAIT_S)
            reported = ", ".join(f"{how} {round(count)}" for how, count in sorted(ways.items()))
            self.report.checks.append(
                checks.Check("leases are over", still_open == 0, f"{still_open} open; {reported}")
            )

    async def _directly(
        self,
        client: Client,
        prefill: Sequence[Engine],
        decode: Sequence[Engine],
        cases: CaseSet,
        expected: Expected,
    ) -> None:
        self.say("handovers, timed by direct calls")
        times = await phases.time_handovers(client, prefill[0].base_url, decode[0].base_url, cases.timed)
        quantiles = {"p50": checks.percentile(times, 0.5), "p99": checks.percentile(times, 0.99)}
        figure = f"{milliseconds(quantiles)} ({len(times)} direct calls of {len(cases.timed[0].prompt)} tokens)"
        self.report.figures["handover: prefill answered → first token"] = figure
        if not self._settings.ferry:
            self.report.checks.append(checks.Check("poisoned cache changes the tokens", None, "for kvferry only"))
            return
        await self._poison(client, prefill, decode[0], cases, expected)

    async def _poison(
        self, client: Client, prefill: Sequence[Engine], decode: Engine, cases: CaseSet, expected: Expected
    ) -> None:
        self.say("restart the prefill engine with a connector that overwrites its cache")
        for engine in prefill:
            self._stop(engine)
        poisoner = self._start(self._fleet.poisoner)
        self._await([poisoner])
        await phases.warm_up(client, [poisoner.base_url], cases)
        decoders = phases.Decoders([decode])
        answers, seen = await phases.hand_over_all(client, poisoner.base_url, decode.base_url, cases.poisoned, decoders)
        self._check_alive()
        judged = checks.judge_poison(cases.poisoned, expected.of(cases.poisoned), answers, seen.nixl_bytes)
        self.report.checks.append(judged)

    def _shape(self) -> CacheShape | None:
        """For the formula; none where the cache has another dtype than the model."""
        if any(argument.startswith("--kv-cache-dtype") for argument in self._settings.extra_args):
            return None
        return cache_shape(config_of(self._model), self._settings.decode_tp)

    # Scores: arithmetic always, gsm8k where it can be asked.

    async def _arithmetic(self, client: Client, url: str, name: str) -> Score:
        self.say(f"arithmetic, {QUESTIONS} questions, {name}")
        return await phases.ask_arithmetic(client, url, self._settings.concurrency)

    def _judge_gsm8k(self, url: str, expected: Expected) -> checks.Check:
        if expected.gsm8k is None:
            return checks.gsm8k_not_run(self._gsm8k.reason, demanded=self._settings.gsm8k == "on")
        return checks.judge_gsm8k(expected.gsm8k, self._score(url, "router"))

    def _score(self, url: str, name: str) -> float:
        self.say(f"gsm8k, {self._settings.gsm8k_limit} questions, {name}")
        return gsm8k.score(url, self._fleet.baseline.served_name, self._model, self._settings, self._log_dir, name)

    # Servers.

    def _start(self, spec: EngineSpec) -> Engine:
        engine = Engine(spec, self._log_dir)
        self._enter(engine)
        self.say(f"start {engine.name} on {spec.device} {','.join(spec.devices)}, {engine.base_url}")
        return engine

    def _enter(self, server: Server) -> None:
        self._stack.callback(server.stop)
        server.start()
        self._servers.append(server)

    def _await(self, engines: Sequence[Engine]) -> None:
        for engine in engines:
            engine.wait_ready(self._settings.start_timeout_s, tell=_teller(self.say, engine.name))
            self.say(f"{engine.name} is ready")

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


def _teller(say: Callable[[str], None], name: str) -> Callable[[float], None]:
    return lambda waited_s: say(f"waiting for {name} ({waited_s:.0f} s)")


def _block_of(engine: Engine) -> int:
    """Tokens in a block, as the engine says."""
    text = engine.metrics().label("vllm:cache_config_info", "block_size")
    if text is None:
        raise engine.failure("does not tell its block size in /metrics")
    return int(text)
