"""What an agent's calls raise, by what the caller can do about it. Texts hold no ids, keys or codes."""

from __future__ import annotations

from protocol import ntf_commands as ntf
from protocol import smp_messages as smp
from protocol.errors import INTERNAL, QUOTA, ErrorType
from smp_client.errors import CannotSend, ClientError, WrongIdentity


class AgentError(Exception):
    """Base of every error this package raises."""


class Temporary(AgentError):
    """The network or a server is not well: the same call may succeed later. What was asked for is kept."""


class Refused(AgentError):
    """A server said no, and will say so again; `error` is its word."""

    def __init__(self, error: ErrorType) -> None:
        super().__init__(f"the server refused: {error}")
        self.error = error


class Unreachable(AgentError):
    """Whoever answers is not the server of the address, or the request cannot be made there."""


class Misused(AgentError):
    """The call makes no sense now: no token yet, no such connection, a text that does not parse."""


class BadPush(AgentError):
    """A push that is not for this device, or not one at all."""


class StoreFailed(AgentError):
    """The state file cannot be used."""


_PASSES = frozenset({INTERNAL, QUOTA})
"Words that a server takes back: it is busy, full or broken."
_STORE = b"STORE "


def failure_of(answer: object) -> AgentError | None:
    """The error in the place of an answer, if there is one."""
    if isinstance(answer, WrongIdentity | CannotSend):
        return Unreachable(str(answer))
    if isinstance(answer, ClientError):
        return Temporary(str(answer) or type(answer).__name__)
    if isinstance(answer, ntf.Err | smp.Err):
        passes = answer.error in _PASSES or answer.error.text.startswith(_STORE)
        return Temporary(f"the server answered {answer.error}") if passes else Refused(answer.error)
    return None
