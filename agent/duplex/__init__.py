"""Connections of two people: handshake, ratchet, delivery, rotation, over any SMP routers."""
