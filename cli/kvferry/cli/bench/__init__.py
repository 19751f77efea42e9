"""`kvferry bench`: a benchmark of the fabric between two machines, before an engine is started.

    listener            owner (its child)         client              reader (its child)
    ZMQ, no NIXL        NIXL, seeded memory       ZMQ, no NIXL        NIXL, reads and compares

NIXL and UCX can abort or hang a process, also through the metadata that a peer sends. So only the children use them: a
listener outlives any owner, and a client always reports the error. An owner serves one client and then ends.
"""
