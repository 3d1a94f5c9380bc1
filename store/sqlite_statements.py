"""SQL of the statement gateway."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from itertools import islice
from typing import Any

from protocol.device_token import encode_device_token
from store.sqlite_transaction import Transaction, insert_rows, select_in, select_rows, update_in
from store.statement_plan import (
    MAX_DATA,
    PAGE,
    Candidate,
    Found,
    Plan,
    accepted,
    candidates,
    decode_window,
    encode_times,
    idle_at,
    keep_until,
    part_of,
    plan,
    wanted_rules,
)
from store.statement_rate import Window
from store.statement_records import (
    Accepted,
    GatewayCaps,
    GatewayKey,
    GatewaySubscription,
    Match,
    NewGatewaySubscription,
    Page,
    Pair,
    PushKey,
    PushRecord,
    ReceivedStatement,
    Refusal,
    Request,
    Rule,
    RuleEdit,
    RulesEdited,
    StatementPush,
    TokenTaken,
)
from store.statement_rows import statement_push, subscription_record

_USE = "INSERT OR IGNORE INTO statement_requests (request_id, valid_until) VALUES (?, ?)"
_TAKEN = "SELECT subscription_id, client_id, channel FROM statement_subscriptions WHERE device_token = ?"
_COUNT = "SELECT count(*) FROM statement_subscriptions WHERE client_id = ?"
_SUBSCRIBE = """
INSERT INTO statement_subscriptions
    (subscription_id, client_id, channel, device_token, is_call, created_at, updated_at)
VALUES (?, ?, ?, ?, ?, ?, ?)
"""
_OWNED = """
SELECT sub_key FROM statement_subscriptions WHERE client_id = ? AND subscription_id IN ({})
"""
_UNSUBSCRIBE = "DELETE FROM statement_subscriptions WHERE sub_key IN ({})"
_LISTED = """
SELECT sub_key, subscription_id, client_id, channel, device_token, is_call, created_at, updated_at
FROM statement_subscriptions WHERE client_id = ? ORDER BY sub_key
"""
_RULES = "SELECT sender, topic FROM statement_rules WHERE sub_key = ? ORDER BY sender, topic"
_RULE_COUNT = "SELECT count(*) FROM statement_rules WHERE sub_key = ?"
_CLEAR_RULES = "DELETE FROM statement_rules WHERE sub_key = ?"
_ADD_RULE = "INSERT OR IGNORE INTO statement_rules (topic, sender, sub_key) VALUES (?, ?, ?)"
_REMOVE_RULE = "DELETE FROM statement_rules WHERE topic = ? AND sender = ? AND sub_key = ?"
_TOUCH = "UPDATE statement_subscriptions SET updated_at = ? WHERE sub_key = ?"
# One seek for each topic, however many rules name it.
_TOPICS = """
WITH RECURSIVE named(topic) AS (
    SELECT (SELECT topic FROM statement_rules ORDER BY topic LIMIT 1)
    UNION ALL
    SELECT (SELECT r.topic FROM statement_rules r WHERE r.topic > named.topic ORDER BY r.topic LIMIT 1)
    FROM named WHERE named.topic IS NOT NULL
)
SELECT topic FROM named WHERE topic IS NOT NULL LIMIT ?
"""
_MATCH = """
WITH wanted(sender, topic) AS (VALUES {})
SELECT r.sender, r.topic, r.sub_key, s.subscription_id, s.client_id
FROM wanted CROSS JOIN statement_rules r USING (topic, sender)
CROSS JOIN statement_subscriptions s USING (sub_key)
"""
_MATCH_PART = """
SELECT r.sender, r.topic, r.sub_key, s.subscription_id, s.client_id
FROM statement_rules r CROSS JOIN statement_subscriptions s USING (sub_key)
WHERE r.topic = ? AND r.sender = ? AND r.sub_key > ? ORDER BY r.sub_key LIMIT ?
"""
_PUSHED = """
WITH made(subscription_id, statement_hash) AS (VALUES {})
SELECT subscription_id, statement_hash
FROM made CROSS JOIN statement_pushes USING (subscription_id, statement_hash)
"""
_WINDOWS = """
WITH pairs(sender, client_id) AS (VALUES {})
SELECT sender, client_id, accepted, silent_until
FROM pairs CROSS JOIN statement_rates USING (sender, client_id)
"""
_SET_WINDOW = """
REPLACE INTO statement_rates (sender, client_id, accepted, silent_until, idle_at) VALUES {}
"""
_PUSH = """
INSERT INTO statement_pushes (subscription_id, statement_hash, sender, topic, accepted_at, keep_until)
VALUES {} RETURNING push_key, subscription_id, statement_hash
"""
_PENDING = "INSERT INTO pending_statements (push_key, sub_key, data) VALUES {}"
_LOAD = """
SELECT n.push_key, n.sub_key, p.subscription_id, p.statement_hash, s.channel, s.is_call, s.device_token,
    p.sender, p.topic, n.data, p.accepted_at
