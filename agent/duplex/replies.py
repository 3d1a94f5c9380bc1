"""What an answer of a router means for whoever asked: go on, try again, or give up."""

from __future__ import annotations

from protocol.errors import ErrorType
from protocol.smp_messages import Err, SmpMessage
from smp_client.errors import CannotSend, ClientError, HandshakeFailed, WrongIdentity


class RouterFailure(Exception):
    """No answer that could be used; the text is for people."""


class TemporaryFailure(RouterFailure):
    """The network, or a router that is busy: the same will work later."""


class HostFailure(RouterFailure):
    """Somebody else answers there, or no version is common: it may take long."""


class RouterRefused(RouterFailure):
    """The router said no, and will say so again."""

    def __init__(self, error: ErrorType) -> None:
        super().__init__(f"SMP {error}")
        self.error = error


_TEMPORARY = (
    b"INTERNAL",
    b"STORE",
    b"TIMEOUT",
    b"HANDSHAKE BAD_SERVICE",
    b"PROXY NO_SESSION",
    b"PROXY BROKER NETWORK",
    b"PROXY BROKER TIMEOUT",
)
_HOST = (b"PROXY BROKER HOST", b"PROXY BROKER TRANSPORT VERSION")


def checked(answer: SmpMessage | ClientError) -> SmpMessage:
    """The answer, or what its failure means."""
    if isinstance(answer, WrongIdentity | HandshakeFailed):
        raise HostFailure(str(answer))
    if isinstance(answer, CannotSend):
        raise RouterRefused(ErrorType(b"LARGE_MSG"))
    if isinstance(answer, ClientError):
        raise TemporaryFailure(str(answer) or type(answer).__name__)
    if isinstance(answer, Err):
        if answer.error.text.startswith(_TEMPORARY):
            raise TemporaryFailure(f"SMP {answer.error}")
        if answer.error.text.startswith(_HOST):
            raise HostFailure(f"SMP {answer.error}")
        raise RouterRefused(answer.error)
    return answer
