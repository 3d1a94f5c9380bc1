"""Which statements a subscription asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from protocol.statements import FIELD_SIZE, Statement

MAX_ANY = 128
MAX_ALL = 4

Filter = Callable[[Statement], bool]


class BadFilter(Exception):
    """The parameter is none that a node takes."""


def parse_filter(parameter: Any) -> Filter:
    if parameter == "any":
        return lambda statement: True
    if not isinstance(parameter, dict) or len(parameter) != 1:
        raise BadFilter
    ((kind, listed),) = parameter.items()
    if kind == "matchAny":
        wanted = _topics(listed, MAX_ANY)
        return lambda statement: not wanted.isdisjoint(statement.named_topics)
    if kind == "matchAll":
        every = _topics(listed, MAX_ALL)
        return lambda statement: every <= set(statement.named_topics)
    raise BadFilter


def _topics(listed: Any, limit: int) -> frozenset[bytes]:
    if not isinstance(listed, list) or not 0 < len(listed) <= limit:
        raise BadFilter
    return frozenset(map(_topic, listed))


def _topic(text: Any) -> bytes:
    try:
        topic = unhex(text)
    except ValueError:
        raise BadFilter from None
    if len(topic) != FIELD_SIZE:
        raise BadFilter
    return topic


def unhex(text: Any) -> bytes:
    """From `0x…`; ValueError for anything else."""
    if not isinstance(text, str) or not text.startswith("0x"):
        raise ValueError
    return bytes.fromhex(text[2:])
