"""What goes wrong. Texts are one line for people, and hold no ids, keys or codes."""

from __future__ import annotations


class AgentError(Exception):
    """Base of every error this package raises."""


class Stopped(Exception):
    """The agent has ended; leaving `open_duplex` tells why."""


class Misused(AgentError):
    """The command makes no sense here: nothing to work with, a file that cannot be read."""


class Prohibited(AgentError):
    """The call makes no sense in this state."""


class LinkRefused(AgentError):
    """The router refuses to create the queue of a prepared link: the link will never work."""


class NoConnection(AgentError):
    """There is no such connection, or it is being deleted."""

    def __init__(self) -> None:
        super().__init__("there is no such connection")


class MessageTooLarge(AgentError):
    """It does not fit into a message of the connection."""

    def __init__(self) -> None:
        super().__init__("the message is too long")


class BadPush(AgentError):
    """A push that is not for this device, or not one at all."""


# What a peer did wrong, in the words that the application sees

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
