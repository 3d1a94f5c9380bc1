"""One handler per command; the table says who must have authorised it."""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from protocol.connection import Received
from protocol.encoding import b64
from protocol.errors import (
    AUTH,
    CMD_PROHIBITED,
    CMD_SYNTAX,
    LARGE_MSG,
    NO_MSG,
    QUOTA,
    SERVICE,
    DecodeError,
    ErrorType,
    ProtocolError,
)
from protocol.messages_crypto import QuotaExceeded, max_message_length
from protocol.smp_handshake import ServiceRole
from protocol.smp_messages import (
    Ack,
    Del,
    Get,
    Ids,
    Info,
    Key,
    Ldel,
    Lget,
    Lkey,
    Lset,
    Ndel,
    New,
    Nid,
    Nkey,
    NotifierIds,
    NotifierKeys,
    Nsub,
    Nsubs,
    Off,
    Ok,
    Pfwd,
    Ping,
    Pong,
    Prxy,
    Que,
    QueueMode,
    Rfwd,
    Rkey,
    Send,
    Skey,
    SmpMessage,
    Sok,
    Soks,
    Sub,
    Subs,
)
from smp_router import authentication
from smp_router.authentication import Request, acting_service
from smp_router.broker import ALL_SENT, Broker
from smp_router.client import Client, Reception
from smp_router.queues import Message, Notifier, Queue, agree_secret, new_id
from smp_router.services import Service


class Handler(NamedTuple):
    authenticate: Callable[[Broker, Client, Any], Any]
    "Finds the queue, notifier or service that `run` is given."
    run: Callable[[Broker, Client, Any, Any], SmpMessage]
    in_services_name: bool = False
    "May also carry the signature of a service."


def respond(broker: Broker, client: Client, request: Request) -> SmpMessage:
    """Carry out a command. Raises ProtocolError with the answer it deserves."""
    handler = HANDLERS[type(request.message)]
    subject = handler.authenticate(broker, client, request)
    if request.raw.service_signature is not None and not handler.in_services_name:
        raise ProtocolError(SERVICE)
    return handler.run(broker, client, request, subject)


def _refuse_unless(condition: bool, error: ErrorType) -> None:
    if not condition:
        raise ProtocolError(error)


def _new(broker: Broker, client: Client, request: Received[New], _subject: None) -> SmpMessage:
    command = request.message
    service = acting_service(broker, client, request, ServiceRole.MESSAGING)
    _check_password(broker.config.password, command.password)
    _refuse_unless(command.link is None, CMD_PROHIBITED)
    try:
        dh_key, secret = agree_secret(command.dh_key)
        made = None if command.notifier is None else _make_notifier(command.notifier)
    except DecodeError:
        raise ProtocolError(CMD_SYNTAX) from None
    notifier, notifier_ids = made or (None, None)
    queue = Queue(
        recipient_id=new_id(),
        recipient_key=command.recipient_key,
        secret=secret,
        sender_id=new_id(),
        mode=command.mode,
        notifier=notifier,
    )
    broker.state.queues.add(queue)
    if command.subscribe:
        broker.subscribe(broker.recipients, queue.recipient_id, client, service)
        client.receptions[queue.recipient_id] = Reception()
    elif service is not None:
        broker.state.services.associate(service, queue.recipient_id)
    return Ids(
        recipient_id=queue.recipient_id,
        sender_id=queue.sender_id,
        dh_key=dh_key,
        mode=queue.mode,
        service_id=None if service is None else service.service_id,
        notifier=notifier_ids,
    )


def _check_password(expected: bytes | None, given: bytes | None) -> None:
    _refuse_unless(expected is None or hmac.compare_digest(expected, given or b""), AUTH)


def _make_notifier(keys: NotifierKeys) -> tuple[Notifier, NotifierIds]:
    dh_key, secret = agree_secret(keys.dh_key)
    notifier = Notifier(new_id(), keys.notifier_key, secret)
    return notifier, NotifierIds(notifier.notifier_id, dh_key)


def _sub(broker: Broker, client: Client, request: Received[Sub], queue: Queue) -> SmpMessage:
    service = acting_service(broker, client, request, ServiceRole.MESSAGING)
    reception = client.receptions.get(queue.recipient_id)
    _refuse_unless(reception is None or not reception.by_get, CMD_PROHIBITED)
    broker.subscribe(broker.recipients, queue.recipient_id, client, service)
    message = broker.next_message(client, queue)
    return message or Sok(None if service is None else service.service_id)


def _subs(broker: Broker, client: Client, request: Received[Subs], service: Service) -> SmpMessage:
    if broker.subscribe_service(broker.recipients, service, client):
        for queue_id in service.queue_ids:
            client.offer(queue_id)
        client.offer(ALL_SENT)
    return Soks(service.queues)


def _key(broker: Broker, client: Client, request: Received[Key], queue: Queue) -> SmpMessage:
    _refuse_unless(queue.secure(request.message.sender_key), AUTH)
    return Ok()


def _skey(broker: Broker, client: Client, request: Received[Skey], queue: Queue) -> SmpMessage:
    _refuse_unless(queue.mode is QueueMode.MESSAGING and not queue.suspended, AUTH)
    _refuse_unless(queue.secure(request.message.sender_key), AUTH)
    return Ok()


