"""`kvferry doctor`: checks of this machine, with a remedy for each problem.

Gathering and judging are separate: functions named `gather_…` read the machine and return frozen facts, the others are
pure functions from facts to findings, tested with invented facts. Nothing here needs vLLM, torch or NIXL to run.
"""
