"""Every published figure comes from a script here; see README.md."""
