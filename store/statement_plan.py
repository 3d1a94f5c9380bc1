"""Which pushes a batch of statements leads to, decided without a database."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from protocol.hiding import hides_bytes
from store.statement_rate import COOL_DOWN, WINDOW, DeviceWindow, Window, decide
from store.statement_records import (
    DROPPED,
    Accepted,
    BatchPage,
    GatewayKey,
    Match,
    Outcome,
    Pair,
    PushKey,
    PushLimits,
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


MAX_DROPPED = 10_000
"Statements that are remembered for one device though it did not get them; of more, the oldest are forgotten."


@hides_bytes
class Plan(NamedTuple):
    decisions: Sequence[tuple[Candidate, Outcome]]
    windows: Mapping[Pair, Window]
    devices: Mapping[bytes, DeviceWindow]
    "Those that changed."
    repeated: int
    decided: Mapping[tuple[Pair, bytes], bool]

    def count(self, outcome: Outcome) -> int:
        return sum(found is outcome for _, found in self.decisions)


class Found(NamedTuple):
    """The statements of a page and the rules they meet."""

    statements: Sequence[ReceivedStatement]
    matches: Sequence[Match]
    cut: int = 0
    following: BatchPage | None = None


@hides_bytes
class Candidate(NamedTuple):
    """A subscription that a statement is for, by the first of its topics that has a rule."""

    statement: ReceivedStatement
    statement_hash: bytes
    match: Match

    @property
    def is_old(self) -> bool:
        """The node had the statement before the rule was made, or nobody can know."""
        return self.statement.is_stored and not self.match.is_settled

    @property
    def name(self) -> tuple[bytes, bytes]:
        """A device gets a statement once."""
        return self.match.device_id, self.statement_hash


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
    chosen: dict[tuple[GatewayKey, bytes], Candidate] = {}
    for statement in found.statements:
        if topics.isdisjoint(statement.topics):
            continue  # most of them
        statement_hash = statement.statement_hash
        for topic in statement.topics:
            for match in by_rule.get(Rule(statement.sender, topic), ()):
                once, one = (match.key, statement_hash), Candidate(statement, statement_hash, match)
                if once not in chosen or (chosen[once].is_old and not one.is_old):
                    chosen[once] = one
    return list(chosen.values())


def plan(
    chosen: Sequence[Candidate],
    known: Mapping[tuple[bytes, bytes], Outcome],
    windows: Mapping[Pair, Window],
    devices: Mapping[bytes, DeviceWindow],
    now: float,
    page: BatchPage,
    limits: PushLimits,
) -> Plan:
    """`known`: what became of statements that came before, by device and hash. A statement that was decided
    on for a client does not count for the limit of its sender again."""
    decided = dict(page.decided)
    new = [one for one in chosen if one.name not in known]
    for one in chosen:
        if (outcome := known.get(one.name)) is not None and outcome is not Outcome.STORED:
            decided[_once(one)] = outcome is not Outcome.LIMITED
    changed: dict[Pair, Window] = {}
    filled = dict(devices)
    decisions = []
    for one in new:
        outcome = _outcome(one, decided, changed, windows, filled, now, limits)
        if outcome in DROPPED:
            device = filled.get(one.match.device_id, DeviceWindow())
            filled[one.match.device_id] = replace(device, dropped=device.dropped + 1)
        decisions.append((one, outcome))
    filled = {name: window for name, window in filled.items() if window != devices.get(name)}
    return Plan(decisions, changed, filled, len(chosen) - len(new), decided)


def _outcome(
    one: Candidate,
    decided: dict[tuple[Pair, bytes], bool],
    changed: dict[Pair, Window],
    windows: Mapping[Pair, Window],
    devices: dict[bytes, DeviceWindow],
    now: float,
    limits: PushLimits,
) -> Outcome:
    """Decides, and notes what it costs."""
    if one.is_old:
        return Outcome.STORED
    once = pair, _ = _once(one)
    if once not in decided:
        before = changed.get(pair) or windows.get(pair) or Window()
        decided[once], changed[pair] = decide(before, now)
    if not decided[once]:
        return Outcome.LIMITED
    device_id = one.match.device_id
    admitted = devices.get(device_id, DeviceWindow()).admit(now, limits.per_minute)
    if admitted is None:
        return Outcome.DEVICE_LIMITED
    devices[device_id] = admitted
    return Outcome.WAITING


def _once(one: Candidate) -> tuple[Pair, bytes]:
    return (one.statement.sender, one.match.client_id), one.statement_hash


def accepted(found: Found, planned: Plan, keys: Sequence[PushKey]) -> Accepted:
    following = found.following
    if following is not None and following.after:
        following = following._replace(decided=planned.decided)
    return Accepted(
        keys,
        planned.count(Outcome.LIMITED),
        planned.repeated,
        found.cut,
        following,
        planned.count(Outcome.DEVICE_LIMITED),
        planned.count(Outcome.STORED),
    )


def keep_until(statement: ReceivedStatement, outcome: Outcome, now: float) -> int:
    expired = statement.expires_at + 1
    return expired if outcome in DROPPED else max(expired, int(now) + AUDIT_SECONDS)


def encode_device(window: DeviceWindow) -> bytes:
    return array("q", [second << 20 | count for second, count in window.accepted]).tobytes()


def decode_device(accepted: bytes, dropped: int) -> DeviceWindow:
    return DeviceWindow(tuple((item >> 20, item & 0xFFFFF) for item in array("q", accepted)), dropped)


def encode_times(window: Window) -> bytes:
    return array("d", window.accepted).tobytes()


def decode_window(times: bytes, silent_until: float) -> Window:
    return Window(tuple(array("d", times)), silent_until)


def idle_at(now: float) -> int:
    """When a window that changed now says nothing any more."""
    return int(now + max(WINDOW, COOL_DOWN)) + 1
