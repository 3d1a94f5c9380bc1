"""When a ratchet has to be made anew, and who of two sends first then."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from protocol.agent.errors import BodyNotOpened, EarlierMessage, TooManySkipped, UnknownHeader
from protocol.crypto import BoxError


class SyncState(Enum):
    OK = "ok"
    ALLOWED = "allowed"
    REQUIRED = "required"
    STARTED = "started"
    "Our keys were sent."
    AGREED = "agreed"
    "Both keys are known, the ratchet is new."

    @property
    def may_send(self) -> bool:
        return self in (SyncState.OK, SyncState.ALLOWED)

    @property
    def may_start(self) -> bool:
        return self in (SyncState.ALLOWED, SyncState.REQUIRED)

    def after_error(self, error: Exception) -> SyncState:
        """Errors while a synchronisation is under way are of the old ratchet."""
        if self in (SyncState.STARTED, SyncState.AGREED):
            return self
        return SYNC_STATES.get(type(error), self)

    def after_success(self) -> SyncState:
        """A message that opens proves the ratchet, but for messages on the way when our keys were sent."""
        return self if self is SyncState.STARTED else SyncState.OK


SYNC_STATES: Mapping[type[Exception], SyncState] = {
    BoxError: SyncState.ALLOWED,
    BodyNotOpened: SyncState.ALLOWED,
    EarlierMessage: SyncState.ALLOWED,
    UnknownHeader: SyncState.REQUIRED,
    TooManySkipped: SyncState.REQUIRED,
}
"What an error makes of the state."


def sends_first(own_hash: bytes, peer_hash: bytes) -> bool:
    """Whether ours becomes the sending ratchet; with equal keys both would wait to receive."""
    return own_hash > peer_hash
