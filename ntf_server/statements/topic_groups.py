"""Which topics share a subscription of the node. Pure.

A subscription takes at most so many topics and cannot be changed, only made anew. So a change touches as few
groups as it can: a topic goes where there is room, groups that became small are joined.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from protocol.hiding import hides_bytes

MAX_GROUP = 128
"Topics in one subscription, as the node allows."

Topic = bytes


@hides_bytes
@dataclass(slots=True)
class GroupChanges:
    """Groups to be subscribed, and groups whose subscription ends after that: no topic is ever unwatched."""

    started: list[frozenset[Topic]] = field(default_factory=list)
    ended: list[frozenset[Topic]] = field(default_factory=list)


class TopicGroups:
    """The groups as they are; `change` makes and tells the next ones."""

    def __init__(self, size: int = MAX_GROUP) -> None:
        self._size = size
        self.groups: set[frozenset[Topic]] = set()

    def __len__(self) -> int:
        return sum(map(len, self.groups))

    @property
    def topics(self) -> frozenset[Topic]:
        return frozenset().union(*self.groups)

    def set(self, topics: Iterable[Topic]) -> GroupChanges:
        """From now on exactly these."""
        wanted = frozenset(topics)
        before = set(self.groups)
        kept = {group: group & wanted for group in before}
        missing = sorted(wanted - self.topics)
        parts = _joined([part for part in kept.values() if part], self._size)
        self.groups = _filled(parts, missing, self._size)
        return GroupChanges(
            started=sorted(self.groups - before, key=sorted), ended=sorted(before - self.groups, key=sorted)
        )


def _joined(parts: list[frozenset[Topic]], size: int) -> list[frozenset[Topic]]:
    """At most one group is less than half full."""
    small = sorted(
        (part for part in parts if len(part) * 2 < size), key=lambda part: (len(part), sorted(part))
    )
    full = [part for part in parts if len(part) * 2 >= size]
    joined: list[frozenset[Topic]] = []
    for part in small:
        if joined and len(joined[-1]) * 2 < size:
            joined[-1] |= part
        else:
            joined.append(part)
    return full + joined


def _filled(parts: list[frozenset[Topic]], missing: list[Topic], size: int) -> set[frozenset[Topic]]:
    """New topics go into the emptiest group first: it is the cheapest to subscribe anew."""
    groups: set[frozenset[Topic]] = set()
    for part in sorted(parts, key=lambda part: (len(part), sorted(part))):
        room = size - len(part)
        groups.add(part | frozenset(missing[:room]))
        missing = missing[room:]
    groups |= {frozenset(missing[start : start + size]) for start in range(0, len(missing), size)}
    return groups