FROM pending_statements n CROSS JOIN statement_pushes p USING (push_key)
CROSS JOIN statement_subscriptions s USING (sub_key)
WHERE n.push_key IN ({})
"""
_CLAIM = "UPDATE pending_statements SET attempted = 1 WHERE push_key IN ({}) RETURNING push_key"
_RELEASE = "UPDATE pending_statements SET attempted = 0 WHERE push_key IN ({})"
_ABANDON = "DELETE FROM pending_statements WHERE attempted"
_SENT = "UPDATE statement_pushes SET sent_at = ? WHERE push_key IN ({})"
_DONE = "DELETE FROM pending_statements WHERE push_key IN ({})"
_UNSENT = "SELECT push_key FROM pending_statements WHERE push_key > ? ORDER BY push_key LIMIT ?"
_GONE = "DELETE FROM statement_subscriptions WHERE sub_key = ? AND device_token = ?"
_RECORDS = """
SELECT subscription_id, statement_hash, sender, topic, accepted_at, sent_at FROM statement_pushes
WHERE subscription_id = ? ORDER BY push_key
"""
_PURGES = (
    "DELETE FROM statement_requests WHERE request_id IN"
    " (SELECT request_id FROM statement_requests WHERE valid_until < ? LIMIT ?)",
    "DELETE FROM statement_rates WHERE (sender, client_id) IN"
    " (SELECT sender, client_id FROM statement_rates WHERE idle_at < ? LIMIT ?)",
    "DELETE FROM statement_pushes WHERE push_key IN"
    " (SELECT push_key FROM statement_pushes WHERE keep_until < ? LIMIT ?)",
)


def use(tx: Transaction, request: Request | None) -> bool:
    """False: it was made before."""
    return request is None or tx.db.execute(_USE, request).rowcount == 1


def subscribe(
    tx: Transaction, new: NewGatewaySubscription, request: Request | None, caps: GatewayCaps
) -> TokenTaken | Refusal | None:
    if not use(tx, request):
        return Refusal.REPLAYED
    device_token = encode_device_token(new.device_token)
    if (row := tx.db.execute(_TAKEN, (device_token,)).fetchone()) is not None:
        return TokenTaken(row[0] if row[1:] == (new.client_id, new.channel) else None)
    (count,) = tx.db.execute(_COUNT, (new.client_id,)).fetchone()
    if count >= caps.subscriptions_per_client:
        return Refusal.QUOTA
    at = new.created_at
    row = (new.subscription_id, new.client_id, new.channel.value, device_token, new.is_call, at, at)
    tx.db.execute(_SUBSCRIBE, row)
    return None


def _owned(tx: Transaction, client_id: bytes, ids: Sequence[bytes]) -> list[GatewayKey] | None:
    """None unless all of them are the client's."""
    found = {GatewayKey(row[0]) for row in select_in(tx.db, _OWNED, ids, client_id)}
    return sorted(found) if len(found) == len(set(ids)) else None


def unsubscribe(
    tx: Transaction, client_id: bytes, ids: Sequence[bytes], request: Request | None
) -> Refusal | None:
    if not use(tx, request):
        return Refusal.REPLAYED
    keys = _owned(tx, client_id, ids)
    if keys is None:
        return Refusal.UNKNOWN
    update_in(tx.db, _UNSUBSCRIBE, keys)
    return None


def listed(db: sqlite3.Connection, client_id: bytes) -> list[Sequence[Any]]:
    """A client's subscriptions, for `with_rules`."""
    return db.execute(_LISTED, (client_id,)).fetchall()


def with_rules(row: Sequence[Any], db: sqlite3.Connection) -> GatewaySubscription:
    return subscription_record(row, db.execute(_RULES, row[:1]).fetchall())


def edit_rules(
    tx: Transaction,
    client_id: bytes,
    subscription_id: bytes,
    edit: RuleEdit,
    rules: Sequence[Rule],
    request: Request | None,
    *,
    caps: GatewayCaps,
    now: int,
) -> RulesEdited | Refusal:
    if not use(tx, request):
        return Refusal.REPLAYED
    keys = _owned(tx, client_id, [subscription_id])
    if keys is None:
        return Refusal.UNKNOWN
    tx.db.execute("SAVEPOINT rules")
    edited = _edit(tx, keys[0], edit, rules)
    if edit is not RuleEdit.REMOVE and edited.total > caps.rules_per_subscription:
        tx.db.execute("ROLLBACK TO rules")
        return Refusal.QUOTA
    tx.db.execute(_TOUCH, (now, keys[0]))
    return edited


