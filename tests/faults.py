"""A store that fails when it is told to, for whoever depends on one of its roles; it tells what was asked."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any, TypeVar, cast

from store.interface import StoreUnavailable

Role = TypeVar("Role")


class StoreFaults:
    """Which calls fail, and how often they did."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        "All, in order."
        self.failures: Counter[str] = Counter()
        self._scripts: defaultdict[str, list[Exception]] = defaultdict(list)
        self._broken: set[str] = set()

    def fail(self, call: str, *errors: Exception) -> None:
        """The next calls fail with these, one after the other; then it works again."""
        self._scripts[call] += errors

    def break_down(self, call: str) -> None:
        """The disk is full, until `repair`."""
        self._broken.add(call)

    def repair(self, call: str) -> None:
        self._broken.remove(call)

    def check(self, call: str) -> None:
        self.calls.append(call)
        script = self._scripts[call]
        if script or call in self._broken:
            self.failures[call] += 1
            raise script.pop(0) if script else StoreUnavailable("the disk is full")


class _FaultyStore:
    def __init__(self, store: object, faults: StoreFaults) -> None:
        self._store = store
        self._faults = faults

    def __getattr__(self, call: str) -> Any:
        real = getattr(self._store, call)

        async def failing(*arguments: Any, **options: Any) -> Any:
            self._faults.check(call)
            return await real(*arguments, **options)

        return failing


def with_faults(store: Role, faults: StoreFaults) -> Role:
    """The same role; every call can be made to fail."""
    return cast("Role", _FaultyStore(store, faults))
