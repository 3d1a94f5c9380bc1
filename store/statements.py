"""The statement gateway: clients' subscriptions and rules, statements and their pushes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from store.interface import LeaseLost
from store.leases import Lease, of_topic, of_topic_part
from store.rows import statement_subscription
from store.sql_store import Database, Row, Sql, Transaction, reading, shared, writing
from store.statement_plan import (
    MAX_DATA,
    MAX_DROPPED,
    PAGE,
    Candidate,
    Found,
    Plan,
    accepted,
    candidates,
    decode_device,
    decode_window,
    encode_device,
    encode_times,
    idle_at,
    keep_until,
    part_of,
    plan,
    wanted_rules,
)
from store.statement_pushes import StatementPushes, expire_pending
from store.statement_records import (
    DEFAULT_GATEWAY_CAPS,
    DEFAULT_LIMITS,
    DROPPED,
    FIRST_PAGE,
    REGISTRATION_SECONDS,
    Accepted,
    BatchPage,
    GatewayCaps,
    GatewayKey,
    GatewaySubscription,
    MadeRule,
    Match,
    Outcome,
    Purged,
    PushKey,
    PushLimits,
    ReceivedStatement,
    Refusal,
    Rule,
    RuleEdit,
    RulesEdited,
    SignedRequest,
)
from store.statement_registrations import Registrations, use
from store.statement_reports import StatementReports

RENEWAL_STEP = 86_400
"Seconds after which it is written down again that a client was heard of."
_DROPPED = "'stored', 'limited', 'device_limited'"
"As the index spells them."

_RENEW = shared(f"""
UPDATE statement_subscriptions SET renewed_at = $1 WHERE client_id = $2 AND renewed_at < $1 - {RENEWAL_STEP}
""")
_OWNED = shared("""
SELECT sub_key FROM statement_subscriptions WHERE client_id = $1 AND subscription_id = ANY($2::bytea[])
ORDER BY sub_key FOR UPDATE
""")
# Statements are matched meanwhile.
_EDITED = shared("""
SELECT sub_key FROM statement_subscriptions WHERE client_id = $1 AND subscription_id = $2 FOR NO KEY UPDATE
""")
_UNSUBSCRIBE = shared("DELETE FROM statement_subscriptions WHERE sub_key = ANY($1::bigint[])")
_LISTED = shared("""
SELECT sub_key, subscription_id, client_id, channel, device_token, is_call, created_at, updated_at
FROM statement_subscriptions WHERE client_id = $1 ORDER BY sub_key
""")
_RULES = shared("""
SELECT sender, topic, created_at, baseline FROM statement_rules
WHERE sub_key = $1 AND (topic, sender) > ($2, $3) ORDER BY topic, sender LIMIT $4
""")
_RULE_COUNT = shared("SELECT count(*) FROM statement_rules WHERE sub_key = $1")
_ALL_RULES = shared("SELECT sender, topic FROM statement_rules WHERE sub_key = $1")
_NEW_RULE = 1
_ADD_RULES = shared("""
INSERT INTO statement_rules (topic, sender, sub_key, created_at, baseline)
SELECT * FROM unnest($1::bytea[], $2::bytea[], $3::bigint[], $4::double precision[], $5::smallint[])
ON CONFLICT DO NOTHING
""")
_HAS_NEW_RULES = shared("""
SELECT 1 FROM statement_rules WHERE baseline > 0
    AND sub_key = (SELECT sub_key FROM statement_subscriptions WHERE subscription_id = $1) LIMIT 1
""")
_NOTE_LISTENING = shared("""
INSERT INTO statement_listening (part, until) SELECT * FROM unnest($1::bigint[], $2::double precision[])
ON CONFLICT (part) DO UPDATE SET until = excluded.until
""")
_LISTENED = shared("SELECT until FROM statement_listening WHERE part = ANY($1::bigint[])")
_NEW_TOPICS = shared("""
SELECT DISTINCT topic FROM statement_rules WHERE baseline > 0 AND topic > $2 ORDER BY topic LIMIT $1
""")
_READ_BASELINE = shared("""
UPDATE statement_rules SET baseline = 2 WHERE baseline > 0 AND topic = ANY($1::bytea[])
""")
_SETTLE = shared("UPDATE statement_rules SET baseline = 0 WHERE baseline = 2 AND topic = ANY($1::bytea[])")
_REMOVE_RULES = Sql(
    sqlite="DELETE FROM statement_rules WHERE topic = ? AND sender = ? AND sub_key = ?",
    postgres="""
