"""`kvferry doctor`: what is wrong with this machine, and what to type.

Gathering and judging are apart: functions named `gather_…` read the machine and give frozen facts, the others are pure
functions from facts to findings, and are tested with made-up facts. Nothing here needs vLLM, torch or NIXL to run.
"""
