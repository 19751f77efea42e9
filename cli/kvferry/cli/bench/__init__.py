"""`kvferry bench`: a benchmark of the fabric between two machines, before an engine is started.

    listener ── its owner (child)          client ── its reader (child)
    ZMQ, no NIXL                           ZMQ, no NIXL

A listener serves one client and then ends, as its owner does (`kvferry.cli.transfer`).
"""