def _nkey(broker: Broker, client: Client, request: Received[Nkey], queue: Queue) -> SmpMessage:
    try:
        notifier, ids = _make_notifier(request.message.keys)
    except DecodeError:
        raise ProtocolError(CMD_SYNTAX) from None
    broker.set_notifier(queue, notifier, by=client)
    return Nid(ids)


def _ndel(broker: Broker, client: Client, request: Received[Ndel], queue: Queue) -> SmpMessage:
    broker.set_notifier(queue, None, by=client)
    return Ok()


def _get(broker: Broker, client: Client, request: Received[Get], queue: Queue) -> SmpMessage:
    reception = client.receptions.get(queue.recipient_id)
    subscribed = broker.recipients.subscriber(queue.recipient_id) is client
    _refuse_unless(not subscribed and (reception is None or reception.by_get), CMD_PROHIBITED)
    return broker.next_message(client, queue, by_get=True) or Ok()


def _ack(broker: Broker, client: Client, request: Received[Ack], queue: Queue) -> SmpMessage:
    reception = client.receptions.get(queue.recipient_id)
    _refuse_unless(reception is not None, CMD_PROHIBITED)
    assert reception is not None
    message_id = request.message.message_id
    _refuse_unless(reception.delivered is not None and reception.delivered == message_id, NO_MSG)
    reception.delivered = None
    queue.acknowledge(message_id)
    if reception.by_get:
        return Ok()
    return broker.next_message(client, queue) or Ok()


def _off(broker: Broker, client: Client, request: Received[Off], queue: Queue) -> SmpMessage:
    queue.suspended = True
    return Ok()


def _del(broker: Broker, client: Client, request: Received[Del], queue: Queue) -> SmpMessage:
    broker.delete_queue(queue, by=client)
    client.receptions.pop(queue.recipient_id, None)
    return Ok()


def _que(broker: Broker, client: Client, request: Received[Que], queue: Queue) -> SmpMessage:
    info: dict[str, Any] = {
        "qiSnd": queue.sender_key is not None,
        "qiNtf": queue.notifier is not None,
        "qiSize": len(queue.messages),
    }
    reception = client.receptions.get(queue.recipient_id)
    if reception is not None:
        info["qiSub"] = {"qSubThread": "prohibitSub" if reception.by_get else "noSub"}
        if reception.delivered is not None:
            info["qiSub"]["qDelivered"] = b64(reception.delivered).decode()
    if queue.messages:
        info["qiMsg"] = _message_info(queue.messages[0])
    return Info(json.dumps(info, separators=(",", ":")).encode())


def _message_info(message: Message) -> dict[str, str]:
    received = datetime.fromtimestamp(message.content.timestamp, UTC)
    kind = "quota" if isinstance(message.content, QuotaExceeded) else "message"
    return {
        "msgId": b64(message.message_id).decode(),
        "msgTs": f"{received:%Y-%m-%dT%H:%M:%SZ}",
        "msgType": kind,
    }


def _send(broker: Broker, client: Client, request: Received[Send], queue: Queue) -> SmpMessage:
    _refuse_unless(len(request.message.body) <= max_message_length(client.params.version), LARGE_MSG)
    _refuse_unless(broker.send(queue, request.message) is not None, QUOTA)
    return Ok()


def _nsub(broker: Broker, client: Client, request: Received[Nsub], notifier: Notifier) -> SmpMessage:
    service = acting_service(broker, client, request, ServiceRole.NOTIFIER)
    broker.subscribe(broker.notifiers, notifier.notifier_id, client, service)
    broker.offer_pending(notifier)
    return Sok(None if service is None else service.service_id)


def _nsubs(broker: Broker, client: Client, request: Received[Nsubs], service: Service) -> SmpMessage:
    if broker.subscribe_service(broker.notifiers, service, client):
        for queue_id in service.queue_ids:
            queue = broker.state.queues.by_notifier(queue_id)
            if queue is not None and queue.notifier is not None:
                broker.offer_pending(queue.notifier)
    return Soks(service.queues)


def _ping(broker: Broker, client: Client, request: Received[Ping], _subject: None) -> SmpMessage:
    return Pong()


def _unsupported(broker: Broker, client: Client, request: Received[Any], _subject: None) -> SmpMessage:
    raise ProtocolError(CMD_PROHIBITED)


HANDLERS: Mapping[type[Any], Handler] = {
    New: Handler(authentication.creator, _new, in_services_name=True),
    Sub: Handler(authentication.recipient, _sub, in_services_name=True),
    Subs: Handler(authentication.messaging_service, _subs),
    Key: Handler(authentication.recipient, _key),
    Skey: Handler(authentication.securing_sender, _skey),
    Nkey: Handler(authentication.recipient, _nkey),
    Ndel: Handler(authentication.recipient, _ndel),
    Get: Handler(authentication.recipient, _get),
    Ack: Handler(authentication.recipient, _ack),
    Off: Handler(authentication.recipient, _off),
    Del: Handler(authentication.recipient, _del),
    Que: Handler(authentication.recipient, _que),
    Send: Handler(authentication.sender, _send),
    Nsub: Handler(authentication.notifier, _nsub, in_services_name=True),
    Nsubs: Handler(authentication.notifier_service, _nsubs),
    Ping: Handler(authentication.nobody, _ping),
    **dict.fromkeys(
        (Rkey, Lset, Ldel, Lkey, Lget, Prxy, Pfwd, Rfwd), Handler(authentication.nobody, _unsupported)
    ),
}
