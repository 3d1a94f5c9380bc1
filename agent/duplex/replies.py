"""What an answer of a server means for whoever asked: go on, try again, or give up."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from agent.errors import AgentError
from protocol import ntf_commands as ntf
from protocol.errors import QUOTA, ErrorType
from protocol.smp_messages import Err
from smp_client.errors import CannotSend, ClientError, HandshakeFailed, WrongIdentity

T = TypeVar("T")


class RouterFailure(AgentError):
    """No answer that could be used; the text is for people."""


class TemporaryFailure(RouterFailure):
    """The network, or a router that is busy: the same will work later."""


class HostFailure(RouterFailure):
    """Somebody else answers there, or no version is common: it may take long."""


class RouterRefused(RouterFailure):
    """The router said no, and will say so again."""

    def __init__(self, error: ErrorType, protocol: str = "SMP") -> None:
        super().__init__(f"{protocol} {error}")
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


async def answer_to(asking: Awaitable[T]) -> T:
    """The answer to one command; raises RouterFailure for none and for `ERR`."""
    try:
        answer = await asking
        failure = failure_of(answer)
    except ClientError as error:
        failure = failure_of(error)
    if failure is not None:
        raise failure
    return answer


def failure_of(answer: object) -> RouterFailure | None:
    """What the answer of a router or a notification server means, if it is an error."""
    if isinstance(answer, WrongIdentity | HandshakeFailed):
        return HostFailure(str(answer))
    if isinstance(answer, CannotSend):
        return RouterRefused(ErrorType(b"LARGE_MSG"))
    if isinstance(answer, ClientError):
        return TemporaryFailure(str(answer) or type(answer).__name__)
    if isinstance(answer, Err):
        return _failure(answer.error, "SMP")
    if isinstance(answer, ntf.Err):
        return TemporaryFailure(f"NTF {QUOTA}") if answer.error == QUOTA else _failure(answer.error, "NTF")
    return None


def _failure(error: ErrorType, protocol: str) -> RouterFailure:
    if error.text.startswith(_TEMPORARY):
        return TemporaryFailure(f"{protocol} {error}")
    if error.text.startswith(_HOST):
        return HostFailure(f"{protocol} {error}")
    return RouterRefused(error, protocol)
