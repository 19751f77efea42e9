"""The local engine: its facts, its fingerprint, its description and the prompts of its requests."""
