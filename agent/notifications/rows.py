"""Rows of the token, of tokens that are given up, and of notification subscriptions."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from typing import Any

from agent.duplex.mapping import Table
from agent.duplex.store import Tx
from agent.notifications.records import (
    DeletedSubscription,
    GivenUpToken,
    Mode,
    SubAction,
    Subscription,
    Token,
    TokenAction,
)
from protocol.addresses import NtfServer, SmpServer, parse_ntf_server, parse_smp_server
from protocol.encoding import EntityId
from protocol.statuses import TokenStatus

# The token


_TOKENS = Table("ntf_token", Token, "key")
_GIVEN_UP = Table("deleted_ntf_tokens", GivenUpToken, "key", numbered=True)
drop_deleted_token = _GIVEN_UP.drop


def token_of(db: sqlite3.Connection) -> Token | None:
    return _TOKENS.one(db, "TRUE")


def put_token(tx: Tx, token: Token) -> None:
    drop_token(tx)
    _TOKENS.add(tx, token, key=1)


def drop_token(tx: Tx) -> None:
    tx.db.execute("DELETE FROM ntf_token")


def give_up_token(tx: Tx, token: Token) -> None:
    """Forget the token, but remember to tell its server."""
    drop_token(tx)
    delete_at_server(tx, token)


def delete_at_server(tx: Tx, token: Token) -> None:
    """Also if it has no id: the answer to its TNEW may have got lost."""
    if token.token_id is None and token.action is not TokenAction.REGISTER:
        return  # the server has refused it
    given_up = GivenUpToken(
        server=token.server,
        auth_key=token.auth_key,
        token_id=token.token_id,
        device_token=token.device_token,
        dh_public_key=token.dh_key.public,
    )
    _GIVEN_UP.add(tx, given_up)
    tx.notifications.add(deletions_at(token.server))


def deleted_tokens(db: sqlite3.Connection, server: NtfServer) -> list[GivenUpToken]:
    return _GIVEN_UP.all(db, "server = ? ORDER BY key", str(server))


# Subscriptions

_SUBSCRIPTIONS = Table("ntf_subscriptions", Subscription, "queue_id")
_DELETED = Table("deleted_ntf_subscriptions", DeletedSubscription, "key", numbered=True)
drop_deleted_subscription = _DELETED.drop
set_deleted_subscription = _DELETED.set
_AT_ROUTER = "action IN ('SMP_KEY', 'SMP_DELETE')"
_AT_SERVER = "action IN ('NTF_CREATE', 'NTF_CHECK') AND token_id = (SELECT token_id FROM ntf_token)"
"What belongs to another token waits for the current one to become active, and is made anew then."


def subscriptions(db: sqlite3.Connection) -> list[Subscription]:
    return _SUBSCRIPTIONS.all(db, "TRUE ORDER BY queue_id")


def due_at_router(db: sqlite3.Connection, server: SmpServer, now: int, limit: int) -> list[Subscription]:
    """What is to be done at a router; a queue that is being deleted takes its notifier along."""
    stays = "(SELECT NOT deleting FROM receive_queues q WHERE q.queue_id = ntf_subscriptions.queue_id)"
    condition = f"smp_server = ? AND {_AT_ROUTER} AND due <= ? AND {stays} ORDER BY due, queue_id LIMIT ?"
    return _SUBSCRIPTIONS.all(db, condition, str(server), now, limit)


def due_at_server(db: sqlite3.Connection, server: NtfServer, now: int, limit: int) -> list[Subscription]:
    condition = f"ntf_server = ? AND {_AT_SERVER} AND due <= ? ORDER BY due, queue_id LIMIT ?"
    return _SUBSCRIPTIONS.all(db, condition, str(server), now, limit)


def subscription_of_notifier(
    db: sqlite3.Connection, server: SmpServer, notifier_id: EntityId
) -> Subscription | None:
    return _SUBSCRIPTIONS.one(db, "smp_server = ? AND notifier_id = ?", str(server), notifier_id)


def next_due(db: sqlite3.Connection, now: int) -> int | None:
    """When something is due that is not due yet."""
    sql = f"SELECT min(due) FROM ntf_subscriptions WHERE due > ? AND ({_AT_ROUTER} OR {_AT_SERVER})"
    (due,) = db.execute(sql, (now,)).fetchone()
    return None if due is None else int(due)


DELETIONS = "deletions at "


def deletions_at(server: NtfServer) -> str:
    """The worker for deletions at a server: one that fails delays nothing else there."""
    return f"{DELETIONS}{server}"


def busy_servers(db: sqlite3.Connection, now: int) -> set[str]:
    """The workers that have something to do now: servers of both kinds, and deletions at servers."""
    found: set[str] = set()
    for sql in (
        f"SELECT DISTINCT smp_server FROM ntf_subscriptions WHERE {_AT_ROUTER} AND due <= ?",
        f"SELECT DISTINCT ntf_server FROM ntf_subscriptions WHERE {_AT_SERVER} AND due <= ?",
    ):
        found |= {server for (server,) in db.execute(sql, (now,))}
    for table in ("deleted_ntf_tokens", "deleted_ntf_subscriptions"):
        rows = db.execute(f"SELECT DISTINCT server FROM {table}")
        found |= {deletions_at(parse_ntf_server(server)) for (server,) in rows}
    token = token_of(db)
    return found | {str(token.server)} if token is not None and token.is_unfinished else found


def put_subscription(tx: Tx, value: Subscription) -> None:
    """The row as given, in place of the queue's other one; whoever works on it is woken."""
    _SUBSCRIPTIONS.drop(tx, value.queue_id)
    _SUBSCRIPTIONS.add(tx, value)
    if value.action in (SubAction.SMP_KEY, SubAction.SMP_DELETE):
        tx.notifications.add(str(value.smp_server))
    elif value.action is not None:
        tx.notifications.add(str(value.ntf_server))


