"""`kvferry bench`: a benchmark of the fabric between two machines, before an engine is started.

    listener ── its owner (child)          client ── its reader (child)
    ZMQ, no NIXL                           ZMQ, no NIXL

An owner serves one client and then ends (`kvferry.cli.transfer`).
"""
