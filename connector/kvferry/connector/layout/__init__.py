"""Layout discovery: from the cache tensors that vLLM registers to paged tensors."""
