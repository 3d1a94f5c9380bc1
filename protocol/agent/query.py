"""Names and values of a link's query part."""

from __future__ import annotations

import re
from collections.abc import Mapping

from protocol.encoding import b64, unb64
from protocol.errors import DecodeError
from protocol.versions import VersionRange

_VERSIONS = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", re.ASCII)
_MAX_VERSION = 0xFFFF


def split_query(text: str) -> dict[str, str]:
    """Values as they stand; the first of a name counts. Names that nobody knows come from later versions."""
    fields: dict[str, str] = {}
    for part in text.split("&"):
        name, _, value = part.partition("=")
        fields.setdefault(name, value)
    return fields


def required(fields: Mapping[str, str], name: str) -> str:
    if name not in fields:
        raise DecodeError
    return fields[name]


def parse_versions(text: str) -> VersionRange:
    match = _VERSIONS.fullmatch(text)
    if match is None:
        raise DecodeError
    versions = VersionRange(int(match[1]), int(match[2] or match[1]))
    if not versions.min <= versions.max <= _MAX_VERSION:
        raise DecodeError
    return versions


def versions_text(versions: VersionRange) -> str:
    return f"{versions.min}-{versions.max}" if versions.min != versions.max else f"{versions.min}"


def bytes_text(data: bytes) -> str:
    return b64(data).decode("ascii")


def parse_bytes(text: str) -> bytes:
    return unb64(text.encode("ascii", "replace"))
