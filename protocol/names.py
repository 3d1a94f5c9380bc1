"""Names that lead to contacts and channels: what RSLV asks for and RNAME answers."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from protocol.encoding import Reader, Writer
from protocol.errors import DecodeError

MAX_NAME = 253
"Bytes; each label has 63 at most."
_LABEL = r"[^\W_](?:(?:[^\W_]|-)*[^\W_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})+")
MAX_LABEL = 63


@dataclass(frozen=True, slots=True)
class NameRecord:
    """What a resolver knows about a name. Contacts and channels are links."""

    name: str
    owner: str
    resolver: str
    nickname: str | None = None
    website: str | None = None
    location: str | None = None
    contacts: tuple[str, ...] = field(default=(), repr=False)
    channels: tuple[str, ...] = field(default=(), repr=False)
    eth: str | None = None
    btc: str | None = None
    xmr: str | None = None
    dot: str | None = None


_LISTS = {"contacts": "simplexContact", "channels": "simplexChannel"}
_REQUIRED = ("name", "owner", "resolver")
_OPTIONAL = ("nickname", "website", "location", "eth", "btc", "xmr", "dot")


def pull_name(r: Reader) -> str:
    """A name of at least two labels: letters, digits and inner hyphens."""
    data = r.pull_tail()
    try:
        name = data.decode("utf-8")
    except UnicodeDecodeError:
        raise DecodeError from None
    labels = name.split(".")
    too_long = len(data) > MAX_NAME or any(len(label.encode()) > MAX_LABEL for label in labels)
    if too_long or not _NAME.fullmatch(name):
        raise DecodeError
    return name


def push_name(w: Writer, name: str) -> None:
    w.push_bytes(name.encode("utf-8"))


def pull_name_record(r: Reader) -> NameRecord:
    """Keys that nobody knows come from later versions."""
    try:
        fields = json.loads(r.pull_tail())
    except (ValueError, RecursionError):
        raise DecodeError from None
    if not isinstance(fields, dict):
        raise DecodeError
    values: dict[str, Any] = {key: _text(fields.get(key)) for key in _REQUIRED}
    values |= {key: _optional(fields.get(key)) for key in _OPTIONAL}
    values |= {field: _texts(fields.get(key, [])) for field, key in _LISTS.items()}
    return NameRecord(**values)


def push_name_record(w: Writer, record: NameRecord) -> None:
    fields: dict[str, Any] = {key: getattr(record, key) for key in (*_REQUIRED, *_OPTIONAL)}
    fields |= {key: list(getattr(record, field)) for field, key in _LISTS.items()}
    w.push_bytes(json.dumps(fields, separators=(",", ":")).encode())


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise DecodeError
    return value


def _optional(value: Any) -> str | None:
    return None if value is None else _text(value)


def _texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list):
        raise DecodeError
    return tuple(_text(value) for value in values)
