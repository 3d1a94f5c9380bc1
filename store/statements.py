"""The statement gateway: clients' subscriptions and rules, statements and their pushes."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.device_token import encode_device_token
from store.leases import STATEMENTS
from store.rows import statement_push, statement_subscription
from store.sql_store import Database, Row, Sql, SqlStore, Transaction, reading, shared, writing
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
from store.statement_records import (
    DEFAULT_GATEWAY_CAPS,
    FIRST_PAGE,
    Accepted,
    BatchPage,
    GatewayCaps,
    GatewayKey,
    GatewaySubscription,
    Match,
    NewGatewaySubscription,
    PushKey,
    PushRecord,
    ReceivedStatement,
    Refusal,
    Rule,
    RuleEdit,
    RulesEdited,
    SignedRequest,
    StatementPush,
    TokenTaken,
)

_USE = shared("""
INSERT INTO statement_requests (request_id, valid_until) VALUES ($1, $2) ON CONFLICT DO NOTHING
""")
_TAKEN = shared("""
SELECT subscription_id, client_id, channel FROM statement_subscriptions WHERE device_token = $1
""")
_COUNT = shared("SELECT count(*) FROM statement_subscriptions WHERE client_id = $1")
_SUBSCRIBE = shared("""
INSERT INTO statement_subscriptions
    (subscription_id, client_id, channel, device_token, is_call, created_at, updated_at)
VALUES ($1, $2, $3, $4, $5, $6, $6) ON CONFLICT (device_token) DO NOTHING
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
_RULES = shared("SELECT sender, topic FROM statement_rules WHERE sub_key = $1 ORDER BY sender, topic")
_RULE_COUNT = shared("SELECT count(*) FROM statement_rules WHERE sub_key = $1")
_CLEAR_RULES = shared("DELETE FROM statement_rules WHERE sub_key = $1")
_ADD_RULES = shared("""
INSERT INTO statement_rules (topic, sender, sub_key)
SELECT * FROM unnest($1::bytea[], $2::bytea[], $3::bigint[]) ON CONFLICT DO NOTHING
""")
_REMOVE_RULES = Sql(
    sqlite="DELETE FROM statement_rules WHERE topic = ? AND sender = ? AND sub_key = ?",
    postgres="""
DELETE FROM statement_rules r USING unnest($1::bytea[], $2::bytea[], $3::bigint[]) i(topic, sender, sub_key)
WHERE r.sub_key = i.sub_key AND r.topic = i.topic AND r.sender = i.sender
""",
)
_BEGIN_RULES = shared("SAVEPOINT rules")
_UNDO_RULES = shared("ROLLBACK TO rules")
_END_RULES = shared("RELEASE rules")
_TOUCH = shared("UPDATE statement_subscriptions SET updated_at = $1 WHERE sub_key = $2")
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
_MATCHED = "SELECT r.sender, r.topic, r.sub_key, s.subscription_id, s.client_id"
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
_PUSHED = shared("""
SELECT p.subscription_id, p.statement_hash
FROM unnest($1::bytea[], $2::bytea[]) i(subscription_id, statement_hash)
JOIN statement_pushes p USING (subscription_id, statement_hash)
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
INSERT INTO statement_pushes (subscription_id, statement_hash, sender, topic, accepted_at, keep_until)
SELECT * FROM unnest($1::bytea[], $2::bytea[], $3::bytea[], $4::bytea[], $5::bigint[], $6::bigint[])
ON CONFLICT (subscription_id, statement_hash) DO NOTHING
RETURNING push_key, subscription_id, statement_hash
""")
_PENDING = shared("""
INSERT INTO pending_statements (push_key, sub_key, data)
SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::bytea[])
""")
_LOAD = shared("""
SELECT n.push_key, n.sub_key, p.subscription_id, p.statement_hash, s.channel, s.is_call, s.device_token,
    p.sender, p.topic, n.data, p.accepted_at
FROM pending_statements n JOIN statement_pushes p USING (push_key)
JOIN statement_subscriptions s USING (sub_key)
WHERE n.push_key = ANY($1::bigint[])
""")
_CLAIM = shared("""
UPDATE pending_statements SET attempted = true WHERE push_key = ANY($1::bigint[]) RETURNING push_key
""")
_RELEASE = shared("UPDATE pending_statements SET attempted = false WHERE push_key = ANY($1::bigint[])")
_ABANDON = shared("DELETE FROM pending_statements WHERE attempted")
_SENT = shared("UPDATE statement_pushes SET sent_at = $1 WHERE push_key = ANY($2::bigint[])")
_DONE = shared("DELETE FROM pending_statements WHERE push_key = ANY($1::bigint[])")
_UNSENT = shared("SELECT push_key FROM pending_statements WHERE push_key > $1 ORDER BY push_key LIMIT $2")
_GONE = shared("DELETE FROM statement_subscriptions WHERE sub_key = $1 AND device_token = $2")
_RECORDS = shared("""
SELECT subscription_id, statement_hash, sender, topic, accepted_at, sent_at FROM statement_pushes
WHERE subscription_id = $1 ORDER BY push_key
""")


