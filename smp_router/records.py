"""Where a router keeps what must survive its process. Memory alone keeps nothing, and is the default."""

from __future__ import annotations

from enum import Enum
from typing import Any, Protocol


class Kind(Enum):
    """What is kept, and by which key."""

    QUEUE = "queues"
    "By recipient id."
    MESSAGE = "messages"
    "By number: (recipient id, message)."
    NMSGS = "nmsgs"
    "By notifier id: the notifier, with what nobody has taken yet."
    SERVICE = "services"
    "By fingerprint and role."
    ASSOCIATION = "associations"
    "By queue id: the service it belongs to."


class Records(Protocol):
    """Told of every change at once, so that the last state of each key is what counts."""

    def put(self, kind: Kind, key: Any, thing: Any) -> None:
        """`thing` is new or has changed. It is read when it is written, so it may change further."""

    def delete(self, kind: Kind, key: Any) -> None: ...

    @property
    def failing(self) -> bool:
        """Nothing can be written at present: promise nothing more."""

    async def durable(self) -> None:
        """Wait until everything that was put and deleted so far is safe."""


class NoRecords:
    """The router lives in memory."""

    failing = False

    def put(self, kind: Kind, key: Any, thing: Any) -> None:
        pass

    def delete(self, kind: Kind, key: Any) -> None:
        pass

    async def durable(self) -> None:
        pass
