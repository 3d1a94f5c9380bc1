"""SQL of last notifications."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from protocol.device_token import Provider
from protocol.encoding import EntityId
from protocol.statuses import TokenStatus
from store.interface import KEPT_NOTIFICATIONS, UNSENT_LOADED
from store.records import (
    Counts,
    LastNotification,
    Notification,
    SentEntry,
    ServerKey,
    Stored,
    SubKey,
    TokenKey,
    TokenPush,
)
from store.rows import TOKEN_COLUMNS, last_notification, token_record
from store.sqlite_transaction import Transaction, insert_rows, select_in, update_in

# One row with all answers: each row that SQLite hands over gives up the interpreter lock, and gets it back
# only when the event loop pauses.
_TARGETS = f"""
SELECT group_concat(
    hex(s.notifier_id) || ' ' || s.token_key || ' ' || s.sub_key || ' ' || hex(t.token_id)
    || ' ' || hex(s.subscription_id) || ' ' || substr(t.device_token, 1, 2)
)
FROM subscriptions s CROSS JOIN tokens t USING (token_key)
WHERE s.server_key = ? AND s.notifier_id IN ({{}}) AND t.status = '{TokenStatus.ACTIVE}'
"""
_PROVIDERS = {provider.tag: provider for provider in Provider}
_ADD = "REPLACE INTO unsent_notifications (token_key, sub_key, seq, received_at, nonce, meta) VALUES {}"
_ENTRIES = """
SELECT group_concat(entry, ';') FROM (
    SELECT n.sub_key || ' ' || n.seq || ' ' || v.hosts || ' ' || v.port || ' ' || hex(v.key_hash) || ' '
        || hex(s.notifier_id) || ' ' || n.received_at || ' ' || hex(n.nonce) || ' ' || hex(n.meta) || ' '
        || s.spelling AS entry
    FROM {} n CROSS JOIN subscriptions s USING (sub_key) CROSS JOIN smp_servers v USING (server_key)
    WHERE n.token_key = t.token_key{}
)
"""
# Each token is one row with all its entries, for the same reason. No field has a space or a semicolon.
_PUSHES = f"""
SELECT {TOKEN_COLUMNS},
    ({_ENTRIES.format("unsent_notifications", f" ORDER BY n.seq LIMIT {UNSENT_LOADED}")}),
    ({_ENTRIES.format("sent_notifications", "")})
FROM tokens t WHERE token_key IN ({{}}) AND status = '{TokenStatus.ACTIVE}'
"""
_MOVE = """
REPLACE INTO sent_notifications (token_key, sub_key, seq, received_at, nonce, meta)
SELECT token_key, sub_key, seq, received_at, nonce, meta FROM unsent_notifications WHERE seq IN ({})
"""
_MOVED = "DELETE FROM unsent_notifications WHERE seq IN ({})"
_FORGET = f"""
DELETE FROM sent_notifications WHERE (token_key, sub_key) IN (
    SELECT token_key, sub_key FROM (
        SELECT token_key, sub_key, row_number() OVER (PARTITION BY token_key ORDER BY seq DESC) AS place
        FROM sent_notifications WHERE token_key IN ({{}})
    )
    WHERE place > {KEPT_NOTIFICATIONS}
)
"""
_UNSENT_TOKENS = f"""
SELECT DISTINCT n.token_key FROM unsent_notifications n CROSS JOIN tokens t USING (token_key)
WHERE n.token_key > ? AND t.status = '{TokenStatus.ACTIVE}' ORDER BY n.token_key LIMIT ?
"""
_COUNTS = """
SELECT tokens, active_tokens, subscriptions, active_subscriptions,
    (SELECT ifnull(sum(associated_count), 0) FROM smp_servers),
    (SELECT count(*) FROM smp_servers),
    (SELECT count(*) FROM unsent_notifications),
    (SELECT received_at FROM unsent_notifications ORDER BY seq LIMIT 1)