def _purge(table: str, key: str, expires: str) -> Sql:
    """Some of the rows that expired before."""
    return Sql(
        sqlite=f"""
DELETE FROM {table} WHERE ({key}) IN (SELECT {key} FROM {table} WHERE {expires} < ? LIMIT ?)
""",
        postgres=f"""
DELETE FROM {table} WHERE ctid = ANY(ARRAY(SELECT ctid FROM {table} WHERE {expires} < $1 LIMIT $2))
""",
    )


_PURGE_REQUESTS = _purge("statement_requests", "request_id", "valid_until")
_PURGE_RATES = _purge("statement_rates", "sender, client_id", "idle_at")
_PURGE_PUSHES = _purge("statement_pushes", "push_key", "keep_until")


class Statements(SqlStore):
    @writing()
    async def add_gateway_subscription(
        self,
        tx: Transaction,
        new: NewGatewaySubscription,
        request: SignedRequest | None,
        caps: GatewayCaps = DEFAULT_GATEWAY_CAPS,
    ) -> TokenTaken | Refusal | None:
        if not await _use(tx, request):
            return Refusal.REPLAYED
        # A client's requests come one after the other here, so that what is counted stays so.
        await tx.lock(new.client_id)
        device_token = encode_device_token(new.device_token)
        if (taken := await _taken(tx, new, device_token)) is not None:
            return taken
        if await tx.fetchval(_COUNT, new.client_id) >= caps.subscriptions_per_client:
            return Refusal.QUOTA
        ids = new.subscription_id, new.client_id, new.channel.value
        if await tx.execute(_SUBSCRIBE, *ids, device_token, new.is_call, new.created_at):
            return None
        return await _taken(tx, new, device_token) or TokenTaken(None)

    @writing()
    async def delete_gateway_subscriptions(
        self, tx: Transaction, client_id: bytes, ids: Sequence[bytes], request: SignedRequest | None
    ) -> Refusal | None:
        if not await _use(tx, request):
            return Refusal.REPLAYED
        wanted = list(set(ids))
        keys = [row[0] for row in await tx.fetch(_OWNED, client_id, wanted)]
        if len(keys) < len(wanted):
            return Refusal.UNKNOWN
        await tx.execute(_UNSUBSCRIBE, keys)
        return None

    async def gateway_subscriptions(
        self, client_id: bytes, request: SignedRequest | None
    ) -> list[GatewaySubscription] | Refusal:
        """Each is read by itself: it may have thousands of rules, and others wait meanwhile."""
        if not await self._use_request(request):
            return Refusal.REPLAYED
        return [await self._with_rules(row) for row in await self._listed(client_id)]

    @writing()
    async def _use_request(self, tx: Transaction, request: SignedRequest | None) -> bool:
        return await _use(tx, request)

    @reading
    async def _listed(self, db: Database, client_id: bytes) -> Sequence[Row]:
        """A client's subscriptions, for `_with_rules`."""
        return await db.fetch(_LISTED, client_id)

    @reading
    async def _with_rules(self, db: Database, row: Row) -> GatewaySubscription:
        return statement_subscription(row, await db.fetch(_RULES, row[0]))

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
        now: int,
        caps: GatewayCaps = DEFAULT_GATEWAY_CAPS,
    ) -> RulesEdited | Refusal:
        if not await _use(tx, request):
            return Refusal.REPLAYED
        key = await tx.fetchval(_EDITED, client_id, subscription_id)
        if key is None:
            return Refusal.UNKNOWN
        await tx.execute(_BEGIN_RULES)
        edited = await _edit(tx, key, edit, rules)
        is_refused = edit is not RuleEdit.REMOVE and edited.total > caps.rules_per_subscription
        if is_refused:
            await tx.execute(_UNDO_RULES)
        await tx.execute(_END_RULES)
        if is_refused:
            return Refusal.QUOTA
        await tx.execute(_TOUCH, now, key)
        return edited

    @reading
    async def watched_topics(self, db: Database, limit: int) -> list[bytes]:
        return [row[0] for row in await db.fetch(_TOPICS, limit)]

    async def accept_statements(
        self, statements: Sequence[ReceivedStatement], now: float, page: BatchPage = FIRST_PAGE
    ) -> Accepted:
        return await self._write_as_owner(
            STATEMENTS, lambda tx: _accept(tx, statements, now, page), durable=self._syncs_arrivals
        )

    @reading
    async def statement_pushes(self, db: Database, keys: Sequence[PushKey]) -> list[StatementPush]:
        return [statement_push(row) for row in await db.fetch(_LOAD, keys)]

    @writing(durable=False, as_owner_of=STATEMENTS)
    async def claim_statement_pushes(self, tx: Transaction, keys: Sequence[PushKey]) -> set[PushKey]:
        return {PushKey(row[0]) for row in await tx.fetch(_CLAIM, keys)}

    @writing(as_owner_of=STATEMENTS)
    async def abandon_claimed_pushes(self, tx: Transaction) -> int:
        return await tx.execute(_ABANDON)

    @writing(durable=False)
    async def end_statement_pushes(
        self,
        tx: Transaction,
        *,
        sent: Sequence[PushKey],
        given_up: Sequence[PushKey],
        again: Sequence[PushKey],
        now: int,
    ) -> None:
        await tx.execute(_SENT, now, sent)
        await tx.execute(_DONE, [*sent, *given_up])
        await tx.execute(_RELEASE, again)

    @reading
    async def unsent_statement_pushes(self, db: Database, *, after: PushKey, limit: int) -> list[PushKey]:
        return [PushKey(row[0]) for row in await db.fetch(_UNSENT, after, limit)]

    @writing()
    async def delete_gone_device(self, tx: Transaction, push: StatementPush) -> bool:
        device_token = encode_device_token(push.device_token)
        return await tx.execute(_GONE, push.subscription_key, device_token) == 1

    @reading
    async def push_records(self, db: Database, subscription_id: bytes) -> list[PushRecord]:
        return [PushRecord(*row) for row in await db.fetch(_RECORDS, subscription_id)]

    @writing(durable=False)
    async def purge_statements(self, tx: Transaction, now: int, limit: int) -> int:
        purges = (_PURGE_REQUESTS, _PURGE_RATES, _PURGE_PUSHES)
        return sum([await tx.execute(purge, now, limit) for purge in purges])


