"""One worker: its memory, its lease table, its reads. Needs torch and NIXL; no vLLM."""
