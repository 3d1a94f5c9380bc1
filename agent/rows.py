"""Records to rows and back: the only place that knows how a record is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent.records import (
    Connection,
    DeletedToken,
    Message,
    Mode,
    OutgoingMessage,
    ReceiveQueue,
    SendQueue,
    SubAction,
    Subscription,
    Token,
    TokenAction,
)
from protocol.addresses import parse_ntf_server, parse_smp_server
from protocol.crypto import Ed25519PrivateKey, X25519PrivateKey, X25519PublicKey
from protocol.device_token import decode_device_token, encode_device_token
from protocol.statuses import TokenStatus

Change = tuple[str, Sequence[Any]]
"One statement with its parameters."


def _put(table: str, values: dict[str, Any]) -> Change:
    """The row as given, whether or not it is there already."""
    columns = ", ".join(values)
    marks = ", ".join("?" * len(values))
    key = next(iter(values))
    updates = ", ".join(f"{column} = excluded.{column}" for column in values if column != key)
    sql = f"INSERT INTO {table} ({columns}) VALUES ({marks}) ON CONFLICT ({key}) DO UPDATE SET {updates}"
    return sql, tuple(values.values())


def token(row: Any) -> Token:
    return Token(
        server=parse_ntf_server(row["server"]),
        device_token=decode_device_token(row["device_token"]),
        mode=Mode(row["mode"]),
        period=row["period"],
        auth_key=Ed25519PrivateKey(row["auth_key"]),
        dh_key=X25519PrivateKey(row["dh_key"]),
        token_id=row["token_id"],
        dh_secret=row["dh_secret"],
        status=TokenStatus(row["status"]),
        action=None if row["action"] is None else TokenAction(row["action"]),
        code=row["code"],
        cron=row["cron"],
    )


def put_token(value: Token) -> Change:
    return _put(
        "token",
        {
            "key": 1,
            "server": str(value.server),
            "device_token": encode_device_token(value.device_token),
            "mode": value.mode,
            "period": value.period,
            "auth_key": value.auth_key.seed,
            "dh_key": value.dh_key.raw,
            "token_id": value.token_id,
            "dh_secret": value.dh_secret,
            "status": value.status,
            "action": value.action,
            "code": value.code,
            "cron": value.cron,
        },
    )


def drop_token() -> Change:
    return "DELETE FROM token", ()


def give_up_token(value: Token) -> list[Change]:
    """Forget the token, but remember to tell its server, and routers about the notifiers made for it."""
    changes: list[Change] = [
        drop_token(),
        ("UPDATE subscriptions SET action = ?, due = 0", (SubAction.SMP_DELETE,)),
    ]
    if value.token_id is not None:
        sql = "INSERT INTO deleted_tokens (server, token_id, auth_key) VALUES (?, ?, ?)"
        changes.append((sql, (str(value.server), value.token_id, value.auth_key.seed)))
    return changes


def deleted_token(row: Any) -> DeletedToken:
    return DeletedToken(
        key=row["key"],
        server=parse_ntf_server(row["server"]),
        token_id=row["token_id"],
        auth_key=Ed25519PrivateKey(row["auth_key"]),
    )


def drop_deleted_token(key: int) -> Change:
    return "DELETE FROM deleted_tokens WHERE key = ?", (key,)


def connection(row: Any) -> Connection:
    return Connection(
        connection_id=row["connection_id"],
        wants_notifications=bool(row["wants_notifications"]),
        can_receive=bool(row["can_receive"]),
        can_send=bool(row["can_send"]),
    )


def put_connection(connection_id: int, wants_notifications: bool) -> Change:
    values = {"connection_id": connection_id, "wants_notifications": int(wants_notifications)}
    return _put("connections", values)


def drop_connection(connection_id: int) -> Change:
    return "DELETE FROM connections WHERE connection_id = ?", (connection_id,)


def receive_queue(row: Any) -> ReceiveQueue:
    return ReceiveQueue(
        connection_id=row["connection_id"],
        server=parse_smp_server(row["server"]),
        recipient_key=Ed25519PrivateKey(row["recipient_key"]),
        dh_key=X25519PrivateKey(row["dh_key"]),
        e2e_key=X25519PrivateKey(row["e2e_key"]),
        recipient_id=row["recipient_id"],
        sender_id=row["sender_id"],
        router_secret=row["router_secret"],
        sender_key=None if row["sender_key"] is None else X25519PublicKey(row["sender_key"]),
        last_number=row["last_number"],
        last_broker_ts=row["last_broker_ts"],
    )


def put_receive_queue(value: ReceiveQueue) -> Change:
    return _put(
        "receive_queues",
        {
            "connection_id": value.connection_id,
            "server": str(value.server),
            "recipient_key": value.recipient_key.seed,
            "dh_key": value.dh_key.raw,
            "e2e_key": value.e2e_key.raw,
            "recipient_id": value.recipient_id,
            "sender_id": value.sender_id,
            "router_secret": value.router_secret,
            "sender_key": None if value.sender_key is None else value.sender_key.raw,
            "last_number": value.last_number,
            "last_broker_ts": value.last_broker_ts,
        },
    )


def send_queue(row: Any) -> SendQueue:
    return SendQueue(
        connection_id=row["connection_id"],
        server=parse_smp_server(row["server"]),
        sender_id=row["sender_id"],
        auth_key=X25519PrivateKey(row["auth_key"]),
        e2e_key=X25519PrivateKey(row["e2e_key"]),
        recipient_key=X25519PublicKey(row["recipient_key"]),
        confirmed=bool(row["confirmed"]),
        secured=bool(row["secured"]),
        last_number=row["last_number"],
    )


def put_send_queue(value: SendQueue) -> Change:
    return _put(
        "send_queues",
        {
            "connection_id": value.connection_id,
            "server": str(value.server),
            "sender_id": value.sender_id,
            "auth_key": value.auth_key.raw,
            "e2e_key": value.e2e_key.raw,
            "recipient_key": value.recipient_key.raw,
            "confirmed": int(value.confirmed),
            "secured": int(value.secured),
            "last_number": value.last_number,
        },
    )


def outgoing_message(row: Any) -> OutgoingMessage:
    return OutgoingMessage(
        key=row["key"],
        connection_id=row["connection_id"],
        notification=bool(row["notification"]),
        body=row["body"],
    )


def add_outgoing(connection_id: int, body: bytes, *, notification: bool) -> Change:
    sql = "INSERT INTO outbox (connection_id, notification, body) VALUES (?, ?, ?)"
    return sql, (connection_id, int(notification), body)


def drop_outgoing(key: int) -> Change:
    return "DELETE FROM outbox WHERE key = ?", (key,)


def message(row: Any) -> Message:
    return Message(
        connection_id=row["connection_id"],
        message_id=row["message_id"],
        broker_ts=row["broker_ts"],
        number=row["number"],
        body=row["body"],
    )


def add_message(value: Message) -> Change:
    sql = (
        "INSERT INTO messages (connection_id, message_id, broker_ts, number, body) VALUES (?, ?, ?, ?, ?)"
        " ON CONFLICT DO NOTHING"
    )
    return sql, (value.connection_id, value.message_id, value.broker_ts, value.number, value.body)


def subscription(row: Any) -> Subscription:
    return Subscription(
        connection_id=row["connection_id"],
        smp_server=parse_smp_server(row["smp_server"]),
        ntf_server=parse_ntf_server(row["ntf_server"]),
        token_id=row["token_id"],
        action=None if row["action"] is None else SubAction(row["action"]),
        due=row["due"],
        notifier_key=Ed25519PrivateKey(row["notifier_key"]),
        dh_key=X25519PrivateKey(row["dh_key"]),
        notifier_id=row["notifier_id"],
        dh_secret=row["dh_secret"],
        subscription_id=row["subscription_id"],
        status=row["status"],
    )


def put_subscription(value: Subscription) -> Change:
    return _put(
        "subscriptions",
        {
            "connection_id": value.connection_id,
            "smp_server": str(value.smp_server),
            "ntf_server": str(value.ntf_server),
            "token_id": value.token_id,
            "action": value.action,
            "due": value.due,
            "notifier_key": value.notifier_key.seed,
            "dh_key": value.dh_key.raw,
            "notifier_id": value.notifier_id,
            "dh_secret": value.dh_secret,
            "subscription_id": value.subscription_id,
            "status": value.status,
        },
    )


def advance_subscription(before: Subscription, after: Subscription) -> Change:
    """`after` in the place of `before`, unless something else was decided in the meantime."""
    sql, values = put_subscription(after)
    return sql + f" WHERE {_UNCHANGED}", (*values, before.action, before.notifier_key.seed)


def drop_subscription(before: Subscription) -> Change:
    """The same for a subscription that is done with."""
    sql = f"DELETE FROM subscriptions WHERE connection_id = ? AND {_UNCHANGED}"
    return sql, (before.connection_id, before.action, before.notifier_key.seed)


_UNCHANGED = "subscriptions.action IS ? AND subscriptions.notifier_key = ?"
