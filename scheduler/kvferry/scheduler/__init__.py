"""The ledger of requests: leases on the producing side, loads on the consuming side.

The ledgers do no I/O and read no clock. Needs msgspec and numpy; no torch, no NIXL, no vLLM.
"""
