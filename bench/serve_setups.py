"""The setups that are compared: which engines, with which connector, and whether a router stands in front."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from scripts.accuracy.engines import Engine, EngineSpec, Router, Transfer
from scripts.accuracy.settings import STOCK

START_S = 300.0


@dataclass(frozen=True, slots=True)
class Setup:
    """One of the compared setups.

    Attributes:
        module: of the connector; empty for a single engine without one.
        title: for people.
    """

    name: str
    title: str
    module: str = ""


SINGLE = Setup("single", "one engine, no connector")
KVFERRY = Setup("kvferry", "kvferry", "kvferry.connector")
CALM = Setup("calm", "NixlConnector, thread event-driven", "bench.stock_calm")
SHIPPED = Setup("stock", "NixlConnector as shipped", STOCK)
SETUPS = (SINGLE, KVFERRY, CALM, SHIPPED)


@dataclass(frozen=True, slots=True)
class Running:
    """A setup's servers. Of a single engine, producer and consumer are that engine, and `url` is its own."""

    producer: Engine
    consumer: Engine
    url: str

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Each engine once."""
        return (self.producer,) if self.producer is self.consumer else (self.producer, self.consumer)


def specs_of(setup: Setup, model: str) -> tuple[EngineSpec, ...]:
    """One core for every engine, the single one included: the one that the decoder has in the others."""
    if not setup.module:
        return (_spec("single", model, "1"),)
    return (
        _spec(f"{setup.name}-producer", model, "0", Transfer("kv_producer", setup.module)),
        _spec(f"{setup.name}-consumer", model, "1", Transfer("kv_consumer", setup.module)),
    )


def _spec(name: str, model: str, core: str, transfer: Transfer | None = None) -> EngineSpec:
    return EngineSpec(name, model, devices=(core,), transfer=transfer)


@contextmanager
def started(setup: Setup, model: str, logs: Path, timeout_s: float) -> Iterator[Running]:
    """Start a setup and end it; all of its servers are ready in the body."""
    with ExitStack() as stack:
        engines = start_all(stack, specs_of(setup, model), logs)
        if len(engines) == 1:
            yield Running(engines[0], engines[0], engines[0].base_url)
            return
        producer, consumer = engines
        router = stack.enter_context(Router([producer.base_url], [consumer.base_url], logs / setup.name, timeout_s))
        router.wait_ready(60)
        yield Running(producer, consumer, router.base_url)


def start_all(stack: ExitStack, specs: Sequence[EngineSpec], logs: Path) -> list[Engine]:
    """Start engines together, to be ended with the stack, and wait until all are ready."""
    engines = [stack.enter_context(Engine(spec, logs)) for spec in specs]
    for engine in engines:
        engine.wait_ready(START_S)
    return engines


def short(error: Exception) -> str:
    """An error in a line."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' … '.join([*lines[:1], *lines[-3:]] if len(lines) > 4 else lines)}"[:1000]