FROM totals
"""


def add(
    tx: Transaction, key: ServerKey, notifications: Sequence[Notification], received_at: int
) -> list[Stored | None]:
    notifier_ids = [notification.notifier_id for notification in notifications]
    targets = _targets(tx, key, notifier_ids)
    newest: dict[EntityId, tuple[Any, ...]] = {}
    for seq, (notifier_id, nonce, meta) in zip(tx.take_seqs(len(notifications)), notifications, strict=True):
        if (target := targets.get(notifier_id)) is not None:
            newest[notifier_id] = (target.token_key, target.sub_key, seq, received_at, nonce, meta)
    insert_rows(tx.db, _ADD, list(newest.values()))
    return [targets.get(notifier_id) for notifier_id in notifier_ids]


def _targets(tx: Transaction, key: ServerKey, notifier_ids: Sequence[EntityId]) -> dict[EntityId, Stored]:
    targets = {}
    for (answers,) in select_in(tx.db, _TARGETS, notifier_ids, key):
        for answer in answers.split(",") if answers else ():
            notifier_id, token_key, sub_key, token_id, subscription_id, tag = answer.split(" ")
            keys = TokenKey(int(token_key)), SubKey(int(sub_key))
            stored = Stored(*keys, _entity(token_id), _entity(subscription_id), _PROVIDERS[tag])
            targets[_entity(notifier_id)] = stored
    return targets


def _entity(text: str) -> EntityId:
    return EntityId(bytes.fromhex(text))


def pushes(db: sqlite3.Connection, keys: Sequence[TokenKey]) -> list[TokenPush]:
    found = []
    for *token, unsent, sent in select_in(db, _PUSHES, keys):
        if entries := _entries(unsent, sent):
            found.append(TokenPush(token_record(token), entries))
    return found


def _entries(unsent: str | None, sent: str | None) -> tuple[LastNotification, ...]:
    entries = _parsed(unsent, sent=False)
    room = KEPT_NOTIFICATIONS - len(entries)
    if room > 0 and sent:
        # So few are unsent that all of them were loaded: a sent one of the same queue shows as out of date.
        queues = {entry.sub_key for entry in entries}
        kept = [entry for entry in _parsed(sent, sent=True) if entry.sub_key not in queues]
        kept.sort(key=attrgetter("seq"))
        entries += kept[-room:]
    entries.sort(key=attrgetter("seq"))
    return tuple(entries)


def _parsed(entries: str | None, *, sent: bool) -> list[LastNotification]:
    return [_entry(entry.split(" "), sent) for entry in entries.split(";")] if entries else []


def _entry(columns: Sequence[str], sent: bool) -> LastNotification:
    sub_key, seq, hosts, port, key_hash, notifier_id, received_at, nonce, meta, spelling = columns
    unhex = bytes.fromhex
    ids = int(sub_key), int(seq), hosts, port, unhex(key_hash), unhex(notifier_id)
    return last_notification((*ids, int(received_at), unhex(nonce), unhex(meta), spelling), sent=sent)


def unsent_tokens(db: sqlite3.Connection, after: TokenKey, limit: int) -> list[TokenKey]:
    return [TokenKey(key) for (key,) in db.execute(_UNSENT_TOKENS, (after, limit))]


def set_sent(tx: Transaction, calls: Sequence[Sequence[SentEntry]]) -> list[None]:
    """A number is given once and goes with its entry, so it alone tells if the entry is still the same."""
    entries = [entry for call in calls for entry in call]
    seqs = [entry.seq for entry in entries]
    update_in(tx.db, _MOVE, seqs)
    update_in(tx.db, _MOVED, seqs)
    update_in(tx.db, _FORGET, list({entry.token_key for entry in entries}))
    return [None] * len(calls)


def counts(db: sqlite3.Connection) -> Counts:
    row = db.execute(_COUNTS).fetchone()
    return Counts(
        tokens=row[0],
        active_tokens=row[1],
        subscriptions=row[2],
        active_subscriptions=row[3],
        associated_subscriptions=row[4],
        servers=row[5],
        unsent_notifications=row[6],
        oldest_unsent=row[7],
    )
