"""Error codes as they stand on the wire, and the exceptions that carry them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ErrorType:
    """What follows `ERR `: the text exactly as sent."""

    text: bytes

    def __str__(self) -> str:
        return self.text.decode("ascii", "backslashreplace")

    @property
    def word(self) -> str:
        """The kind of the error: its first word."""
        return str(self).partition(" ")[0]

    @property
    def without_text(self) -> str:
        """Only what the protocol fixes: fit for logs and for others, whatever the peer wrote behind it."""
        word, _, rest = str(self).partition(" ")
        if word in _WITH_TEXT:
            return word
        return f"{word} {rest.partition(',')[0]}".rstrip()


_WITH_TEXT = frozenset({"STORE", "PROXY", "NAME"})
"Errors that end in free text."

BLOCK = ErrorType(b"BLOCK")
SESSION = ErrorType(b"SESSION")
CMD_UNKNOWN = ErrorType(b"CMD UNKNOWN")
CMD_SYNTAX = ErrorType(b"CMD SYNTAX")
CMD_PROHIBITED = ErrorType(b"CMD PROHIBITED")
CMD_NO_AUTH = ErrorType(b"CMD NO_AUTH")
CMD_HAS_AUTH = ErrorType(b"CMD HAS_AUTH")
CMD_NO_ENTITY = ErrorType(b"CMD NO_ENTITY")
AUTH = ErrorType(b"AUTH")
SERVICE = ErrorType(b"SERVICE")
QUOTA = ErrorType(b"QUOTA")
NO_MSG = ErrorType(b"NO_MSG")
LARGE_MSG = ErrorType(b"LARGE_MSG")
INTERNAL = ErrorType(b"INTERNAL")
CRYPTO = ErrorType(b"CRYPTO")
NO_SERVICE = ErrorType(b"NO_SERVICE")
NAME_NO_RESOLVER = ErrorType(b"NAME NO_RESOLVER")
PROXY_BASIC_AUTH = ErrorType(b"PROXY BASIC_AUTH")
PROXY_NO_SESSION = ErrorType(b"PROXY NO_SESSION")


def proxy_protocol_error(error: ErrorType) -> ErrorType:
    """What the destination answered to a proxy, as the proxy's client sees it."""
    return ErrorType(b"PROXY PROTOCOL " + error.text)


def proxy_broker_error(text: bytes) -> ErrorType:
    """Why a proxy got no answer from the destination."""
    return ErrorType(b"PROXY BROKER " + text)


PROXY_TIMEOUT = proxy_broker_error(b"TIMEOUT")

SERVICE_ERRORS = (SERVICE, NO_SERVICE, proxy_broker_error(b"NO_SERVICE"))
"All say that the router does not know the service, so that queues are subscribed one by one."

MAX_STORE_TEXT = 200
"Keeps an `ERR STORE …` answer inside one NTF block."


def store_error(text: str) -> ErrorType:
    return ErrorType(b"STORE " + text.encode("ascii", "replace")[:MAX_STORE_TEXT])


class ProtocolError(Exception):
    """The peer sent something it should not have; `error` is the answer it deserves."""

    def __init__(self, error: ErrorType) -> None:
        super().__init__(str(error))
        self.error = error


class DecodeError(ProtocolError):
    """Bytes that do not parse. Never says what the bytes were: they may hold keys."""

    def __init__(self, error: ErrorType = BLOCK) -> None:
        super().__init__(error)


class TooLarge(ProtocolError):
    """A message of ours does not fit in a block."""

    def __init__(self) -> None:
        super().__init__(LARGE_MSG)


@dataclass(frozen=True, slots=True)
class HandshakeErrorType:
    """The error set of the handshake layer, as text: `VERSION`, `HANDSHAKE IDENTITY`…"""

    text: bytes

    def __str__(self) -> str:
        return self.text.decode("ascii")


TE_BLOCK = HandshakeErrorType(b"BLOCK")
TE_VERSION = HandshakeErrorType(b"VERSION")
TE_LARGE_MSG = HandshakeErrorType(b"LARGE_MSG")
TE_SESSION = HandshakeErrorType(b"SESSION")
TE_NO_AUTH = HandshakeErrorType(b"NO_AUTH")
TE_PARSE = HandshakeErrorType(b"HANDSHAKE PARSE")
TE_IDENTITY = HandshakeErrorType(b"HANDSHAKE IDENTITY")
TE_BAD_AUTH = HandshakeErrorType(b"HANDSHAKE BAD_AUTH")
TE_BAD_SERVICE = HandshakeErrorType(b"HANDSHAKE BAD_SERVICE")

HANDSHAKE_ERRORS = {
    e.text: e
    for e in (
        TE_BLOCK,
        TE_VERSION,
        TE_LARGE_MSG,
        TE_SESSION,
        TE_NO_AUTH,
        TE_PARSE,
        TE_IDENTITY,
        TE_BAD_AUTH,
        TE_BAD_SERVICE,
    )
}


class HandshakeError(Exception):
    """The handshake ends here; `error` says why in the protocol's words."""

    def __init__(self, error: HandshakeErrorType) -> None:
        super().__init__(str(error))
        self.error = error
