"""The side channel, as both ends need it: sockets, shared secrets, trials of keys, backoff between attempts."""
