"""Reads of known content between two child processes, for `kvferry bench` and `kvferry doctor`.

    command                   owner                          reader
    no NIXL, no torch         seeded memory                  reads, compares, measures

NIXL and UCX can abort or hang a process, also through the metadata that a peer sends. So only the children use them: a
command outlives any of them and reports the error. As of an engine, a peer learns the owner's metadata, and the owner
nothing of its reader.
"""
