"""Subscriptions, as clients see them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from protocol.addresses import SmpServer
from protocol.encoding import EntityId, new_tuple
from protocol.hiding import hides_bytes
from protocol.statuses import SubInput, SubState, move_sub
from store import deletion
from store.policy import Owner, RowCaps
from store.records import (
    CreatedSubscription,
    DeletedSubscription,
    NewSubscription,
    QueueRow,
    ServerKey,
    SnewRefusal,
    SubKey,
    SubscriptionRecord,
    TokenKey,
)
from store.rows import DELETED, SUBSCRIPTION_COLUMNS, subscription_or_none
from store.sql_store import (
    Database,
    Row,
    Sql,
    SqlStore,
    Transaction,
    address_columns,
    for_each_id,
    shared,
    smp_server,
    writing,
)

_BY_ID = for_each_id(
    SUBSCRIPTION_COLUMNS,
    f"""
LEFT JOIN subscriptions s ON s.subscription_id = {{}}
LEFT JOIN smp_servers v ON v.server_key = s.server_key
LEFT JOIN tokens t ON t.token_key = s.token_key AND t.status <> '{DELETED}'
""",
)


def _found(queue: str) -> Sql:
    """A row for each queue that is there; and for each known router one at least, by the first of its queues.

    Most queues are new. SQLite hands each row over by itself, and the interpreter lock with it.
    """
    return shared(f"""
SELECT v.hosts, v.port, v.key_hash, v.server_key, s.notifier_id, s.sub_key, s.subscription_id, s.token_key,
    s.notifier_key, s.state, s.associated, t.status = '{DELETED}'