def _edit(tx: Transaction, key: GatewayKey, edit: RuleEdit, rules: Sequence[Rule]) -> RulesEdited:
    if edit is RuleEdit.REPLACE:
        tx.db.execute(_CLEAR_RULES, (key,))
    sql = _REMOVE_RULE if edit is RuleEdit.REMOVE else _ADD_RULE
    changed = tx.db.executemany(sql, [(rule.topic, rule.sender, key) for rule in rules]).rowcount
    if edit is not RuleEdit.REMOVE:
        tx.rule_filter.add(rules)
    (total,) = tx.db.execute(_RULE_COUNT, (key,)).fetchone()
    return RulesEdited(max(changed, 0), total)


def topics(db: sqlite3.Connection, limit: int) -> list[bytes]:
    return [row[0] for row in db.execute(_TOPICS, (limit,))]


def accept(tx: Transaction, statements: Sequence[ReceivedStatement], now: float, page: Page) -> Accepted:
    found = _found(tx, statements, page)
    chosen = candidates(found)
    made = [(one.match.subscription_id, one.statement_hash) for one in chosen]
    pushed = set(select_rows(tx.db, _PUSHED, made))
    planned = plan(chosen, pushed, _windows(tx, chosen), now, page)
    return accepted(found, planned, _store(tx, planned, now))


def _found(tx: Transaction, statements: Sequence[ReceivedStatement], page: Page) -> Found:
    if not page.after:
        rest = statements[page.done :]
        rules = tx.rule_filter.possible(tx.db, wanted_rules(rest))
        rows = list(islice(select_rows(tx.db, _MATCH, rules), PAGE + 1))
        if len(rows) <= PAGE:
            return Found(rest, [_match(row) for row in rows])
    one = statements[page.done]
    by_topic = [
        [_match(row) for row in tx.db.execute(_MATCH_PART, (topic, one.sender, page.after, PAGE))]
        for topic in one.topics
    ]
    return part_of(statements, page, by_topic)


def _match(row: Sequence[Any]) -> Match:
    return Match(Rule(row[0], row[1]), GatewayKey(row[2]), row[3], row[4])


def _windows(tx: Transaction, chosen: Sequence[Candidate]) -> dict[Pair, Window]:
    pairs = dict.fromkeys([(one.statement.sender, one.match.client_id) for one in chosen])
    return {
        (sender, client_id): decode_window(times, silent_until)
        for sender, client_id, times, silent_until in select_rows(tx.db, _WINDOWS, list(pairs))
    }


def _store(tx: Transaction, planned: Plan, now: float) -> list[PushKey]:
    windows = [
        (*pair, encode_times(window), window.silent_until, idle_at(now))
        for pair, window in planned.windows.items()
    ]
    insert_rows(tx.db, _SET_WINDOW, windows)
    keys = {
        (subscription_id, statement_hash): PushKey(key)
        for key, subscription_id, statement_hash in select_rows(
            tx.db, _PUSH, [_push_row(one, now) for one in planned.pushes]
        )
    }
    pending = [
        (
            keys[one.match.subscription_id, one.statement_hash],
            one.match.key,
            one.statement.data[: MAX_DATA + 1],
        )
        for one in planned.pushes
    ]
    insert_rows(tx.db, _PENDING, pending)
    return sorted(keys.values())


def _push_row(one: Candidate, now: float) -> tuple[Any, ...]:
    statement, statement_hash, match = one
    return (
        match.subscription_id,
        statement_hash,
        statement.sender,
        match.rule.topic,
        int(now),
        keep_until(statement, now),
    )


def pushes(db: sqlite3.Connection, keys: Sequence[PushKey]) -> list[StatementPush]:
    return [statement_push(row) for row in {row[0]: row for row in select_in(db, _LOAD, keys)}.values()]


def claim(tx: Transaction, keys: Sequence[PushKey]) -> set[PushKey]:
    return {PushKey(row[0]) for row in select_in(tx.db, _CLAIM, keys)}


def abandon(tx: Transaction) -> int:
    return tx.db.execute(_ABANDON).rowcount


def ended(
    tx: Transaction, sent: Sequence[PushKey], given_up: Sequence[PushKey], again: Sequence[PushKey], now: int
) -> None:
    update_in(tx.db, _SENT, sent, now)
    update_in(tx.db, _DONE, [*sent, *given_up])
    update_in(tx.db, _RELEASE, again)


def unsent(db: sqlite3.Connection, after: PushKey, limit: int) -> list[PushKey]:
    return [PushKey(row[0]) for row in db.execute(_UNSENT, (after, limit))]


def device_gone(tx: Transaction, push: StatementPush) -> bool:
    row = push.subscription_key, encode_device_token(push.device_token)
    return tx.db.execute(_GONE, row).rowcount == 1


def records(db: sqlite3.Connection, subscription_id: bytes) -> list[PushRecord]:
    return [PushRecord(*row) for row in db.execute(_RECORDS, (subscription_id,))]


def purge(tx: Transaction, now: int, limit: int) -> int:
    return sum(tx.db.execute(sql, (now, limit)).rowcount for sql in _PURGES)
