"""Where a router keeps what must survive its process. Memory alone keeps nothing, and is the default."""

from __future__ import annotations

from enum import Enum
from typing import Any


class RecordKind(Enum):
    """What is kept, and by which key."""

    QUEUE = "queues"
    "By recipient id."
    MESSAGE = "messages"
    "By number: (recipient id, message, correlation id of its SEND)."
    NMSGS = "nmsgs"
    "By notifier id: the notifier, with what nobody has taken yet."
    SERVICE = "services"
    "By fingerprint and role."
    ASSOCIATION = "associations"
    "By queue id: the service it belongs to."


class Records:
    """Told of every change at once, so that the last state of each key is what counts.

    This one keeps nothing: the router lives in memory.
    """

    place = "memory"
    failing = False
    "Nothing can be written at present: promise nothing more."
    made = 0
    "How many changes there were."

    def put(self, kind: RecordKind, key: Any, thing: Any) -> None:
        """`thing` is new or has changed. It is read when it is written, so it may change further."""

    def delete(self, kind: RecordKind, key: Any) -> None:
        """There is none any more."""

    async def durable(self, made: int) -> None:
        """Wait until so many changes are safe."""

    async def maintain(self) -> None:
        """From time to time: leave no traces of what is gone."""
