"""vllm-router, which sends each prompt to a prefill engine and then to a decode engine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.accuracy.ports import free_ports
from scripts.accuracy.processes import Server


class Router(Server):
    """The router in front of some prefill and some decode engines."""

    def __init__(
        self,
        prefill: Sequence[str],
        decode: Sequence[str],
        log_dir: Path,
        timeout_s: float,
        more: Sequence[str] = (),
    ) -> None:
        port, prometheus_port = free_ports(2)
        command = [str(Path(sys.executable).parent / "vllm-router"), "--vllm-pd-disaggregation"]
        command += ["--kv-connector", "nixl", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(prometheus_port)]
        command += ["--policy", "round_robin", "--disable-retries", "--request-timeout-secs", str(int(timeout_s))]
        command += [part for url in prefill for part in ("--prefill", url)]
        command += [part for url in decode for part in ("--decode", url)]
        command += more
        super().__init__("vllm-router", command, f"http://127.0.0.1:{port}", log_dir / "router.log", {"NO_COLOR": "1"})

    def __enter__(self) -> Router:
        self.start()
        return self