async def _use(tx: Transaction, request: SignedRequest | None) -> bool:
    """False: it was made before."""
    return request is None or await tx.execute(_USE, *request) == 1


async def _taken(tx: Transaction, new: NewGatewaySubscription, device_token: bytes) -> TokenTaken | None:
    row = await tx.fetchrow(_TAKEN, device_token)
    if row is None:
        return None
    return TokenTaken(row[0] if (row[1], row[2]) == (new.client_id, new.channel) else None)


async def _edit(tx: Transaction, key: GatewayKey, edit: RuleEdit, rules: Sequence[Rule]) -> RulesEdited:
    if edit is RuleEdit.REPLACE:
        await tx.execute(_CLEAR_RULES, key)
    statement = _REMOVE_RULES if edit is RuleEdit.REMOVE else _ADD_RULES
    changed = await tx.execute_rows(statement, [(rule.topic, rule.sender, key) for rule in rules])
    if edit is not RuleEdit.REMOVE:
        tx.rules_added(rules)
    return RulesEdited(changed, await tx.fetchval(_RULE_COUNT, key))


async def _accept(
    tx: Transaction, statements: Sequence[ReceivedStatement], now: float, page: BatchPage
) -> Accepted:
    found = await _found(tx, statements, page)
    chosen = candidates(found)
    kept = await tx.kept(_KEEP, {one.match.key for one in chosen})
    chosen = [one for one in chosen if one.match.key in kept]
    if not chosen:
        return Accepted([], cut=found.cut, following=found.following)
    made = [(one.match.subscription_id, one.statement_hash) for one in chosen]
    pushed = {(row[0], row[1]) for row in await tx.fetch_rows(_PUSHED, made)}
    pairs = sorted({(one.statement.sender, one.match.client_id) for one in chosen})
    windows = {
        (sender, client_id): decode_window(times, silent_until)
        for sender, client_id, times, silent_until in await tx.fetch_rows(_WINDOWS, pairs)
    }
    planned = plan(chosen, pushed, windows, now, page)
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
    return Match(Rule(row[0], row[1]), GatewayKey(row[2]), row[3], row[4])


async def _store(tx: Transaction, planned: Plan, now: float) -> list[PushKey]:
    windows = [
        (*pair, encode_times(window), window.silent_until, idle_at(now))
        for pair, window in sorted(planned.windows.items(), key=lambda item: item[0])
    ]
    await tx.execute_rows(_SET_WINDOWS, windows)
    pushes = [_push_row(one, now) for one in planned.pushes]
    keys = {(row[1], row[2]): PushKey(row[0]) for row in await tx.fetch_rows(_PUSH, pushes)}
    pending = [
        (key, one.match.key, one.statement.data[: MAX_DATA + 1])
        for one in planned.pushes
        if (key := keys.get((one.match.subscription_id, one.statement_hash))) is not None
    ]
    await tx.execute_rows(_PENDING, pending)
    return sorted(keys.values())


def _push_row(one: Candidate, now: float) -> Row:
    statement, statement_hash, match = one
    ids = match.subscription_id, statement_hash, statement.sender, match.rule.topic
    return *ids, int(now), keep_until(statement, now)
