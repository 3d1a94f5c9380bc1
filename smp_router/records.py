"""Where a router keeps what must survive its process. Memory alone keeps nothing, and is the default."""

from __future__ import annotations

from enum import Enum
from typing import Any, Protocol


class Kind(Enum):
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


class Records(Protocol):
    """Told of every change at once, so that the last state of each key is what counts."""

    def put(self, kind: Kind, key: Any, thing: Any) -> None:
        """`thing` is new or has changed. It is read when it is written, so it may change further."""

    def delete(self, kind: Kind, key: Any) -> None: ...

    @property
    def failing(self) -> bool:
        """Nothing can be written at present: promise nothing more."""

    @property
    def made(self) -> int:
        """How many changes there were."""

    async def durable(self, made: int) -> None:
        """Wait until so many changes are safe."""

    async def maintain(self) -> None:
        """From time to time: leave no traces of what is gone."""

    async def close(self) -> None: ...


class NoRecords:
    """The router lives in memory."""

    failing = False
    made = 0

    def put(self, kind: Kind, key: Any, thing: Any) -> None:
        pass

    def delete(self, kind: Kind, key: Any) -> None:
        pass

    async def durable(self, made: int) -> None:
        pass

    async def maintain(self) -> None:
        pass

    async def close(self) -> None:
        pass
