"""An engine around vLLM's real scheduler: real worker sides, real NIXL, and a toy model in place of a real one."""
