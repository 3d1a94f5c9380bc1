"""Why a ratchet message cannot be read or written; each class is one word of the protocol."""

from __future__ import annotations


class RatchetError(Exception):
    """Never says more than the class and a count: messages hold secrets."""


class MalformedMessage(RatchetError):
    """A_MESSAGE: the bytes do not parse, or a header that opens does not."""


class UnknownHeader(RatchetError):
    """RATCHET_HEADER: no header key opens it."""


class BodyNotOpened(RatchetError):
    """DECRYPT_AES: the header opens and the body does not."""


class DuplicateMessage(RatchetError):
    """The last message of this chain came again."""


class EarlierMessage(RatchetError):
    """RATCHET_EARLIER: `count` behind the last one, and its key is gone."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} messages earlier")
        self.count = count


class TooManySkipped(RatchetError):
    """RATCHET_SKIPPED: more messages are missing than keys may be kept for."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} messages skipped")
        self.count = count


class NoSendingChain(RatchetError):
    """A receiving ratchet cannot send before it has received."""


class KemStateError(RatchetError):
    """The peer accepted a key that we did not propose."""


class LinkError(Exception):
    """A_LINK: the data that a router keeps for a short link is not what the link's owner put there."""
