"""What every rank of `gather_rank` needs, imported once: the server that ranks are forked from imports this module."""

from __future__ import annotations

import logging

from vllm.config import VllmConfig
from vllm.distributed import parallel_state

import kvferry.connector.facts
import kvferry.connector.gather

__all__ = ["CONFIG", "kvferry", "parallel_state"]

logging.disable(logging.WARNING)
CONFIG = VllmConfig()
"""Making it imports the greater part of vLLM."""
