"""Rows as records: a column for each field, of the same name, in the form that its type has in SQL."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import fields
from enum import Enum
from functools import lru_cache, reduce
from operator import attrgetter, or_
from types import NoneType
from typing import Any, Generic, NamedTuple, TypeVar, get_args, get_type_hints

from agent.duplex.store import Tx, insert
from protocol.addresses import NtfServer, SmpServer, parse_ntf_server, parse_smp_server
from protocol.crypto import (
    AuthPublicKey,
    Ed25519PrivateKey,
    X25519PrivateKey,
    X25519PublicKey,
    decode_public_key,
)
from protocol.device_token import DeviceToken, decode_device_token, encode_device_token
from protocol.smp_messages import QueueMode

Record = TypeVar("Record")


class SqlForm(NamedTuple):
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


_FORMS: dict[Any, SqlForm] = {
    bool: SqlForm(int, bool),
    SmpServer: SqlForm(str, lru_cache(1024)(parse_smp_server)),
    NtfServer: SqlForm(str, parse_ntf_server),
    Ed25519PrivateKey: SqlForm(attrgetter("seed"), Ed25519PrivateKey),
    X25519PrivateKey: SqlForm(attrgetter("raw"), X25519PrivateKey),
    X25519PublicKey: SqlForm(attrgetter("raw"), X25519PublicKey),
    AuthPublicKey: SqlForm(attrgetter("der"), decode_public_key),
    DeviceToken: SqlForm(encode_device_token, decode_device_token),
    QueueMode: SqlForm(lambda mode: mode.value.decode(), lambda text: QueueMode(text.encode())),
}


def _form_of(hint: Any) -> SqlForm | None:
    """None for what SQL has, too. NULL and None are one and the same in every form."""
    kind = reduce(or_, (part for part in get_args(hint) if part is not NoneType)) if get_args(hint) else hint
    if kind not in _FORMS and isinstance(kind, type) and issubclass(kind, Enum):
        return SqlForm(attrgetter("value"), kind)
    return _FORMS.get(kind)


class Table(Generic[Record]):
    """Changes take a transaction, so that they happen in one; whoever only looks needs the database."""

    def __init__(self, name: str, record: type[Record], key: str, *, numbered: bool = False) -> None:
        """`numbered`: the database gives new rows their keys."""
        hints = get_type_hints(record)
        self._name, self._record, self._key = name, record, key
        self._forms = {field.name: _form_of(hints[field.name]) for field in fields(record)}  # type: ignore[arg-type]
        self._given = [field for field in self._forms if not (numbered and field == key)]

    def all(self, db: sqlite3.Connection, condition: str, *values: Any) -> list[Record]:
        return [self._read(row) for row in db.execute(self._select(condition), values)]

    def one(self, db: sqlite3.Connection, condition: str, *values: Any) -> Record | None:
        row = db.execute(self._select(condition), values).fetchone()
        return None if row is None else self._read(row)

    def get(self, db: sqlite3.Connection, key: int) -> Record | None:
        return self.one(db, f"{self._key} = ?", key)

    def add(self, tx: Tx, record: Record, **others: Any) -> int:
        """With `others`, the columns that are no fields. The row id."""
        values = {name: self._written(name, getattr(record, name)) for name in self._given}
        return insert(tx.db, self._name, **values, **others)

    def set(self, tx: Tx, key: int, **values: Any) -> None:
        written = [self._written(name, value) for name, value in values.items()]
        changes = ", ".join(f"{name} = ?" for name in values)
        tx.db.execute(f"UPDATE {self._name} SET {changes} WHERE {self._key} = ?", (*written, key))

    def drop(self, tx: Tx, key: int) -> None:
        tx.db.execute(f"DELETE FROM {self._name} WHERE {self._key} = ?", (key,))

    def _select(self, condition: str) -> str:
        return f"SELECT {', '.join(self._forms)} FROM {self._name} WHERE {condition}"

    def _read(self, row: Any) -> Record:
        named = zip(self._forms.items(), row, strict=True)
        return self._record(
            **{
                name: value if form is None or value is None else form.read(value)
                for (name, form), value in named
            }
        )

    def _written(self, name: str, value: Any) -> Any:
        form = self._forms.get(name)
        return value if form is None or value is None else form.write(value)