def delete_subscription(tx: Tx, queue_id: int) -> None:
    """Forget the subscription of a queue, but remember to delete it at the notification server.

    One that was made for another token ends with that token.
    """
    row, token = _SUBSCRIPTIONS.get(tx.db, queue_id), token_of(tx.db)
    if row is None:
        return
    _SUBSCRIPTIONS.drop(tx, queue_id)
    if token is None or token.token_id != row.token_id or row.notifier_id is None:
        return
    deleted = DeletedSubscription(
        server=row.ntf_server,
        token_id=row.token_id,
        auth_key=token.auth_key,
        subscription_id=row.subscription_id,
        smp_server=row.smp_server,
        notifier_id=row.notifier_id,
        notifier_key=row.notifier_key,
    )
    _DELETED.add(tx, deleted)
    tx.notifications.add(deletions_at(row.ntf_server))


def deleted_subscriptions(db: sqlite3.Connection, server: NtfServer, limit: int) -> list[DeletedSubscription]:
    return _DELETED.all(db, "server = ? ORDER BY key LIMIT ?", str(server), limit)


def advance_subscription(tx: Tx, before: Subscription, after: Subscription | None) -> None:
    """`after` in the place of `before`, unless something else was decided in the meantime."""
    sql = "DELETE FROM ntf_subscriptions WHERE queue_id = ? AND action IS ? AND notifier_key = ?"
    done = tx.db.execute(sql, (before.queue_id, before.action, before.notifier_key.seed))
    if done.rowcount and after is not None:
        put_subscription(tx, after)


# What is wanted


def follow_wishes(tx: Tx, queue_id: int | None = None) -> None:
    """Bring the subscriptions, or that of one queue, in line with the token, its mode and the connections."""
    token = token_of(tx.db)
    instant = token is not None and token.mode is Mode.INSTANT
    sql = (
        "SELECT q.queue_id, q.server, c.wants_notifications FROM receive_queues q"
        " JOIN connections c USING (connection_id) WHERE NOT q.deleting AND NOT c.deleted"
        " AND ifnull(q.queue_id = ?, 1)"
    )
    known = {row.queue_id: row for row in subscriptions(tx.db)} if queue_id is None else {}
    for queue in tx.db.execute(sql, (queue_id,)).fetchall():
        before = known.get(queue["queue_id"])
        wanted = token if instant and queue["wants_notifications"] else None
        after = _wished(tx, queue, wanted, before)
        if after is not None and after != before:
            put_subscription(tx, after)


def _wished(tx: Tx, queue: Any, token: Token | None, before: Subscription | None) -> Subscription | None:
    """The row that a queue should have in place of `before`; None if that may stay."""
    is_same = (
        before is not None
        and token is not None
        and (before.token_id, before.ntf_server) == (token.token_id, token.server)
    )
    if is_same and before is not None and before.action not in (None, SubAction.SMP_DELETE):
        return None
    if token is not None and token.token_id is not None and token.status is TokenStatus.ACTIVE:
        return Subscription(
            queue_id=queue["queue_id"],
            smp_server=parse_smp_server(queue["server"]),
            ntf_server=token.server,
            token_id=token.token_id,
            action=SubAction.SMP_KEY,
            due=tx.now,
            notifier_key=tx.secrets.ed25519(),
            dh_key=tx.secrets.x25519(),
        )
    if before is None or is_same or before.action is SubAction.SMP_DELETE:
        return None
    return replace(before, action=SubAction.SMP_DELETE, due=tx.now)
