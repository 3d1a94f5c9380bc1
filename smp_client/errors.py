"""What can go wrong with a peer, sorted by what happens next. Texts hold no ids, keys or contents."""

from __future__ import annotations

from protocol.errors import HandshakeErrorType


class ClientError(Exception):
    """Base of every error this package raises or returns for a request."""


class ConnectFailed(ClientError):
    """Nobody answered at any of the peer's hosts, or not in time: try again later."""


class WrongIdentity(ClientError):
    """Whoever answers is not the pinned server: a wrong address or an impostor. Never retry quietly."""


class HandshakeFailed(ClientError):
    """The peer answered, but no session was agreed on; `error` is the reason in the protocol's words."""

    def __init__(self, error: HandshakeErrorType) -> None:
        super().__init__(f"the handshake failed: {error}")
        self.error = error


class SessionClosed(ClientError):
    """The connection ended before the answer came: ask again in another session."""


class PeerMisbehaves(ClientError):
    """The peer sent too much that nobody asked for: leave it in peace for a while."""

    def __init__(self) -> None:
        super().__init__("the peer sends too much that nobody asked for")


class RequestTimeout(ClientError):
    """The peer is there, but did not answer this request in time."""


class BadAnswer(ClientError):
    """The answer makes no sense as an answer to the request, or could not be read."""


class CannotSend(ClientError):
    """The request cannot be made in this session: too large, or its key is of no use to this peer."""