FROM unnest(
    $1::text[], $2::text[], $3::bytea[], $4::bytea[], $5::bool[]
) i(hosts, port, key_hash, notifier_id, is_first)
JOIN smp_servers v USING (hosts, port, key_hash)
LEFT JOIN {queue}
LEFT JOIN tokens t ON t.token_key = s.token_key
WHERE i.is_first OR s.sub_key IS NOT NULL
""")


_NAMED = "server_key = v.server_key AND {0}.notifier_id = i.notifier_id"
# With an empty table, PostgreSQL would plan to read all queues of a router, and keep to it: hence the lookup.
_FOUND = Sql(
    _found(f"subscriptions s ON s.{_NAMED.format('s')}").sqlite,
    _found(
        f"LATERAL (SELECT * FROM subscriptions q WHERE q.{_NAMED.format('q')} OFFSET 0) s ON true"
    ).postgres,
)
_REVIVE = shared("""
UPDATE subscriptions SET state = $1, detail = '', retry_count = 0, retry_at = NULL
WHERE sub_key = ANY($2::bigint[])
""")

Created = CreatedSubscription | SnewRefusal

_BORN = move_sub(SubState.NEW, SubInput.HANDED_OVER)
"Whoever creates a row hands it over to its router's subscriber at once."
_BORN_TEXT = _BORN.value


class Subscriptions(SqlStore):
    async def subscriptions(self, subscription_ids: Sequence[EntityId]) -> list[SubscriptionRecord | None]:
        return await self._read_grouped(_by_id, subscription_ids)

    async def create_subscriptions(self, news: Sequence[NewSubscription]) -> list[Created]:
        return await self._write_grouped(_create, news)

    @writing()
    async def delete_subscription(self, tx: Transaction, key: SubKey) -> DeletedSubscription | None:
        deleted = await deletion.subscriptions(tx, [key])
        return deleted[0] if deleted else None


async def _by_id(db: Database, subscription_ids: Sequence[EntityId]) -> list[SubscriptionRecord | None]:
    return [subscription_or_none(row) for row in await db.fetch_each(_BY_ID, subscription_ids)]


# A group of SNEWs


@hides_bytes
@dataclass(slots=True)
class _Router:
    """One that the group names."""

    address: tuple[str, str, bytes]
    key: ServerKey | None = None
    "None: it has no row."
    queues: dict[EntityId, _Existing] = field(default_factory=dict)
    "Those that the group names and that have a row."


@hides_bytes
@dataclass(slots=True)
class _Existing:
    """A row of a queue, of the database or of an earlier SNEW. Do not print."""

    subscription_id: EntityId
    token_key: TokenKey
    queue: QueueRow
    state: SubState
    abandoned: bool = False
    "Its token is deleted, but the row is not yet."


class _Answer(NamedTuple):
    """Do not print."""

    router: _Router
    row: _Existing
    created: bool
    handed_over: bool


class SnewPlan:
    """What becomes of a group of SNEWs, decided without a database."""

    def __init__(self, owners: Mapping[TokenKey, Owner], new_keys: Iterator[SubKey], caps: RowCaps) -> None:
        self._owners = owners
        self._new_keys = new_keys
        self._caps = caps
        self.inserts: list[tuple[SubKey, NewSubscription, _Router]] = []
        self.replaced: list[SubKey] = []
        "Rows that were abandoned, in whose place there are new ones."
        self.revived: list[SubKey] = []
        "Rows that were dead and are PENDING again."

    def decide(self, new: NewSubscription, router: _Router) -> _Answer | SnewRefusal:
        """One after the other: a later SNEW finds what an earlier one made."""
        owner = self._owners.get(new.token_key)
        if owner is None or not owner.may_subscribe:
            return SnewRefusal.AUTH
        row = router.queues.get(new.notifier_id)
        if row is not None and not row.abandoned:
            return self._repeat(router, row, new)
        if not self._take_place(owner, router.key or new.server):
            return SnewRefusal.QUOTA
        if row is not None:
            self.replaced.append(row.queue.key)
        key = next(self._new_keys)
        queue = new_tuple(QueueRow, (key, new.notifier_id, new.notifier_key, False))
        made = _Existing(new.subscription_id, new.token_key, queue, _BORN)
        router.queues[new.notifier_id] = made
        self.inserts.append((key, new, router))
        return new_tuple(_Answer, (router, made, True, True))

    def _take_place(self, owner: Owner, router: ServerKey | SmpServer) -> bool:
        """False: the token has all the subscriptions, or uses all the routers, that it may."""
        caps, routers = self._caps, len(owner.routers) + (router not in owner.routers)
        if caps.subscriptions_per_token and owner.subscriptions >= caps.subscriptions_per_token:
            return False
        if caps.routers_per_token and routers > caps.routers_per_token:
            return False
        owner.routers.add(router)
        owner.subscriptions += 1
        return True

    def _repeat(self, router: _Router, row: _Existing, new: NewSubscription) -> _Answer | SnewRefusal:
        if row.token_key != new.token_key or row.queue.notifier_key != new.notifier_key:
            return SnewRefusal.AUTH
        handed_over = move_sub(row.state, SubInput.CREATED_AGAIN) is SubState.NEW
        if handed_over:
            row.state = _BORN
            self.revived.append(row.queue.key)
        return _Answer(router, row, False, handed_over)


async def _create(tx: Transaction, news: Sequence[NewSubscription]) -> list[Created]:
    """All SNEWs of a group in a few statements."""
    owners = await tx.owners(list({new.token_key for new in news}))
    routers = await _find(tx, news)
    plan = SnewPlan(owners, await tx.new_keys(len(news)), tx.caps)
    answers = [plan.decide(new, router) for new, router in zip(news, routers, strict=True)]
    if plan.replaced:
        await deletion.subscriptions(tx, plan.replaced)
    if plan.inserts:
        await _insert(tx, plan.inserts)
    if plan.revived:
        await tx.execute(_REVIVE, _BORN_TEXT, plan.revived)
    created = [_created(answer) for answer in answers]
    await tx.hand_over(created)
    return created


async def _find(tx: Transaction, news: Sequence[NewSubscription]) -> list[_Router]:
    """The router of each of them, with the rows that there are of queues."""
    known: dict[SmpServer, _Router] = {}
    routers, asked = [], []
    for new in news:
        router = known.get(new.server)
        is_first = router is None
        if router is None:
            router = known[new.server] = _Router(address_columns(new.server))
        routers.append(router)
        asked.append((*router.address, new.notifier_id, is_first))
    for row in await tx.fetch_rows(_FOUND, asked):
        router = known[smp_server(*row[:3])]
        router.key = row[3]
        if row[5] is not None:
            router.queues[row[4]] = _existing(row[4:])
    return routers


def _existing(row: Row) -> _Existing:
    notifier_id, sub_key, subscription_id, token_key, notifier_key, state, associated, is_abandoned = row
    queue = QueueRow(sub_key, notifier_id, notifier_key, bool(associated))
    return _Existing(subscription_id, token_key, queue, SubState(state), bool(is_abandoned))


async def _insert(tx: Transaction, inserts: Sequence[tuple[SubKey, NewSubscription, _Router]]) -> None:
    """A new router only with a subscription: one that is refused leaves nothing behind."""
    if missing := {new.server: router for _, new, router in inserts if router.key is None}:
        for server, key in (await tx.new_servers(missing)).items():
            missing[server].key = key
    await tx.insert([_columns(*insert) for insert in inserts])
    tx.subscriptions += len(inserts)


def _columns(key: SubKey, new: NewSubscription, router: _Router) -> Row:
    ids = key, new.subscription_id, new.token_key, new.notifier_id
    return *ids, new.notifier_key, new.spelling, router.key, _BORN_TEXT


def _created(answer: _Answer | SnewRefusal) -> Created:
    if isinstance(answer, SnewRefusal):
        return answer
    router, row, created, handed_over = answer
    assert router.key is not None, "a queue has a row, so its router has one"
    return new_tuple(CreatedSubscription, (row.subscription_id, router.key, row.queue, created, handed_over))
