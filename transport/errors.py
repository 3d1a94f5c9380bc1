"""What can go wrong between two peers, sorted by what the caller should do about it."""

from __future__ import annotations


class TransportError(Exception):
    """Base of every error this package raises itself; network failures stay `OSError`."""


class ConnectionClosed(TransportError):
    """The peer is gone: end of stream, reset, or bytes that are not valid TLS. Reconnecting may help."""


class TlsFailed(TransportError):
    """The TLS handshake was refused by one of the sides."""


class IdentityMismatch(TlsFailed):
    """The peer has another identity than the pinned one: wrong address or impostor. Never retry quietly."""


class ChainInvalid(TlsFailed):
    """The peer's certificate chain has a wrong length, a bad signature, or is out of its validity dates."""


class CertificateFileError(TransportError):
    """A server's certificate file is missing, unreadable or does not fit the others; the message names it."""
