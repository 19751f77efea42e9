"""The GPU check: everything that a node with GPUs can show of kvferry, part by part, and one report of it.

`parts` is the table of parts and says on which GPUs each can run, `running` runs and judges one. `backends` is a part:
the cache probe on every attention backend. `pins` finds what is installed in other versions than vLLM pins.
`python -m scripts.gpu_check --list` shows the parts.
"""
