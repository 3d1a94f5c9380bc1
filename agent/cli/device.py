"""The file of a device: what is in it, also beside an agent at work, and its key. Nobody is asked."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from pathlib import Path

from agent.cli.running import key_of, output, state_file
from agent.duplex.database_file import change_key, user_key
from agent.duplex.records import Connection
from agent.duplex.store import reading
from agent.duplex.tables import connections, receive_queues
from agent.notifications.records import Subscription
from agent.notifications.rows import subscriptions, token_of


def add_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    add("status", _status, "connections, token and notifications; asks no server")
    rekey = add("rekey", _rekey, "encrypts the state with another key, or with none")
    rekey.add_argument("--new-key-file", type=Path, metavar="FILE", help="none: not encrypted any more")


async def _status(args: argparse.Namespace) -> None:
    with reading(state_file(args), key_of(args)) as db:
        token = token_of(db)
        known = [connection for connection in connections(db) if not connection.deleted]
        rows = {row.queue_id: row for row in subscriptions(db)}
        queues = [receive_queues(db, connection.connection_id) for connection in known]
    if token is None:
        output(args).say({"token": None}, "Token: none")
    else:
        values = {"token": token.status, "mode": token.mode, "server": str(token.server)}
        output(args).say(values, f"Token: {token.status}, {token.mode}, at {token.server}")
    for connection, own in zip(known, queues, strict=True):
        _show_connection(args, connection, [rows[queue.queue_id] for queue in own if queue.queue_id in rows])


def _show_connection(args: argparse.Namespace, connection: Connection, rows: list[Subscription]) -> None:
    notifications = [
        " ".join(filter(None, (row.status, f"(next: {row.action})" if row.action else ""))) for row in rows
    ]
    values = {
        "connection": connection.connection_id,
        "kind": connection.kind,
        "ratchet": connection.sync_state.value,
        "pq": connection.pq_support,
        "notifications": notifications,
    }
    pq = ", post-quantum" if connection.pq_support else ""
    said = "; ".join(notifications) or "none"
    text = f"Connection {connection.connection_id}: {connection.kind}{pq}; notifications: {said}"
    output(args).say(values, text)


async def _rekey(args: argparse.Namespace) -> None:
    new = user_key(args.new_key_file, {})
    await asyncio.to_thread(change_key, state_file(args), key_of(args), new)
    output(args).say({"encrypted": new is not None}, "Encrypted" if new else "Not encrypted any more")
