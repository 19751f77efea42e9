"""The side channel between engines, both ends: hosts, secrets and sockets, the client, the listener.

Used by schedulers, workers and commands. It knows no ledger: what it is to do comes as commands, what it hears goes to
callbacks. Needs msgspec and pyzmq.
"""
