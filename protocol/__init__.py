"""The wire: bytes in, values out. No sockets, no clock, no randomness of its own."""