DELETE FROM statement_rules r USING unnest($1::bytea[], $2::bytea[], $3::bigint[]) i(topic, sender, sub_key)
WHERE r.sub_key = i.sub_key AND r.topic = i.topic AND r.sender = i.sender
""",
)
_WATCHED = shared("""
SELECT i.topic FROM unnest($1::bytea[]) i(topic)
WHERE EXISTS (SELECT 1 FROM statement_rules r WHERE r.topic = i.topic)
""")
_BEGIN_RULES = shared("SAVEPOINT rules")
_UNDO_RULES = shared("ROLLBACK TO rules")
_END_RULES = shared("RELEASE rules")
_TOUCH = shared("""
UPDATE statement_subscriptions SET updated_at = $1, renewed_at = $1 WHERE sub_key = $2
""")
# One seek for each topic, however many rules name it.
_TOPICS = shared("""
WITH RECURSIVE named(topic) AS (
    SELECT (SELECT topic FROM statement_rules ORDER BY topic LIMIT 1)
    UNION ALL
    SELECT (SELECT r.topic FROM statement_rules r WHERE r.topic > named.topic ORDER BY r.topic LIMIT 1)
    FROM named WHERE named.topic IS NOT NULL
)
SELECT topic FROM named WHERE topic IS NOT NULL LIMIT $1
""")
_MATCHED = """
SELECT r.sender, r.topic, r.sub_key, s.subscription_id, s.client_id, s.device_id, r.baseline, r.created_at
"""
_MATCH = shared(f"""
{_MATCHED} FROM unnest($1::bytea[], $2::bytea[]) i(sender, topic)
JOIN statement_rules r USING (topic, sender) JOIN statement_subscriptions s USING (sub_key)
LIMIT {PAGE + 1}
""")
_MATCH_PART = shared(f"""
{_MATCHED} FROM statement_rules r JOIN statement_subscriptions s USING (sub_key)
WHERE r.topic = $1 AND r.sender = $2 AND r.sub_key > $3 ORDER BY r.sub_key LIMIT $4
""")
# They may get other rules meanwhile. Locked in order: no two wait for each other. Not locked when they are
# looked for: one that is gone would make a page look like the last.
_KEEP = shared("""
SELECT sub_key FROM statement_subscriptions WHERE sub_key = ANY($1::bigint[]) ORDER BY sub_key FOR KEY SHARE
""")
_KNOWN = shared("""
SELECT p.device_id, p.statement_hash, p.outcome
FROM unnest($1::bytea[], $2::bytea[]) i(device_id, statement_hash)
JOIN statement_pushes p USING (device_id, statement_hash)
""")
_DEVICES = shared("""
SELECT d.device_id, d.accepted, d.dropped FROM statement_devices d
WHERE d.device_id = ANY($1::bytea[]) ORDER BY d.device_id FOR UPDATE OF d
""")
_SET_DEVICES = shared("""
INSERT INTO statement_devices (device_id, accepted, dropped, idle_at)
SELECT * FROM unnest($1::bytea[], $2::bytea[], $3::bigint[], $4::bigint[])
ON CONFLICT (device_id) DO UPDATE SET accepted = excluded.accepted, dropped = excluded.dropped,
    idle_at = excluded.idle_at
""")
_FORGET_DROPPED = shared(f"""
DELETE FROM statement_pushes WHERE push_key IN (
    SELECT push_key FROM statement_pushes WHERE device_id = $1 AND outcome IN ({_DROPPED})
    ORDER BY push_key LIMIT $2
)
""")
_WINDOWS = shared("""
SELECT w.sender, w.client_id, w.accepted, w.silent_until
FROM unnest($1::bytea[], $2::bytea[]) i(sender, client_id)
JOIN statement_rates w USING (sender, client_id) ORDER BY w.sender, w.client_id FOR UPDATE OF w
""")
_SET_WINDOWS = shared("""
INSERT INTO statement_rates (sender, client_id, accepted, silent_until, idle_at)
SELECT * FROM unnest($1::bytea[], $2::bytea[], $3::bytea[], $4::double precision[], $5::bigint[])
ON CONFLICT (sender, client_id) DO UPDATE SET accepted = excluded.accepted,
    silent_until = excluded.silent_until, idle_at = excluded.idle_at
""")
# What another daemon just decided on is not decided on again.
_PUSH = shared("""
INSERT INTO statement_pushes
    (device_id, subscription_id, statement_hash, sender, topic, accepted_at, keep_until, outcome)
SELECT * FROM unnest($1::bytea[], $2::bytea[], $3::bytea[], $4::bytea[], $5::bytea[], $6::bigint[],
    $7::bigint[], $8::text[])
