"""Which pushes a batch of statements leads to, decided without a database."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from store.statement_rate import COOL_DOWN, WINDOW, Window, decide
from store.statement_records import GatewayKey, Match, ReceivedStatement, Rule

MAX_DATA = 5120
"Bytes of a statement's data that are kept: more fits into no push, whatever its channel."
AUDIT_SECONDS = 30 * 24 * 60 * 60
"How long a push is remembered at least; as long as its statement can come again in any case."

Pair = tuple[bytes, bytes]
"Sender and client: whom the limit is for."


class Plan(NamedTuple):
    pushes: Sequence[Candidate]
    windows: Mapping[Pair, Window]
    "Those that changed."
    limited: int
    repeated: int


class Candidate(NamedTuple):
    """A subscription that a statement is for, by the first of its topics that has a rule."""

    statement: ReceivedStatement
    match: Match


def candidates(statements: Sequence[ReceivedStatement], matches: Sequence[Match]) -> list[Candidate]:
    by_rule: dict[Rule, list[Match]] = {}
    for match in matches:
        by_rule.setdefault(match.rule, []).append(match)
    found = []
    done: set[tuple[GatewayKey, bytes]] = set()
    for statement in statements:
        for topic in statement.topics:
            for match in by_rule.get(Rule(statement.sender, topic), ()):
                once = match.key, statement.statement_hash
                if once not in done:
                    done.add(once)
                    found.append(Candidate(statement, match))
    return found


def plan(
    found: Sequence[Candidate],
    pushed: Collection[tuple[bytes, bytes]],
    windows: Mapping[Pair, Window],
    now: float,
) -> Plan:
    """`pushed`: (subscription id, statement hash) of pushes made before; they do not count for the limit."""
    new = [one for one in found if (one.match.subscription_id, one.statement.statement_hash) not in pushed]
    changed: dict[Pair, Window] = {}
    decided: dict[tuple[Pair, bytes], bool] = {}
    for statement, match in new:
        pair = statement.sender, match.client_id
        once = pair, statement.statement_hash
        if once not in decided:
            before = changed.get(pair) or windows.get(pair) or Window()
            decided[once], changed[pair] = decide(before, now)
    planned = [
        one
        for one in new
        if decided[(one.statement.sender, one.match.client_id), one.statement.statement_hash]
    ]
    return Plan(planned, changed, len(new) - len(planned), len(found) - len(new))


def keep_until(statement: ReceivedStatement, now: float) -> int:
    return max(statement.expires_at + 1, int(now) + AUDIT_SECONDS)


def encode_times(window: Window) -> bytes:
    return array("d", window.accepted).tobytes()


def decode_window(times: bytes, silent_until: float) -> Window:
    return Window(tuple(array("d", times)), silent_until)


def idle_at(now: float) -> int:
    """When a window that changed now says nothing any more."""
    return int(now + max(WINDOW, COOL_DOWN)) + 1
