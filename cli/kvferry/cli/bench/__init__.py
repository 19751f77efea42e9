"""`kvferry bench`: what a fabric between two machines does, before an engine is started.

    listener            owner (its child)         client              reader (its child)
    ZMQ, no NIXL        NIXL, seeded memory       ZMQ, no NIXL        NIXL, reads and compares

NIXL and UCX can abort or hang a process, and can be made to by whoever sends them metadata. So they are only in the
children: a listener outlives any owner, and a client always says what went wrong. An owner serves one client and ends,
with its memory.
"""
