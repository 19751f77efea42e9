"""In-memory stand-ins for the ports of kvferry; each passes the conformance suite of its port."""
