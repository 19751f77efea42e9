"""Memory of another process of this host, mapped into this one."""
