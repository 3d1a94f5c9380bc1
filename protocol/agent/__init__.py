"""What two agents say to each other through queues: links, handshake, double ratchet, messages."""
