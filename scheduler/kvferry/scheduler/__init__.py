"""The ledger of requests: leases on the producing side, loads on the consuming side, and the side channel between.

The ledgers do no I/O and read no clock. Needs msgspec, numpy and pyzmq; no torch, no NIXL, no vLLM.
"""
