"""Which pushes a batch of statements leads to, decided without a database."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from store.statement_rate import COOL_DOWN, WINDOW, Window, decide
from store.statement_records import (
    Accepted,
    BatchPage,
    GatewayKey,
    Match,
    Pair,
    PushKey,
    ReceivedStatement,
    Rule,
)

MAX_DATA = 5120
"Bytes of a statement's data that are kept: more fits into no push, whatever its channel."
AUDIT_SECONDS = 30 * 24 * 60 * 60
"How long a push is remembered at least; as long as its statement can come again in any case."

PAGE = 1000
"Matching rules that one transaction looks at."
FAN_OUT = 100_000
"Subscriptions that one statement may be for; it is looked at after each page."


class Plan(NamedTuple):
    pushes: Sequence[Candidate]
    windows: Mapping[Pair, Window]
    "Those that changed."
    limited: int
    repeated: int
    decided: Mapping[tuple[Pair, bytes], bool]


class Found(NamedTuple):
    """The statements of a page and the rules they meet."""

    statements: Sequence[ReceivedStatement]
    matches: Sequence[Match]
    cut: int = 0
    following: BatchPage | None = None


class Candidate(NamedTuple):
    """A subscription that a statement is for, by the first of its topics that has a rule."""

    statement: ReceivedStatement
    statement_hash: bytes
    match: Match


def wanted_rules(statements: Sequence[ReceivedStatement]) -> list[tuple[bytes, bytes]]:
    """Senders and topics, each pair once."""
    return list(dict.fromkeys([(one.sender, topic) for one in statements for topic in one.topics]))


def part_of(
    statements: Sequence[ReceivedStatement], page: BatchPage, by_topic: Sequence[Sequence[Match]]
) -> Found:
    """A page of one statement that is for many. `by_topic`: at most `PAGE` matches of each of its topics, in
    the order of their keys. All of a subscription's are on one page, so that the first topic is known."""
    last = min((matches[-1].key for matches in by_topic if len(matches) == PAGE), default=None)
    matches = [match for each in by_topic for match in each if last is None or match.key <= last]
    told = page.told + len({match.key for match in matches})
    if last is not None and told < FAN_OUT:
        following: BatchPage | None = BatchPage(page.done, last, told)
    else:
        following = BatchPage(page.done + 1) if page.done + 1 < len(statements) else None
    is_cut = last is not None and told >= FAN_OUT
    return Found([statements[page.done]], matches, int(is_cut), following)


def candidates(found: Found) -> list[Candidate]:
    by_rule: dict[Rule, list[Match]] = {}
    for match in found.matches:
        by_rule.setdefault(match.rule, []).append(match)
    topics = {rule.topic for rule in by_rule}
    chosen = []
    done: set[tuple[GatewayKey, bytes]] = set()
    for statement in found.statements:
        if topics.isdisjoint(statement.topics):
            continue  # most of them
        statement_hash = statement.statement_hash
        for topic in statement.topics:
            for match in by_rule.get(Rule(statement.sender, topic), ()):
                once = match.key, statement_hash
                if once not in done:
                    done.add(once)
                    chosen.append(Candidate(statement, statement_hash, match))
    return chosen


def plan(
    chosen: Sequence[Candidate],
    pushed: Collection[tuple[bytes, bytes]],
    windows: Mapping[Pair, Window],
    now: float,
    page: BatchPage,
) -> Plan:
    """`pushed`: (subscription id, statement hash) of pushes made before. A statement that a client was told
    of does not count for the limit again."""
    decided = dict(page.decided)
    new = []
    for one in chosen:
        if (one.match.subscription_id, one.statement_hash) in pushed:
            decided[_once(one)] = True
        else:
            new.append(one)
    changed: dict[Pair, Window] = {}
    for one in new:
        once = pair, _ = _once(one)
        if once not in decided:
            before = changed.get(pair) or windows.get(pair) or Window()
            decided[once], changed[pair] = decide(before, now)
    planned = [one for one in new if decided[_once(one)]]
    return Plan(planned, changed, len(new) - len(planned), len(chosen) - len(new), decided)


def _once(one: Candidate) -> tuple[Pair, bytes]:
    return (one.statement.sender, one.match.client_id), one.statement_hash


def accepted(found: Found, planned: Plan, keys: Sequence[PushKey]) -> Accepted:
    following = found.following
    if following is not None and following.after:
        following = following._replace(decided=planned.decided)
    return Accepted(keys, planned.limited, planned.repeated, found.cut, following)


def keep_until(statement: ReceivedStatement, now: float) -> int:
    return max(statement.expires_at + 1, int(now) + AUDIT_SECONDS)


def encode_times(window: Window) -> bytes:
    return array("d", window.accepted).tobytes()


def decode_window(times: bytes, silent_until: float) -> Window:
    return Window(tuple(array("d", times)), silent_until)


def idle_at(now: float) -> int:
    """When a window that changed now says nothing any more."""
    return int(now + max(WINDOW, COOL_DOWN)) + 1
