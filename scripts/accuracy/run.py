"""One model from its first engine to its table: what is started when, what is asked, what is judged."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx

from scripts.accuracy import checks, judging, phases, scores
from scripts.accuracy.checks import Check
from scripts.accuracy.client import Answer, Client, NoAnswer
from scripts.accuracy.engines import Engine, EngineSpec, Router
from scripts.accuracy.fleet import plan_fleet
from scripts.accuracy.judging import Expected
from scripts.accuracy.model import CacheShape, cache_shape, check_sizes, config_of, prepare
from scripts.accuracy.processes import Server, ServerFailed, tail
from scripts.accuracy.prompts import Case, CaseSet, make_cases
from scripts.accuracy.report import Report, quantiles
from scripts.accuracy.settings import TINY_MODELS, Settings
from scripts.console import Progress

_SENTENCES = 2000
_LEASE_WAIT_S = 45.0


class Run:
    """One model's run. Everything that it starts is in `stack` and ends with it."""

    def __init__(self, settings: Settings, name: str, log_dir: Path, stack: ExitStack) -> None:
        self._settings = settings
        self._name = name
        self._log_dir = log_dir
        self._stack = stack
        self._say = Progress().say
        self._servers: list[Server] = []
        self._model = prepare(name, settings.cache_dir, self._say)
        sizes = {"PREFILLER_TP_SIZE": settings.prefill_tp, "DECODER_TP_SIZE": settings.decode_tp}
        check_sizes(name, config_of(self._model), sizes)
        self._fleet = plan_fleet(settings, self._model, os.environ)
        self._why_no_gsm8k = scores.why_no_gsm8k(settings)
        workers = sum(len(spec.devices) for spec in (*self._fleet.prefill, *self._fleet.decode))
        cores = len(os.sched_getaffinity(0))
        if settings.device == "cpu" and workers > cores:
            self._say(f"{workers} workers share {cores} cores: tensor parallel engines spin while they wait: slow")
        what = "kvferry" if settings.ferry else "vLLM's own NixlConnector"
        engines = " → ".join(settings.engines)
        self.report = Report(f"{name} · {settings.dtype} on {settings.device} · {engines} · {what}")

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
        timeout_s = self._settings.request_timeout_s
        async with Client(self._fleet.baseline.served_name, timeout_s) as client:
            block = _block_of(baseline)
            longest = min(1500, self._settings.max_model_len - 500)
            tokens = phases.tokenize(baseline, _SENTENCES)
            cases = make_cases(tokens, block, longest, self._settings.concurrency)
            expected = await self._baseline(client, baseline, cases)
            expected.block, expected.prefill_block = block, _block_of(prefill[0])
            self._stop(baseline)
            decode = [self._start(spec) for spec in self._fleet.decode]
            self._await(decode)
            urls = [engine.base_url for engine in prefill], [engine.base_url for engine in decode]
            router = Router(*urls, self._log_dir, timeout_s)
            self._enter(router)
            router.wait_ready(60)
            self._say("vllm-router is ready")
            await phases.warm_up(client, [*urls[0], *urls[1]], cases)
            for case in cases.warm:
                await client.ask(router.base_url, case)
            await self._through_the_router(client, router.base_url, prefill, decode, cases, expected)
            await self._directly(client, prefill, decode[0], cases, expected)

    # Phases.

    async def _baseline(self, client: Client, engine: Engine, cases: CaseSet) -> Expected:
        url, compared = engine.base_url, cases.compared
        await phases.warm_up(client, [url], cases)
        answers = await phases.ask_plainly(client, url, compared, self._say, "single engine")
        expected = Expected({case.name: answer for case, answer in zip(compared, answers, strict=True)})
        failed = [f"{name}: {answer.error}" for name, answer in expected.answers.items() if answer.error]
        if failed:
            raise engine.failure(f"could not answer {len(failed)} prompts itself ({failed[0]})")
        if not self._settings.exact:
            self._say(f"single engine, {self._settings.concurrency} at once, against itself")
            expected.itself = await self._against_itself(client, url, compared, answers)
        expected.arithmetic = await self._arithmetic(client, url, engine.name)
        if not self._settings.exact:
            expected.arithmetic_itself = await self._arithmetic(client, url, f"{engine.name}, again")
        if not self._why_no_gsm8k:
            expected.gsm8k = self._gsm8k(url, "baseline")
        return expected

    async def _against_itself(
        self, client: Client, url: str, compared: Sequence[Case], answers: Sequence[Answer]
    ) -> checks.Comparison:
        """Twice, in both orders: which prompts meet in a batch decides which of them round otherwise."""
        at_once = self._settings.concurrency
        there = await client.ask_all(url, compared, at_once)
        back = (await client.ask_all(url, compared[::-1], at_once))[::-1]
        return checks.ever_different([checks.compare(compared, answers, again) for again in (there, back)])

    async def _through_the_router(
        self,
        client: Client,
        url: str,
        prefill: Sequence[Engine],
        decode: Sequence[Engine],
        cases: CaseSet,
        expected: Expected,
    ) -> None:
        settings, found = self._settings, self.report.checks
        decoders = phases.Decoders(decode)
        warm = await decoders.scrape()
        one_by_one = await phases.ask_counted(client, url, cases.sequence, decoders, self._say, "through the router")
        self._say(f"through the router, {settings.concurrency} at once")
        crowd = await phases.ask_at_once(client, url, cases.crowd, settings.concurrency, decoders)
        self._say("through the router, clients that leave half way")
        again, came = await phases.leave_and_return(client, url, cases.aborted)
        self._check_alive()

        expected.staged = phases.anything_staged(decode)
        formula = judging.formula_of(expected, settings, self._shape())
        seen = judging.ThroughTheRouter(expected, settings, formula, cases, one_by_one, crowd, again, came)
        found += [*seen.judge_answers(), *seen.judge_counters()]
        score = await self._arithmetic(client, url, "router")
        known, itself = expected.arithmetic, expected.arithmetic_itself
        found.append(checks.judge_arithmetic(known, score, itself, random_weights=self._name in TINY_MODELS))
        found.append(self._judge_gsm8k(url, expected))
        counters = await decoders.scrape() - warm
        self.report.figures |= seen.figures(counters)
        if settings.ferry:
            found.append(checks.judge_recomputes(counters))
            still_open, ways = await phases.leases_over(prefill, _LEASE_WAIT_S)
            reported = ", ".join(f"{how} {round(count)}" for how, count in sorted(ways.items()))
            found.append(Check("leases are over", still_open == 0, f"{still_open} open; {reported}"))

    async def _directly(
        self, client: Client, prefill: Sequence[Engine], decode: Engine, cases: CaseSet, expected: Expected
    ) -> None:
        self._say("handovers, timed by direct calls")
        _, times = await phases.hand_over_all(client, prefill[0].base_url, decode.base_url, cases.timed)
        figure = f"{quantiles(times)} ({len(times)} direct calls of {len(cases.timed[0].prompt)} tokens)"
        self.report.figures["handover: prefill answered → first token"] = figure
        if not self._settings.ferry:
            self.report.checks.append(Check(checks.POISON, None, "for kvferry only"))
            return
        self._say("restart the prefill engine with a connector that overwrites its cache")
        for engine in prefill:
            self._stop(engine)
        poisoner = self._start(self._fleet.poisoner)
        self._await([poisoner])
        await phases.warm_up(client, [poisoner.base_url], cases)
        decoders = phases.Decoders([decode])
        before = await decoders.scrape()
        answers, _ = await phases.hand_over_all(client, poisoner.base_url, decode.base_url, cases.poisoned)
        moved = phases.seen_in(await decoders.settled(before, answers) - before, 0).nixl_bytes
        self._check_alive()
        self.report.checks.append(checks.judge_poison(expected.of(cases.poisoned), answers, moved))

    def _shape(self) -> CacheShape | None:
        """For the formula; none where the cache has another dtype than the model."""
        if any(argument.startswith("--kv-cache-dtype") for argument in self._settings.extra_args):
            return None
        return cache_shape(config_of(self._model), self._settings.decode_tp)

    # Scores: arithmetic always, gsm8k where it can be asked.

    async def _arithmetic(self, client: Client, url: str, name: str) -> scores.Score:
        self._say(f"arithmetic, {scores.QUESTIONS} questions, {name}")
        return await phases.ask_arithmetic(client, url, self._settings.concurrency)

    def _judge_gsm8k(self, url: str, expected: Expected) -> Check:
        if self._why_no_gsm8k:
            return Check(checks.GSM8K, False if self._settings.gsm8k == "on" else None, self._why_no_gsm8k)
        return checks.judge_gsm8k(expected.gsm8k, self._gsm8k(url, "router"))

    def _gsm8k(self, url: str, name: str) -> float:
        self._say(f"gsm8k, {self._settings.gsm8k_limit} questions, {name}")
        served = self._fleet.baseline.served_name
        return scores.gsm8k(url, served, self._model, self._settings, self._log_dir, name)

    # Servers.

    def _start(self, spec: EngineSpec) -> Engine:
        engine = Engine(spec, self._log_dir)
        self._enter(engine)
        self._say(f"start {engine.name} on {spec.device} {','.join(spec.devices)}, {engine.base_url}")
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
