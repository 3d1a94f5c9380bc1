"""SQL of the statement gateway, for PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import asyncpg

from protocol.device_token import encode_device_token
from store.postgres_engine import Transaction
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

_USE = "INSERT INTO statement_requests (request_id, valid_until) VALUES ($1, $2) ON CONFLICT DO NOTHING"
_TAKEN = "SELECT subscription_id, client_id, channel FROM statement_subscriptions WHERE device_token = $1"
# A client's requests come one after the other here, so that what is counted stays so.
_LOCK = "SELECT pg_advisory_xact_lock(hashtextextended(encode($1::bytea, 'hex'), 18))"
_COUNT = "SELECT count(*) FROM statement_subscriptions WHERE client_id = $1"
_SUBSCRIBE = """
INSERT INTO statement_subscriptions
    (subscription_id, client_id, channel, device_token, is_call, created_at, updated_at)
VALUES ($1, $2, $3, $4, $5, $6, $6) ON CONFLICT (device_token) DO NOTHING
"""
_OWNED = """
SELECT sub_key FROM statement_subscriptions WHERE client_id = $1 AND subscription_id = ANY($2::bytea[])
ORDER BY sub_key FOR UPDATE
"""
# Statements are matched meanwhile.
_EDITED = """
SELECT sub_key FROM statement_subscriptions WHERE client_id = $1 AND subscription_id = $2 FOR NO KEY UPDATE
"""
_UNSUBSCRIBE = "DELETE FROM statement_subscriptions WHERE sub_key = ANY($1::bigint[])"
_LISTED = """
SELECT sub_key, subscription_id, client_id, channel, device_token, is_call, created_at, updated_at
FROM statement_subscriptions WHERE client_id = $1 ORDER BY sub_key
"""
_RULES = "SELECT sender, topic FROM statement_rules WHERE sub_key = $1 ORDER BY sender, topic"
_RULE_COUNT = "SELECT count(*) FROM statement_rules WHERE sub_key = $1"
_CLEAR_RULES = "DELETE FROM statement_rules WHERE sub_key = $1"
_ADD_RULES = """
INSERT INTO statement_rules (topic, sender, sub_key)
SELECT topic, sender, $1 FROM unnest($2::bytea[], $3::bytea[]) i(topic, sender) ON CONFLICT DO NOTHING
"""
_REMOVE_RULES = """
DELETE FROM statement_rules r USING unnest($2::bytea[], $3::bytea[]) i(topic, sender)
WHERE r.sub_key = $1 AND r.topic = i.topic AND r.sender = i.sender
"""
_TOUCH = "UPDATE statement_subscriptions SET updated_at = $1 WHERE sub_key = $2"
# One seek for each topic, however many rules name it.
_TOPICS = """
WITH RECURSIVE named(topic) AS (
    SELECT (SELECT topic FROM statement_rules ORDER BY topic LIMIT 1)
    UNION ALL
    SELECT (SELECT r.topic FROM statement_rules r WHERE r.topic > named.topic ORDER BY r.topic LIMIT 1)
    FROM named WHERE named.topic IS NOT NULL
)
SELECT topic FROM named WHERE topic IS NOT NULL LIMIT $1
"""
_MATCH = """
SELECT r.sender, r.topic, r.sub_key, s.subscription_id, s.client_id
FROM unnest($1::bytea[], $2::bytea[]) i(topic, sender)
JOIN statement_rules r USING (topic, sender) JOIN statement_subscriptions s USING (sub_key)
LIMIT $3
"""
_MATCH_PART = """
SELECT r.sender, r.topic, r.sub_key, s.subscription_id, s.client_id
FROM unnest($1::bytea[]) i(topic) CROSS JOIN LATERAL (
    SELECT * FROM statement_rules WHERE topic = i.topic AND sender = $2 AND sub_key > $3
    ORDER BY sub_key LIMIT $4
) r JOIN statement_subscriptions s USING (sub_key)
ORDER BY r.sub_key
"""
# Those that are still there stay so; they may get other rules meanwhile. Locked in order: no two wait for
# each other. Not locked when they are looked for: one that is gone would make a page look like the last.
_KEEP = """
SELECT sub_key FROM statement_subscriptions WHERE sub_key = ANY($1::bigint[]) ORDER BY sub_key FOR KEY SHARE
"""
_PUSHED = """
SELECT p.subscription_id, p.statement_hash
FROM unnest($1::bytea[], $2::bytea[]) i(subscription_id, statement_hash)
JOIN statement_pushes p USING (subscription_id, statement_hash)
"""
_WINDOWS = """
SELECT w.sender, w.client_id, w.accepted, w.silent_until
FROM unnest($1::bytea[], $2::bytea[]) i(sender, client_id)
JOIN statement_rates w USING (sender, client_id) ORDER BY w.sender, w.client_id FOR UPDATE OF w
"""
_SET_WINDOWS = """
INSERT INTO statement_rates (sender, client_id, accepted, silent_until, idle_at)
SELECT * FROM unnest($1::bytea[], $2::bytea[], $3::bytea[], $4::double precision[], $5::bigint[])
ON CONFLICT (sender, client_id) DO UPDATE SET accepted = excluded.accepted,
    silent_until = excluded.silent_until, idle_at = excluded.idle_at
