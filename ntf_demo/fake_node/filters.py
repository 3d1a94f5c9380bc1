"""Which statements a subscription asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from protocol.statements import FIELD_SIZE, Statement

MAX_ANY = 128
MAX_ALL = 4


@dataclass(frozen=True, slots=True)
class Filter:
    """Statements with one of the topics, or with all of them; without topics every one."""

    topics: frozenset[bytes] = frozenset()
    all_of_them: bool = False

    def wants(self, statement: Statement) -> bool:
        if self.all_of_them:
            return self.topics.issubset(statement.named_topics)
        return not self.topics or not self.topics.isdisjoint(statement.named_topics)


class BadFilter(Exception):
    """The parameter is none that a node takes."""


def parse_filter(parameter: Any) -> Filter:
    if parameter == "any":
        return Filter()
    if not isinstance(parameter, dict) or len(parameter) != 1:
        raise BadFilter
    ((kind, listed),) = parameter.items()
    if kind == "matchAny":
        return Filter(_topics(listed, MAX_ANY))
    if kind == "matchAll":
        return Filter(_topics(listed, MAX_ALL), all_of_them=True)
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