ON CONFLICT (device_id, statement_hash) DO NOTHING
RETURNING push_key, device_id, statement_hash
""")
_PENDING = shared("""
INSERT INTO pending_statements
    (push_key, sub_key, data, topics, signature, expiry, expires_at, received_at)
SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::bytea[], $4::bytea[], $5::bytea[], $6::bytea[],
    $7::bigint[], $8::double precision[])
""")


def _purge(table: str, key: str, expired: str, returning: str = "") -> Sql:
    """Some of the rows that expired before."""
    return Sql(
        sqlite=f"""
DELETE FROM {table} WHERE ({key}) IN (SELECT {key} FROM {table} WHERE {expired} < ? LIMIT ?) {returning}
""",
        postgres=f"""
DELETE FROM {table} WHERE ctid = ANY(ARRAY(SELECT ctid FROM {table} WHERE {expired} < $1 LIMIT $2))
{returning}
""",
    )


_PURGE_REQUESTS = _purge("statement_requests", "request_id", "valid_until")
_PURGE_RATES = _purge("statement_rates", "sender, client_id", "idle_at")
_PURGE_PUSHES = _purge("statement_pushes", "push_key", "keep_until", "RETURNING device_id, outcome")
_PURGE_DEVICES = _purge("statement_devices", "device_id", "dropped = 0 AND idle_at")
_PURGE_REGISTRATIONS = _purge("statement_registrations", "registration_key", "created_at")
_PURGE_UNRENEWED = _purge("statement_subscriptions", "sub_key", "renewed_at")
_COUNT_PURGED = Sql(
    sqlite="UPDATE statement_devices SET dropped = max(0, dropped - ?2) WHERE device_id = ?1",
    postgres="""