"""
# What another daemon just decided on is not decided on again.
_PUSH = """
WITH input AS (
    SELECT * FROM unnest($1::bytea[], $2::bytea[], $3::bytea[], $4::bytea[], $5::bigint[], $6::bigint[],
        $7::bytea[]) i(subscription_id, statement_hash, sender, topic, keep_until, sub_key, data)
), pushed AS (
    INSERT INTO statement_pushes (subscription_id, statement_hash, sender, topic, accepted_at, keep_until)
    SELECT subscription_id, statement_hash, sender, topic, $8, keep_until FROM input
    ON CONFLICT (subscription_id, statement_hash) DO NOTHING
    RETURNING push_key, subscription_id, statement_hash
)
INSERT INTO pending_statements (push_key, sub_key, data)
SELECT push_key, sub_key, data FROM pushed JOIN input USING (subscription_id, statement_hash)
RETURNING push_key
"""
_LOAD = """
SELECT n.push_key, n.sub_key, p.subscription_id, p.statement_hash, s.channel, s.is_call, s.device_token,
    p.sender, p.topic, n.data, p.accepted_at
FROM pending_statements n JOIN statement_pushes p USING (push_key)
JOIN statement_subscriptions s USING (sub_key)
WHERE n.push_key = ANY($1::bigint[])
"""
_CLAIM = """
UPDATE pending_statements SET attempted = true WHERE push_key = ANY($1::bigint[]) RETURNING push_key
"""
_RELEASE = "UPDATE pending_statements SET attempted = false WHERE push_key = ANY($1::bigint[])"
_ABANDON = "DELETE FROM pending_statements WHERE attempted"
_SENT = "UPDATE statement_pushes SET sent_at = $2 WHERE push_key = ANY($1::bigint[])"
_DONE = "DELETE FROM pending_statements WHERE push_key = ANY($1::bigint[])"
_UNSENT = "SELECT push_key FROM pending_statements WHERE push_key > $1 ORDER BY push_key LIMIT $2"
_GONE = "DELETE FROM statement_subscriptions WHERE sub_key = $1 AND device_token = $2"
_RECORDS = """
SELECT subscription_id, statement_hash, sender, topic, accepted_at, sent_at FROM statement_pushes
WHERE subscription_id = $1 ORDER BY push_key
"""
_PURGES = (
    "DELETE FROM statement_requests WHERE request_id = ANY(ARRAY("
    "SELECT request_id FROM statement_requests WHERE valid_until < $1 LIMIT $2))",
    "DELETE FROM statement_rates WHERE (sender, client_id) IN"
    " (SELECT sender, client_id FROM statement_rates WHERE idle_at < $1 LIMIT $2)",
    "DELETE FROM statement_pushes WHERE push_key = ANY(ARRAY("
    "SELECT push_key FROM statement_pushes WHERE keep_until < $1 LIMIT $2))",
)


def _rows(tag: str) -> int:
    """How many rows a statement changed."""
    return int(tag.rpartition(" ")[2])


async def use(tx: Transaction, request: Request | None) -> bool:
    """False: it was made before."""
    return request is None or _rows(await tx.db.execute(_USE, *request)) == 1


async def subscribe(
    tx: Transaction, new: NewGatewaySubscription, request: Request | None, caps: GatewayCaps
) -> TokenTaken | Refusal | None:
    if not await use(tx, request):
        return Refusal.REPLAYED
    await tx.db.execute(_LOCK, new.client_id)
    device_token = encode_device_token(new.device_token)
    if (taken := await _taken(tx, new, device_token)) is not None:
        return taken
    if await tx.db.fetchval(_COUNT, new.client_id) >= caps.subscriptions_per_client:
        return Refusal.QUOTA
    done = await tx.db.execute(
        _SUBSCRIBE,
        new.subscription_id,
        new.client_id,
        new.channel.value,
        device_token,
        new.is_call,
        new.created_at,
    )
    return None if _rows(done) else await _taken(tx, new, device_token) or TokenTaken(None)


async def _taken(tx: Transaction, new: NewGatewaySubscription, device_token: bytes) -> TokenTaken | None:
    row = await tx.db.fetchrow(_TAKEN, device_token)
    if row is None:
        return None
    return TokenTaken(row[0] if (row[1], row[2]) == (new.client_id, new.channel) else None)


async def unsubscribe(
    tx: Transaction, client_id: bytes, ids: Sequence[bytes], request: Request | None
) -> Refusal | None:
    if not await use(tx, request):
        return Refusal.REPLAYED
    keys = [row[0] for row in await tx.db.fetch(_OWNED, client_id, list(set(ids)))]
    if len(keys) < len(set(ids)):
        return Refusal.UNKNOWN
    await tx.db.execute(_UNSUBSCRIBE, keys)
    return None


async def listed(db: asyncpg.Connection, client_id: bytes) -> list[Sequence[Any]]:
    """A client's subscriptions, for `with_rules`."""
    return list(await db.fetch(_LISTED, client_id))


