"""The metrics of an engine under load: vLLM's own front end and registry, and a load that covers everything.

Each scrape finds one step more: all counters and histograms of kvferry have grown, under every label.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
from prometheus_client import REGISTRY, generate_latest
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import SchedulerStats

from kvferry.connector.metrics.stats import FerryStats
from kvferry.connector.metrics.tables import COUNTERS, GAUGES, HISTOGRAMS, PEER
from tests.harness.core.configs import vllm_config

ENGINES = (0, 1)
_OFTEN = {"leases_opened": 100, "turns_opened": 100, "loads": 100}
"""More are opened than end, and most loads are good."""
_PEERS = ("10.0.0.1:5600", "prefill-1.example:5600")


def one_step() -> FerryStats:
    """Everything that can be counted, measured or held."""
    labels = {
        name: (*spec.values, *_PEERS) if spec.label == PEER else spec.values or ("",) for name, spec in COUNTERS.items()
    }
    counts = {(name, label): _OFTEN.get(name, 2.0) for name in COUNTERS for label in labels[name]}
    samples = {name: list(shape.buckets[3:9]) for name, shape in HISTOGRAMS.items()}
    reported = FerryStats.of_counts(counts, samples, dict.fromkeys(GAUGES, 3.0))
    assert reported is not None
    return reported


@contextmanager
def loaded_engine() -> Iterator[int]:
    """Serves `/metrics` of two engines of one server; gives the port."""
    front_end = PrometheusStatLogger(vllm_config("NixlConnector", module="kvferry.connector"), list(ENGINES))
    sent = msgspec.msgpack.encode(one_step().to_dict())

    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            for engine in ENGINES:
                stats = SchedulerStats(kv_cache_usage=0.4, kv_connector_stats=msgspec.msgpack.decode(sent))
                front_end.record(scheduler_stats=stats, iteration_stats=None, engine_idx=engine)
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.end_headers()
            self.wfile.write(generate_latest(REGISTRY))

        def log_message(self, *_: object) -> None:
            """Nothing: there are four a second."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Metrics)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        unregister_vllm_metrics()