UPDATE statement_devices d SET dropped = greatest(0, dropped - i.count)
FROM unnest($1::bytea[], $2::bigint[]) i(device_id, count) WHERE d.device_id = i.device_id
""",
)


class Statements(StatementPushes, Registrations, StatementReports):
    @writing()
    async def delete_gateway_subscriptions(
        self, tx: Transaction, client_id: bytes, ids: Sequence[bytes], request: SignedRequest | None
    ) -> Refusal | None:
        if not await use(tx, request):
            return Refusal.REPLAYED
        wanted = list(set(ids))
        keys = [row[0] for row in await tx.fetch(_OWNED, client_id, wanted)]
        if len(keys) < len(wanted):
            return Refusal.UNKNOWN
        await tx.execute(_UNSUBSCRIBE, keys)
        return None

    async def gateway_subscriptions(
        self, client_id: bytes, request: SignedRequest | None, *, now: int = 0
    ) -> list[GatewaySubscription] | Refusal:
        if not await self._use_request(request, client_id, now):
            return Refusal.REPLAYED
        return await self._listed(client_id)

    @writing()
    async def _use_request(
        self, tx: Transaction, request: SignedRequest | None, client_id: bytes, now: int
    ) -> bool:
        await tx.execute(_RENEW, now, client_id)
        return await use(tx, request)

    @reading
    async def _listed(self, db: Database, client_id: bytes) -> list[GatewaySubscription]:
        return [statement_subscription(row) for row in await db.fetch(_LISTED, client_id)]

    @reading
    async def gateway_rules(
        self, db: Database, key: GatewayKey, after: Rule | None, limit: int
    ) -> list[MadeRule]:
        sender, topic = after or (b"", b"")
        rows = await db.fetch(_RULES, key, topic, sender, limit)
        return [MadeRule(row[0], row[1], row[2], row[3] == 0) for row in rows]

    @writing()
    async def edit_rules(
        self,
        tx: Transaction,
        client_id: bytes,
        subscription_id: bytes,
        edit: RuleEdit,
        rules: Sequence[Rule],
        request: SignedRequest | None,
        *,
        now: float,
        caps: GatewayCaps = DEFAULT_GATEWAY_CAPS,
        most_new_topics: int | None = None,
    ) -> RulesEdited | Refusal:
        if not await use(tx, request):
            return Refusal.REPLAYED
        key = await tx.fetchval(_EDITED, client_id, subscription_id)
        if key is None:
            return Refusal.UNKNOWN
        new_topics = 0 if edit is RuleEdit.REMOVE else await _new_topics(tx, rules)
        if most_new_topics is not None and new_topics > most_new_topics:
            return Refusal.TOPICS
        await tx.execute(_BEGIN_RULES)
        edited = await _edit(tx, key, edit, rules, now)
        is_refused = edit is not RuleEdit.REMOVE and edited.total > caps.rules_per_subscription
        if is_refused:
            await tx.execute(_UNDO_RULES)
        await tx.execute(_END_RULES)
        if is_refused:
            return Refusal.QUOTA
        await tx.execute(_TOUCH, int(now), key)
        return edited._replace(new_topics=new_topics)

    @reading
    async def has_new_rules(self, db: Database, subscription_id: bytes) -> bool:
        return await db.fetchval(_HAS_NEW_RULES, subscription_id) is not None

    @reading
    async def new_rule_topics(self, db: Database, limit: int, after: bytes = b"") -> list[bytes]:
        return [row[0] for row in await db.fetch(_NEW_TOPICS, limit, after)]

    @writing()
    async def begin_baseline(self, tx: Transaction, topics: Sequence[bytes]) -> None:
        await _expect_owner(tx, map(of_topic, topics))
        await tx.execute(_READ_BASELINE, topics)

    @writing()
    async def settle_rules(self, tx: Transaction, topics: Sequence[bytes]) -> None:
        await _expect_owner(tx, map(of_topic, topics))
        await tx.execute(_SETTLE, topics)

    @writing(durable=False)
    async def note_listening(self, tx: Transaction, parts: Collection[int], until: float) -> None:
        await _expect_owner(tx, map(of_topic_part, parts))
        await tx.execute_rows(_NOTE_LISTENING, [(part, until) for part in sorted(parts)])

    @reading
    async def listened_until(self, db: Database, parts: Collection[int]) -> float:
        times = [row[0] for row in await db.fetch(_LISTENED, list(parts))]
        return min(times) if len(times) == len(parts) else 0.0

    @reading
    async def watched_topics(self, db: Database, limit: int) -> list[bytes]:
        return [row[0] for row in await db.fetch(_TOPICS, limit)]

    async def accept_statements(
        self,
        statements: Sequence[ReceivedStatement],
        now: float,
        page: BatchPage = FIRST_PAGE,
        limits: PushLimits = DEFAULT_LIMITS,
    ) -> Accepted:
        async def accept(tx: Transaction) -> Accepted:
            await _expect_watcher(tx, statements)
            return await _accept(tx, statements, now, page, limits)

        return await self._write(accept, durable=self._syncs_arrivals)

    @writing(durable=False)
    async def purge_statements(
        self, tx: Transaction, now: int, limit: int, *, unrenewed_before: int = 0
    ) -> Purged:
        purges = (_PURGE_REQUESTS, _PURGE_RATES, _PURGE_DEVICES)
        rows = sum([await tx.execute(purge, now, limit) for purge in purges])
        rows += await tx.execute(_PURGE_REGISTRATIONS, now - REGISTRATION_SECONDS, limit)
        purged = await tx.fetch(_PURGE_PUSHES, now, limit)
        counts = Counter(device_id for device_id, outcome in purged if outcome in DROPPED)
        await tx.execute_rows(_COUNT_PURGED, sorted(counts.items()))
        expired = await expire_pending(tx, now, limit)
        unrenewed = await tx.execute(_PURGE_UNRENEWED, unrenewed_before, limit)
        return Purged(rows + len(purged), expired, unrenewed)


async def _new_topics(tx: Transaction, rules: Sequence[Rule]) -> int:
    topics = {rule.topic for rule in rules}
    return len(topics) - len(await tx.fetch_rows(_WATCHED, [(topic,) for topic in topics]))


async def _edit(
    tx: Transaction, key: GatewayKey, edit: RuleEdit, rules: Sequence[Rule], now: float
) -> RulesEdited:
    """A rule that stays is not a new one."""
    removed = rules
    if edit is RuleEdit.REPLACE:
        kept = set(rules)
        found = [Rule(row[0], row[1]) for row in await tx.fetch(_ALL_RULES, key)]
        removed = [rule for rule in found if rule not in kept]
    if edit is not RuleEdit.ADD:
        changed = await tx.execute_rows(_REMOVE_RULES, [(rule.topic, rule.sender, key) for rule in removed])
    if edit is not RuleEdit.REMOVE:
        added = [(rule.topic, rule.sender, key, now, _NEW_RULE) for rule in rules]
        changed = await tx.execute_rows(_ADD_RULES, added)
        tx.rules_added(rules)
    if edit is RuleEdit.REPLACE:
        changed = len(rules)
    return RulesEdited(changed, await tx.fetchval(_RULE_COUNT, key))


async def _expect_owner(tx: Transaction, leases: Iterable[Lease]) -> None:
    """LeaseLost unless this daemon owns all of them, and then until the end."""
    wanted = set(leases)
    if await tx.held(wanted) != wanted:
        raise LeaseLost("another daemon watches these topics by now")


async def _expect_watcher(tx: Transaction, statements: Sequence[ReceivedStatement]) -> None:
    """LeaseLost if this daemon watches none of the topics any more. One of them is enough: whoever watches
    the others decides the same."""
    topics = {of_topic(topic) for one in statements for topic in one.topics}
    if topics and not await tx.held(topics):
        raise LeaseLost("another daemon watches these topics by now")


async def _accept(
    tx: Transaction,
    statements: Sequence[ReceivedStatement],
    now: float,
    page: BatchPage,
    limits: PushLimits,
) -> Accepted:
    found = await _found(tx, statements, page)
    chosen = candidates(found)
    kept = await tx.kept(_KEEP, {one.match.key for one in chosen})
    chosen = [one for one in chosen if one.match.key in kept]
    if not chosen:
        return Accepted([], cut=found.cut, following=found.following)
    pairs = sorted({(one.statement.sender, one.match.client_id) for one in chosen})
    windows = {
        (sender, client_id): decode_window(times, silent_until)
        for sender, client_id, times, silent_until in await tx.fetch_rows(_WINDOWS, pairs)
    }
    ids = sorted({one.match.device_id for one in chosen})
    devices = {row[0]: decode_device(row[1], row[2]) for row in await tx.fetch(_DEVICES, ids)}
    # After the locks: what another daemon just decided on shows.
    rows = await tx.fetch_rows(_KNOWN, [one.name for one in chosen])
    known = {(row[0], row[1]): Outcome(row[2]) for row in rows}
    planned = plan(chosen, known, windows, devices, now, page, limits)
    return accepted(found, planned, await _store(tx, planned, now))


async def _found(tx: Transaction, statements: Sequence[ReceivedStatement], page: BatchPage) -> Found:
    if not page.after:
        rest = statements[page.done :]
        rows = await tx.fetch_rows(_MATCH, tx.possible_rules(wanted_rules(rest)))
        if len(rows) <= PAGE:
            return Found(rest, [_match(row) for row in rows])
    one = statements[page.done]
    by_topic = [
        [_match(row) for row in await tx.fetch(_MATCH_PART, topic, one.sender, page.after, PAGE)]
        for topic in one.topics
    ]
    return part_of(statements, page, by_topic)


def _match(row: Row) -> Match:
    return Match(Rule(row[0], row[1]), GatewayKey(row[2]), row[3], row[4], row[5], row[6] == 0, row[7])


async def _store(tx: Transaction, planned: Plan, now: float) -> list[PushKey]:
    windows = [
        (*pair, encode_times(window), window.silent_until, idle_at(now))
        for pair, window in sorted(planned.windows.items(), key=lambda item: item[0])
    ]
    await tx.execute_rows(_SET_WINDOWS, windows)
    rows = [_record_row(one, outcome, now) for one, outcome in planned.decisions]
    keys = {(row[1], row[2]): PushKey(row[0]) for row in await tx.fetch_rows(_PUSH, rows)}
    pending = [
        _pending_row(key, one, now)
        for one, outcome in planned.decisions
        if outcome is Outcome.WAITING and (key := keys.get(one.name)) is not None
    ]
    await tx.execute_rows(_PENDING, pending)
    await _store_devices(tx, planned, now)
    return sorted(row[0] for row in pending)


async def _store_devices(tx: Transaction, planned: Plan, now: float) -> None:
    rows = []
    for device_id, window in sorted(planned.devices.items(), key=lambda item: item[0]):
        dropped = window.dropped
        if dropped > MAX_DROPPED:
            dropped -= await tx.execute(_FORGET_DROPPED, device_id, dropped - MAX_DROPPED + MAX_DROPPED // 4)
        rows.append((device_id, encode_device(window), dropped, idle_at(now)))
    await tx.execute_rows(_SET_DEVICES, rows)


def _record_row(one: Candidate, outcome: Outcome, now: float) -> Row:
    statement, statement_hash, match = one
    ids = match.device_id, match.subscription_id, statement_hash, statement.sender, match.rule.topic
    # The rule was there before, whatever the clocks of two daemons, or one that was set back, say.
    accepted_at = max(int(now), int(match.made_at))
    return *ids, accepted_at, keep_until(statement, outcome, now), outcome.value


def _pending_row(key: PushKey, one: Candidate, now: float) -> Row:
    statement = one.statement
    carried = (
        statement.data[: MAX_DATA + 1],
        b"".join(statement.topics),
        statement.signature,
        statement.expiry,
    )
    # One that the node had stored, and that is not older than the rule, came after the rule was made.
    received_at = min(max(statement.received_at, one.match.made_at), now)
    return key, one.match.key, *carried, statement.expires_at, received_at