async def with_rules(row: Sequence[Any], db: asyncpg.Connection) -> GatewaySubscription:
    return subscription_record(row, await db.fetch(_RULES, row[0]))


async def edit_rules(
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
    if not await use(tx, request):
        return Refusal.REPLAYED
    key = await tx.db.fetchval(_EDITED, client_id, subscription_id)
    if key is None:
        return Refusal.UNKNOWN
    savepoint = tx.db.transaction()
    await savepoint.start()
    edited = await _edit(tx, key, edit, rules)
    if edit is not RuleEdit.REMOVE and edited.total > caps.rules_per_subscription:
        await savepoint.rollback()
        return Refusal.QUOTA
    await savepoint.commit()
    await tx.db.execute(_TOUCH, now, key)
    return edited


async def _edit(tx: Transaction, key: GatewayKey, edit: RuleEdit, rules: Sequence[Rule]) -> RulesEdited:
    if edit is RuleEdit.REPLACE:
        await tx.db.execute(_CLEAR_RULES, key)
    sql = _REMOVE_RULES if edit is RuleEdit.REMOVE else _ADD_RULES
    done = await tx.db.execute(sql, key, [rule.topic for rule in rules], [rule.sender for rule in rules])
    return RulesEdited(_rows(done), await tx.db.fetchval(_RULE_COUNT, key))


async def topics(db: asyncpg.Connection, limit: int) -> list[bytes]:
    return [row[0] for row in await db.fetch(_TOPICS, limit)]


async def accept(
    tx: Transaction, statements: Sequence[ReceivedStatement], now: float, page: Page
) -> Accepted:
    found = await _found(tx, statements, page)
    chosen = await _kept(tx, candidates(found))
    if not chosen:
        return Accepted([], cut=found.cut, following=found.following)
    ids = [one.match.subscription_id for one in chosen]
    hashes = [one.statement_hash for one in chosen]
    pushed = {(row[0], row[1]) for row in await tx.db.fetch(_PUSHED, ids, hashes)}
    pairs = {(one.statement.sender, one.match.client_id) for one in chosen}
    planned = plan(chosen, pushed, await _windows(tx, sorted(pairs)), now, page)
    return accepted(found, planned, await _store(tx, planned, now))


async def _kept(tx: Transaction, chosen: Sequence[Candidate]) -> list[Candidate]:
    """Without those whose subscription was deleted since it was found."""
    if not chosen:
        return []
    keys = {row[0] for row in await tx.db.fetch(_KEEP, list({one.match.key for one in chosen}))}
    return [one for one in chosen if one.match.key in keys]


async def _found(tx: Transaction, statements: Sequence[ReceivedStatement], page: Page) -> Found:
    if not page.after:
        rest = statements[page.done :]
        rules = wanted_rules(rest)
        rows = await tx.db.fetch(
            _MATCH, [topic for _, topic in rules], [sender for sender, _ in rules], PAGE + 1
        )
        if len(rows) <= PAGE:
            return Found(rest, [_match(row) for row in rows])
    one = statements[page.done]
    by_topic: dict[bytes, list[Match]] = {topic: [] for topic in one.topics}
    for row in await tx.db.fetch(_MATCH_PART, one.topics, one.sender, page.after, PAGE):
        by_topic[row[1]].append(_match(row))
    return part_of(statements, page, list(by_topic.values()))


def _match(row: Sequence[Any]) -> Match:
    return Match(Rule(row[0], row[1]), GatewayKey(row[2]), row[3], row[4])


async def _windows(tx: Transaction, pairs: Sequence[Pair]) -> dict[Pair, Window]:
    rows = await tx.db.fetch(_WINDOWS, [sender for sender, _ in pairs], [client for _, client in pairs])
    return {(row[0], row[1]): decode_window(row[2], row[3]) for row in rows}


async def _store(tx: Transaction, planned: Plan, now: float) -> list[PushKey]:
    windows = sorted(planned.windows.items(), key=lambda item: item[0])
    await tx.db.execute(
        _SET_WINDOWS,
        [pair[0] for pair, _ in windows],
        [pair[1] for pair, _ in windows],
        [encode_times(window) for _, window in windows],
        [window.silent_until for _, window in windows],
        [idle_at(now)] * len(windows),
    )
    chosen: Sequence[Candidate] = planned.pushes
    rows = await tx.db.fetch(
        _PUSH,
        [one.match.subscription_id for one in chosen],
        [one.statement_hash for one in chosen],
        [one.statement.sender for one in chosen],
        [one.match.rule.topic for one in chosen],
        [keep_until(one.statement, now) for one in chosen],
        [one.match.key for one in chosen],
        [one.statement.data[: MAX_DATA + 1] for one in chosen],
        int(now),
    )
    return sorted(PushKey(row[0]) for row in rows)


async def pushes(db: asyncpg.Connection, keys: Sequence[PushKey]) -> list[StatementPush]:
    return [statement_push(row) for row in await db.fetch(_LOAD, keys)]


async def claim(tx: Transaction, keys: Sequence[PushKey]) -> set[PushKey]:
    return {PushKey(row[0]) for row in await tx.db.fetch(_CLAIM, keys)}


async def abandon(tx: Transaction) -> int:
    return _rows(await tx.db.execute(_ABANDON))


async def ended(
    tx: Transaction, sent: Sequence[PushKey], given_up: Sequence[PushKey], again: Sequence[PushKey], now: int
) -> None:
    await tx.db.execute(_SENT, sent, now)
    await tx.db.execute(_DONE, [*sent, *given_up])
    await tx.db.execute(_RELEASE, again)


async def unsent(db: asyncpg.Connection, after: PushKey, limit: int) -> list[PushKey]:
    return [PushKey(row[0]) for row in await db.fetch(_UNSENT, after, limit)]


async def device_gone(tx: Transaction, push: StatementPush) -> bool:
    done = await tx.db.execute(_GONE, push.subscription_key, encode_device_token(push.device_token))
    return _rows(done) == 1


async def records(db: asyncpg.Connection, subscription_id: bytes) -> list[PushRecord]:
    return [PushRecord(*row) for row in await db.fetch(_RECORDS, subscription_id)]


async def purge(tx: Transaction, now: int, limit: int) -> int:
    return sum([_rows(await tx.db.execute(sql, now, limit)) for sql in _PURGES])
