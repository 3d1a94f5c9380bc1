"""Names and values of a link's query part."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import unquote_plus

from protocol.encoding import b64, unb64
from protocol.errors import DecodeError
from protocol.versions import VersionRange

_VERSIONS = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", re.ASCII)
_MAX_VERSION = 0xFFFF
MAX_PARAMETERS = 32
"A link has six; later versions may add some."


def split_query(text: str) -> dict[str, str]:
    """The first of a name counts. Names that nobody knows come from later versions."""
    fields: dict[str, str] = {}
    parts = text.split("&")
    if len(parts) > MAX_PARAMETERS:
        raise DecodeError
    try:
        for part in parts:
            name, _, value = part.partition("=")
            fields.setdefault(name, unquote_plus(value, errors="strict"))
    except UnicodeDecodeError:
        raise DecodeError from None
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
