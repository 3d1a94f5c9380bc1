"""How much is kept, in all and per creating address, so that nobody can use up the room of others."""

from __future__ import annotations

from dataclasses import dataclass

from smp_router.config import RouterConfig

Creator = int
"A keyed hash of the address that created something. The key dies with the process; neither is stored."


@dataclass(slots=True)
class Holdings:
    """What is kept, or how much may be."""

    queues: int = 0
    links: int = 0
    keys: int = 0
    "Recipient keys beyond the first of each queue."
    message_bytes: int = 0

    @property
    def is_empty(self) -> bool:
        return not (self.queues or self.links or self.keys or self.message_bytes)

    def add(self, other: Holdings) -> None:
        self.queues += other.queues
        self.links += other.links
        self.keys += other.keys
        self.message_bytes += other.message_bytes

    def fits(self, more: Holdings, limits: Holdings) -> bool:
        """Whether what grows stays within its limit."""
        return (
            (more.queues <= 0 or self.queues + more.queues <= limits.queues)
            and (more.links <= 0 or self.links + more.links <= limits.links)
            and (more.keys <= 0 or self.keys + more.keys <= limits.keys)
            and (more.message_bytes <= 0 or self.message_bytes + more.message_bytes <= limits.message_bytes)
        )


class Storage:
    """Counts what is kept. Without a creator, as after a restart, things count in all only."""

    def __init__(self) -> None:
        self.total = Holdings()
        self._by_creator: dict[Creator, Holdings] = {}

    def add(self, creator: Creator | None, change: Holdings) -> None:
        """Count something that was added, or with negative numbers removed."""
        self.total.add(change)
        if creator is None:
            return
        held = self._by_creator.setdefault(creator, Holdings())
        held.add(change)
        if held.is_empty:
            del self._by_creator[creator]

    def fits(self, more: Holdings, config: RouterConfig) -> bool:
        """Whether there is room for more in all."""
        return self.total.fits(more, limits(config))

    def fits_share(self, creator: Creator | None, more: Holdings, config: RouterConfig) -> bool:
        """Whether the creator's share has room for more."""
        held = Holdings() if creator is None else self._by_creator.get(creator, Holdings())
        return creator is None or held.fits(more, shares(config))


def limits(config: RouterConfig) -> Holdings:
    """Of all that is kept."""
    return Holdings(config.max_queues, config.max_links, config.max_recipient_keys, config.max_message_bytes)


def shares(config: RouterConfig) -> Holdings:
    """Of what one address created."""
    percent, of_all = config.address_share_percent, limits(config)
    return Holdings(
        share(of_all.queues, percent),
        share(of_all.links, percent),
        share(of_all.keys, percent),
        share(of_all.message_bytes, percent),
    )


def share(limit: int, percent: int) -> int:
    return -(-limit * percent // 100)
