"""What a peer did wrong, in the words that the application sees."""

from __future__ import annotations

A_MESSAGE = "A_MESSAGE"
A_PROHIBITED = "A_PROHIBITED"
A_VERSION = "A_VERSION"
A_QUEUE = "A_QUEUE"
A_DUPLICATE = "A_DUPLICATE"
A_LINK = "A_LINK"
INTERNAL = "INTERNAL"
NOT_AVAILABLE = "CONN NOT_AVAILABLE"
NOT_ACCEPTED = "CONN NOT_ACCEPTED"


class PeerFault(Exception):
    """The message is acknowledged, an event says why, and nothing else changes."""

    def __init__(self, word: str, detail: str = "") -> None:
        super().__init__(f"{word} {detail}".strip())
