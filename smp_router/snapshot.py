"""The state of a router in a file, so that queues and services survive the process."""

from __future__ import annotations

import json
import os
from collections import deque
from pathlib import Path
from typing import Any

from protocol.crypto import decode_public_key
from protocol.encoding import EntityId, b64, unb64
from protocol.errors import DecodeError
from protocol.ids_hash import ids_hash
from protocol.messages_crypto import decode_message
from protocol.smp_handshake import ServiceRole
from protocol.smp_messages import QueueMode
from smp_router.queues import Message, Notifier, Prepared, Queue
from smp_router.services import Service
from smp_router.state import RouterState

FORMAT = 1
OWNER_ONLY = 0o600


class SnapshotError(Exception):
    """The file is not a snapshot of a router."""


def save_snapshot(path: Path, state: RouterState) -> None:
    """Write queues and services; the file appears whole or not at all. It holds secrets: owner only."""
    content = {
        "format": FORMAT,
        "queues": [_queue(queue) for queue in state.queues],
        "services": [_service(service) for service in state.services],
    }
    temporary = path.with_name(path.name + ".new")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load_snapshot(path: Path, state: RouterState) -> None:
    """Add what was saved to `state`. Raises SnapshotError, and OSError if the file cannot be read."""
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != FORMAT:
            raise SnapshotError(f"{path} has another format")
        queues = [_read_queue(entry) for entry in content["queues"]]
        services = [_read_service(entry) for entry in content["services"]]
    except (ValueError, KeyError, TypeError, AttributeError, DecodeError):
        # the cause is dropped: its text may quote keys
        raise SnapshotError(f"{path} is not a snapshot of a router") from None
    for queue in queues:
        state.queues.add(queue)
    for service in services:
        state.services.add(service)


def _text(data: bytes) -> str:
    return b64(data).decode()


def _bytes(text: str) -> bytes:
    return unb64(text.encode())


def _entity(text: str) -> EntityId:
    return EntityId(_bytes(text))


def _queue(queue: Queue) -> dict[str, Any]:
    return {
        "recipient_id": _text(queue.recipient_id),
        "recipient_keys": [_text(key.der) for key in queue.recipient_keys],
        "secret": _text(queue.secret),
        "sender_id": _text(queue.sender_id),
        "sender_key": None if queue.sender_key is None else _text(queue.sender_key.der),
        "mode": None if queue.mode is None else queue.mode.value.decode(),
        "notifier": None if queue.notifier is None else _notifier(queue.notifier),
        "messages": [[_text(m.message_id), _text(m.content.encode())] for m in queue.messages],
        "suspended_at": queue.suspended_at,
    }


def _read_queue(entry: dict[str, Any]) -> Queue:
    sender_key, mode, notifier = entry["sender_key"], entry["mode"], entry["notifier"]
    return Queue(
        recipient_id=_entity(entry["recipient_id"]),
        recipient_keys=tuple(decode_public_key(_bytes(key)) for key in entry["recipient_keys"]),
        secret=_bytes(entry["secret"]),
        sender_id=_entity(entry["sender_id"]),
        sender_key=None if sender_key is None else decode_public_key(_bytes(sender_key)),
        mode=None if mode is None else QueueMode(mode.encode()),
        notifier=None if notifier is None else _read_notifier(notifier),
        messages=deque(Message(0, _bytes(i), decode_message(_bytes(c))) for i, c in entry["messages"]),
        suspended_at=entry["suspended_at"],
    )


def _notifier(notifier: Notifier) -> dict[str, Any]:
    return {
        "notifier_id": _text(notifier.notifier_id),
        "key": _text(notifier.key.der),
        "secret": _text(notifier.secret),
        "pending": [_text(nmsg) for nmsg in notifier.pending],
    }


def _read_notifier(entry: dict[str, Any]) -> Notifier:
    return Notifier(
        _entity(entry["notifier_id"]),
        decode_public_key(_bytes(entry["key"])),
        _bytes(entry["secret"]),
        deque(Prepared(_bytes(nmsg)) for nmsg in entry["pending"]),
    )


def _service(service: Service) -> dict[str, Any]:
    return {
        "service_id": _text(service.service_id),
        "fingerprint": _text(service.fingerprint),
        "role": service.role.value.decode(),
        "queue_ids": [_text(queue_id) for queue_id in service.queue_ids],
    }


def _read_service(entry: dict[str, Any]) -> Service:
    queue_ids = {_entity(queue_id) for queue_id in entry["queue_ids"]}
    return Service(
        _entity(entry["service_id"]),
        _bytes(entry["fingerprint"]),
        ServiceRole(entry["role"].encode()),
        queue_ids,
        ids_hash(queue_ids),
    )
