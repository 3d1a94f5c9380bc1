"""Pushes of statements that are to be made: checked again when they are claimed, and what became of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from protocol.device_token import encode_device_token
from protocol.hiding import hides_bytes
from store.leases import STATEMENTS
from store.rows import statement_push
from store.sql_store import Database, SqlStore, Transaction, reading, shared, writing
from store.statement_records import (
    DEFAULT_LIMITS,
    Channel,
    Claim,
    GatewayKey,
    Outcome,
    PushKey,
    PushLimits,
    StatementPush,
)

TOPIC_SIZE = 32
INFINITY = float("inf")

_LOAD = shared("""
SELECT n.push_key, n.sub_key, p.subscription_id, s.client_id, p.statement_hash, s.channel, s.is_call,
    s.proven, s.device_token, p.sender, p.topic, n.data, n.signature, n.expiry, n.received_at
FROM pending_statements n JOIN statement_pushes p USING (push_key)
JOIN statement_subscriptions s USING (sub_key)
WHERE n.push_key = ANY($1::bigint[])
""")
_CLAIMABLE = shared("""
SELECT n.push_key, n.sub_key, s.channel, s.is_call, p.sender, p.topic, n.topics, p.accepted_at, n.expires_at,
    n.received_at
FROM pending_statements n JOIN statement_pushes p USING (push_key)
JOIN statement_subscriptions s USING (sub_key)
WHERE n.push_key = ANY($1::bigint[])
""")
_ALLOWED = shared("""
SELECT i.push_key, r.topic, r.created_at
FROM unnest($1::bigint[], $2::bytea[], $3::bytea[], $4::bigint[]) i(push_key, topic, sender, sub_key)
JOIN statement_rules r ON r.topic = i.topic AND r.sender = i.sender AND r.sub_key = i.sub_key
""")
_CLAIM = shared("UPDATE pending_statements SET attempted = true WHERE push_key = ANY($1::bigint[])")
_RELEASE = shared("UPDATE pending_statements SET attempted = false WHERE push_key = ANY($1::bigint[])")
_UNKNOWN = shared("SELECT push_key FROM pending_statements WHERE attempted LIMIT $1")
_EXPIRED = shared("SELECT push_key FROM pending_statements WHERE expires_at <= $1 AND NOT attempted LIMIT $2")
_SENT = shared(f"""
UPDATE statement_pushes SET sent_at = $1, outcome = '{Outcome.SENT}' WHERE push_key = ANY($2::bigint[])
""")
_PROVEN = shared("""
UPDATE statement_subscriptions SET proven = true WHERE NOT proven AND sub_key IN (
    SELECT n.sub_key FROM pending_statements n WHERE n.push_key = ANY($1::bigint[])
)
""")
_OUTCOME = shared("UPDATE statement_pushes SET outcome = $1 WHERE push_key = ANY($2::bigint[])")
_TOPIC = shared("UPDATE statement_pushes SET topic = $1 WHERE push_key = ANY($2::bigint[])")
_DONE = shared("DELETE FROM pending_statements WHERE push_key = ANY($1::bigint[])")
_UNSENT = shared("SELECT push_key FROM pending_statements WHERE push_key > $1 ORDER BY push_key LIMIT $2")
_GONE = shared("DELETE FROM statement_subscriptions WHERE sub_key = $1 AND device_token = $2")

ABANDONED_AT_ONCE = 1_000_000
"More than a provider is ever sent at once."


@hides_bytes
class _Claimable(NamedTuple):
    key: PushKey
    subscription_key: GatewayKey
    channel: str
    is_call: bool
    sender: bytes
    topic: bytes
    topics: bytes
    accepted_at: int
    expires_at: int
    received_at: float

    @property
    def all_topics(self) -> list[bytes]:
        return [self.topics[at : at + TOPIC_SIZE] for at in range(0, len(self.topics), TOPIC_SIZE)]

    def too_late(self, now: float, limits: PushLimits) -> Outcome | None:
        if self.expires_at <= now:
            return Outcome.EXPIRED
        is_for_call = self.is_call or self.channel == Channel.VOIP
        return Outcome.LATE if is_for_call and now - self.received_at > limits.call_age else None

    def allowed_topic(self, rules: Mapping[bytes, float]) -> bytes | None:
        """The first topic with a rule that is not younger than the statement."""
        return next(
            (topic for topic in self.all_topics if rules.get(topic, INFINITY) < self.accepted_at + 1), None
        )


class StatementPushes(SqlStore):
    @reading
    async def statement_pushes(self, db: Database, keys: Sequence[PushKey]) -> list[StatementPush]:
        return [statement_push(row) for row in await db.fetch(_LOAD, keys)]

    @writing(durable=False, as_owner_of=STATEMENTS)
    async def claim_statement_pushes(
        self, tx: Transaction, keys: Sequence[PushKey], now: float, limits: PushLimits = DEFAULT_LIMITS
    ) -> Claim:
        pushes = [_Claimable(*row) for row in await tx.fetch(_CLAIMABLE, keys)]
        rules = await _rules(tx, pushes)
        claimed, changed, dropped = [], [], {}
        for push in pushes:
            topic = push.allowed_topic(rules.get(push.key, {}))
            outcome = Outcome.REVOKED if topic is None else push.too_late(now, limits)
            if outcome is not None:
                dropped[push.key] = outcome
            elif topic == push.topic:
                claimed.append(push.key)
            else:
                changed.append(push.key)
                await tx.execute(_TOPIC, topic, [push.key])
        await tx.execute(_CLAIM, claimed)
        await _drop(tx, dropped)
        return Claim(frozenset(claimed), frozenset(changed), dropped)

    @writing(as_owner_of=STATEMENTS)
    async def abandon_claimed_pushes(self, tx: Transaction) -> int:
        keys = [PushKey(row[0]) for row in await tx.fetch(_UNKNOWN, ABANDONED_AT_ONCE)]
        await _drop(tx, dict.fromkeys(keys, Outcome.UNKNOWN))
        return len(keys)

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
        await tx.execute(_PROVEN, sent)
        await tx.execute(_DONE, sent)
        await _drop(tx, dict.fromkeys(given_up, Outcome.FAILED))
        await tx.execute(_RELEASE, again)

    @reading
    async def unsent_statement_pushes(self, db: Database, *, after: PushKey, limit: int) -> list[PushKey]:
        return [PushKey(row[0]) for row in await db.fetch(_UNSENT, after, limit)]

    @writing()
    async def delete_gone_device(self, tx: Transaction, push: StatementPush) -> bool:
        device_token = encode_device_token(push.device_token)
        return await tx.execute(_GONE, push.subscription_key, device_token) == 1


async def _rules(tx: Transaction, pushes: Sequence[_Claimable]) -> dict[PushKey, dict[bytes, float]]:
    """When the rules were made that allow them now, by topic."""
    asked = [
        (push.key, topic, push.sender, push.subscription_key) for push in pushes for topic in push.all_topics
    ]
    found: dict[PushKey, dict[bytes, float]] = {}
    for key, topic, created_at in await tx.fetch_rows(_ALLOWED, asked):
        found.setdefault(PushKey(key), {})[topic] = created_at
    return found


async def _drop(tx: Transaction, dropped: Mapping[PushKey, Outcome]) -> None:
    for outcome in sorted(set(dropped.values())):
        await tx.execute(_OUTCOME, outcome.value, [key for key, found in dropped.items() if found is outcome])
    await tx.execute(_DONE, list(dropped))


async def expire_pending(tx: Transaction, now: int, limit: int) -> int:
    """Drop some of those whose statements have expired."""
    keys = [PushKey(row[0]) for row in await tx.fetch(_EXPIRED, now, limit)]
    await _drop(tx, dict.fromkeys(keys, Outcome.EXPIRED))
    return len(keys)
