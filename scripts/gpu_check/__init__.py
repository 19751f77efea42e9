"""The GPU check: everything that a node with GPUs can show of kvferry, part by part, and one report of it.

`parts` is the table of parts and says which can run here, `machine` looks at GPUs and their memory, `running` runs a
part in processes of its own, `judging` judges what it left, `report` shows and writes. `backends` is a part: the cache
probe on every attention backend. `python -m scripts.gpu_check --list` shows the parts.
"""
