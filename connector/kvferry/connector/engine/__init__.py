"""The engine that this connector belongs to: its facts, its fingerprint, its own params and prompts."""
