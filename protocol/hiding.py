"""Records that cannot be printed with what is in them.

Keys, ids, codes and contents are bytes, in this protocol and in all that is built on it. So a record that
holds bytes leaves them out of its repr, unless they are public.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

Record = TypeVar("Record", bound=type[Any])


def hides_bytes(record: Record) -> Record:
    """Decorate a data class or a named tuple: its repr, and so its text, has no field with bytes in it."""
    record.__repr__ = _repr_without_bytes  # type: ignore[assignment]
    return record


def _repr_without_bytes(record: Any) -> str:
    values = {name: getattr(record, name) for name in _shown_fields(record)}
    shown = (f"{name}={value!r}" for name, value in values.items() if not _holds_bytes(value))
    return f"{type(record).__qualname__}({', '.join(shown)})"


def _shown_fields(record: Any) -> Collection[str]:
    if dataclasses.is_dataclass(record):
        return [field.name for field in dataclasses.fields(record) if field.repr]
    names: tuple[str, ...] = record._fields
    return names


def _holds_bytes(value: Any) -> bool:
    """Records in it hide theirs themselves."""
    if isinstance(value, bytes | bytearray | memoryview):
        return True
    if isinstance(value, Mapping):
        return any(_holds_bytes(part) for pair in value.items() for part in pair)
    if isinstance(value, tuple | list | set | frozenset | deque) and not hasattr(value, "_fields"):
        return any(map(_holds_bytes, value))
    return False
