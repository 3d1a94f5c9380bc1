"""Why a ratchet message cannot be read or written; each class is one word of the protocol."""

from __future__ import annotations

from typing import ClassVar


class RatchetError(Exception):
    """Never says more than the class and a count: messages hold secrets."""

    word: ClassVar[str]
    "What applications are told."


class MalformedMessage(RatchetError):
    """The bytes do not parse, or a header that opens does not."""

    word = "A_MESSAGE"


class UnknownHeader(RatchetError):
    """No header key opens it."""

    word = "A_CRYPTO RATCHET_HEADER"


class BodyNotOpened(RatchetError):
    """The header opens and the body does not."""

    word = "A_CRYPTO DECRYPT_AES"


class DuplicateMessage(RatchetError):
    """The last message of this chain came again."""

    word = "A_DUPLICATE"


class EarlierMessage(RatchetError):
    """`count` behind the last one, and its key is gone."""

    word = "A_CRYPTO RATCHET_EARLIER"

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} messages earlier")
        self.count = count


class TooManySkipped(RatchetError):
    """More messages are missing than keys may be kept for."""

    word = "A_CRYPTO RATCHET_SKIPPED"

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} messages skipped")
        self.count = count


class NoSendingChain(RatchetError):
    """A receiving ratchet cannot send before it has received."""

    word = "INTERNAL"


class KemStateError(RatchetError):
    """The peer accepted a key that we did not propose."""

    word = "INTERNAL KEM state"


class LinkError(Exception):
    """A_LINK: the data that a router keeps for a short link is not what the link's owner put there."""
