"""What operators ask about the statement gateway: counts, and what became of statements."""

from __future__ import annotations

from store.rows import push_record
from store.sql_store import Database, SqlStore, reading, shared
from store.statement_records import Channel, GatewayCounts, Outcome, OutcomeCount, PushRecord

MOST_RECORDS = 10_000

_SUBSCRIPTIONS = shared("SELECT channel, count(*) FROM statement_subscriptions GROUP BY channel")
_RULES = shared("SELECT count(*) FROM statement_rules")
# One seek for each topic, however many rules name it.
_TOPICS = shared("""
WITH RECURSIVE named(topic) AS (
    SELECT (SELECT topic FROM statement_rules ORDER BY topic LIMIT 1)
    UNION ALL
    SELECT (SELECT r.topic FROM statement_rules r WHERE r.topic > named.topic ORDER BY r.topic LIMIT 1)
    FROM named WHERE named.topic IS NOT NULL
)
SELECT count(topic) FROM named
""")
_WAITING = shared("SELECT count(*) FROM pending_statements")
_HEARD = shared("SELECT max(until) FROM statement_listening")
# Whatever deletes a subscription deletes the pushes that wait for it, but not what is remembered of them.
# No EXISTS: PostgreSQL would sometimes read all that wait for it first.
_OUTCOME = f"""
CASE WHEN p.outcome = '{Outcome.WAITING}'
    AND (SELECT n.push_key FROM pending_statements n WHERE n.push_key = p.push_key) IS NULL
THEN '{Outcome.REVOKED}' ELSE p.outcome END AS outcome
"""
_OUTCOMES = shared(f"""
SELECT channel, outcome, count(*) FROM (
    SELECT {_OUTCOME}, (
        SELECT channel FROM statement_subscriptions s WHERE s.subscription_id = p.subscription_id
    ) AS channel
    FROM statement_pushes p ORDER BY push_key DESC LIMIT $1
) newest GROUP BY channel, outcome ORDER BY channel, outcome
""")
_COLUMNS = "push_key, subscription_id, statement_hash, sender, topic, accepted_at, sent_at"


def _newest(column: str) -> str:
    """The newest of a column's value, in the order in which they came."""
    chosen = f"""
SELECT {_COLUMNS}, {_OUTCOME} FROM statement_pushes p WHERE {column} = $1 ORDER BY push_key DESC LIMIT $2
"""
    return f"SELECT {_COLUMNS}, outcome FROM ({chosen}) newest ORDER BY push_key"


_RECORDS = shared(_newest("subscription_id"))
_RECORDS_OF_SENDER = shared(_newest("sender"))


class StatementReports(SqlStore):
    @reading
    async def gateway_counts(self, db: Database) -> GatewayCounts:
        rows = await db.fetch(_SUBSCRIPTIONS)
        return GatewayCounts(
            subscriptions={Channel(channel): count for channel, count in rows},
            rules=await db.fetchval(_RULES),
            topics=await db.fetchval(_TOPICS),
            waiting=await db.fetchval(_WAITING),
            heard_at=await db.fetchval(_HEARD),
        )

    @reading
    async def newest_outcomes(self, db: Database, limit: int) -> list[OutcomeCount]:
        rows = await db.fetch(_OUTCOMES, limit)
        return [OutcomeCount(row[0] and Channel(row[0]), Outcome(row[1]), row[2]) for row in rows]

    @reading
    async def push_records(
        self, db: Database, subscription_id: bytes, limit: int = MOST_RECORDS
    ) -> list[PushRecord]:
        return [push_record(row) for row in await db.fetch(_RECORDS, subscription_id, limit)]

    @reading
    async def push_records_of_sender(
        self, db: Database, sender: bytes, limit: int = MOST_RECORDS
    ) -> list[PushRecord]:
        return [push_record(row) for row in await db.fetch(_RECORDS_OF_SENDER, sender, limit)]
