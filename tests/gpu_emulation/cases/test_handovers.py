"""Two engines on the emulated GPU hand over as one engine would answer alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.gpu_emulation.engines import NOISE, Settings, Trio, graph_replays

Differs = Callable[[float], float]

SMALL = Settings()
LARGE = Settings(block_size=64)
NHD = Settings(layout="NHD")
HND = Settings(layout="HND")
FLASH = Settings(backend="", dtype="bfloat16")


def test_full_attention(logs: Path, differs: Differs) -> None:
    with ExitStack() as running:
        trio = Trio.start(running, logs, "full", "small-llama-4", SMALL)
        assert differs(trio.worst_difference((17,))) < NOISE
        assert "Using V2 Model Runner" in trio.consumer.log_path.read_text()


@pytest.mark.parametrize(
    ("producer", "consumer"),
    [
        pytest.param(SMALL, LARGE, id="blocks of 16 to 64"),
        pytest.param(LARGE, SMALL, id="blocks of 64 to 16"),
        pytest.param(NHD, HND, id="NHD to HND"),
        pytest.param(HND, NHD, id="HND to NHD"),
    ],
)
def test_unequal_caches(
    producer: Settings, consumer: Settings, logs: Path, differs: Differs
) -> None:
    with ExitStack() as running:
        name = f"{producer.block_size}{producer.layout}-{consumer.block_size}{consumer.layout}"
        trio = Trio.start(running, logs, name, "small-llama-4", producer, consumer)
        assert differs(trio.worst_difference((17, 70))) < NOISE
        for engine, layout in (
            (trio.producer, producer.layout),
            (trio.consumer, consumer.layout),
        ):
            log = engine.log_path.read_text()
            assert not layout or {"NHD": "LBNHC", "HND": "LBHNC"}[layout] in log


def test_first_model_runner(logs: Path, differs: Differs) -> None:
    first = Settings(environment={"VLLM_USE_V2_MODEL_RUNNER": "0"})
    with ExitStack() as running:
        trio = Trio.start(running, logs, "first", "small-llama-4", first)
        assert differs(trio.worst_difference((17,))) < NOISE
        assert "Using V2 Model Runner" not in trio.consumer.log_path.read_text()


def test_flash_attention(logs: Path, differs: Differs) -> None:
    """vLLM's own choice on Hopper. Its kernel is torch's here, its cache is its own."""
    with ExitStack() as running:
        trio = Trio.start(running, logs, "flash", "small-llama-4", FLASH)
        assert differs(trio.worst_continuation((17,))) == 0
        assert "FLASH_ATTN" in trio.consumer.log_path.read_text()


def test_latent_attention(logs: Path, differs: Differs) -> None:
    mla = Settings(backend="TRITON_MLA", dtype="float16")
    with ExitStack() as running:
        trio = Trio.start(running, logs, "mla", "small-mla", mla)
        assert differs(trio.worst_continuation((17,))) == 0


def test_sliding_window(logs: Path, differs: Differs) -> None:
    with ExitStack() as running:
        trio = Trio.start(running, logs, "window", "small-windowed", SMALL)
        assert differs(trio.worst_difference((150,))) < NOISE


def test_mamba_2(logs: Path, differs: Differs) -> None:
    with ExitStack() as running:
        trio = Trio.start(running, logs, "mamba2", "small-mamba2-hybrid", SMALL)
        assert differs(trio.worst_difference((40,))) < NOISE


def test_gated_delta_net(logs: Path, differs: Differs) -> None:
    """Its kernels refuse float32."""
    triton = {"additional_config": {"gdn_prefill_backend": "triton"}}
    gdn = Settings(dtype="float16", engine_args=triton)
    with ExitStack() as running:
        trio = Trio.start(running, logs, "gdn", "small-gdn-hybrid", gdn)
        assert differs(trio.worst_continuation((40,))) == 0


def test_cuda_graphs(logs: Path, differs: Differs) -> None:
    """Decoding steps are replayed; what the connector does beside them keeps its order."""
    graphs = Settings(
        engine_args={
            "enforce_eager": False,
            # Triton's interpreter does not know one of the kernels that would be tried.
            "kernel_config": {"enable_jit_warmup": False},
            "compilation_config": {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [1],
            },
        }
    )
    with ExitStack() as running:
        trio = Trio.start(running, logs, "graphs", "small-llama-4", graphs, alone=SMALL)
        assert differs(trio.worst_difference((17,))) < NOISE
        assert graph_replays(trio.consumer) >= 3
