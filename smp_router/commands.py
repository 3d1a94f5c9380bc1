"""One handler per command; the table says who must have authorised it."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Coroutine, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from protocol import smp_messages as smp
from protocol.connection import Received
from protocol.crypto import AuthPublicKey, X25519PublicKey
from protocol.encoding import NO_ENTITY, CorrId, EntityId
from protocol.errors import (
    AUTH,
    CMD_PROHIBITED,
    CMD_SYNTAX,
    LARGE_MSG,
    NAME_NO_RESOLVER,
    NO_MSG,
    QUOTA,
    SERVICE,
    DecodeError,
    ErrorType,
    ProtocolError,
    store_error,
)
from protocol.link_crypto import sender_id_of
from protocol.messages_crypto import QuotaExceeded, max_message_length
from protocol.smp_handshake import ServiceRole
from protocol.smp_messages import SmpMessage
from smp_router import authentication
from smp_router.authentication import Request, acting_service
from smp_router.broker import ALL_SENT, Broker
from smp_router.client import Client, Reception
from smp_router.proxy_commands import proxy_forward, proxy_session, relay_forward
from smp_router.queues import Link, Notifier, Queue, StoredMessage, agree_secret, new_id
from smp_router.services import Service
from smp_router.storage import Creator, Holdings

CORR_ID_SIZE = 24
"Of ids that are random, as the protocol wants them: the same one again is the same command again."

MAX_RECIPIENT_KEYS = 32
"Of one queue: each may have to be tried for each command."

Response = SmpMessage | Coroutine[Any, Any, SmpMessage]
"What has to wait for another router is a coroutine; it raises ProtocolError as the others do."


class Handler(NamedTuple):
    authenticate: Callable[[Broker, Client, Any], Any]
    "Finds the queue, notifier or service that `run` is given."
    run: Callable[[Broker, Client, Any, Any], Response]
    in_services_name: bool = False
    "May also carry the signature of a service."
    when_blocked: bool = False
    "Also done with a queue that the operator blocked, or refused by itself."
    by_proxy: bool = False
    "Taken from a proxy, in the name of one of its clients."


def keys_to_try(broker: Broker, request: Request) -> tuple[AuthPublicKey, ...]:
    """Keys of which one must have authorised the command. `respond` relies on `proven_key` for them."""
    if HANDLERS[type(request.message)].authenticate is not authentication.recipient:
        return ()
    return authentication.several_keys(broker, request)


def respond(broker: Broker, client: Client, request: Request) -> Response:
    """Carry out a command. Raises ProtocolError with the answer it deserves."""
    handler = HANDLERS[type(request.message)]
    subject = handler.authenticate(broker, client, request)
    if request.raw.service_signature is not None and not handler.in_services_name:
        raise ProtocolError(SERVICE)
    if isinstance(subject, Queue) and not handler.when_blocked:
        _refuse_blocked(subject)
    if broker.state.records.failing and handler.authenticate is not authentication.nobody:
        raise ProtocolError(store_error("not available"))
    if isinstance(subject, Queue):
        broker.state.use(subject)
    return handler.run(broker, client, request, subject)


def _refuse_blocked(queue: Queue) -> None:
    if queue.blocked is not None:
        raise ProtocolError(queue.blocked.error)


def _refuse_unless(condition: bool, error: ErrorType) -> None:
    if not condition:
        raise ProtocolError(error)


def _refuse_beyond(broker: Broker, creator: Creator | None, more: Holdings) -> None:
    storage, config = broker.state.storage, broker.config
    _refuse_unless(storage.fits(more, config) and storage.fits_share(creator, more, config), QUOTA)


def _refuse_beyond_service(broker: Broker, service: Service | None, queue_id: EntityId = NO_ENTITY) -> None:
    """Queues that are the service's already may be subscribed again."""
    if service is not None and broker.state.services.owner(queue_id) is not service:
        _refuse_unless(len(service.queue_ids) < broker.config.max_service_queues, QUOTA)


def _count_drift(broker: Broker, told: smp.QueueSet | None, service: Service) -> None:
    """Services of versions that tell no count, or do not know it, cannot differ."""
    if told is not None and told.count >= 0 and told != service.queues:
        broker.counts[f"drift_{service.role.name.lower()}"] += 1


def _new(broker: Broker, client: Client, request: Received[smp.New], _subject: None) -> SmpMessage:
    command = request.message
    service = acting_service(broker, client, request, ServiceRole.MESSAGING)
    _refuse_unless(broker.config.new_queues and broker.config.admits(command.password), AUTH)
    _refuse_unless(client.allowance is None or client.allowance.new_queue(), QUOTA)
    existing = _made_before(broker, request)
    if existing is not None:
        try:
            dh_key = broker.state.agree_again(existing, command.dh_key)
        except DecodeError:
            raise ProtocolError(CMD_SYNTAX) from None
        return _ids(broker, client, command, service, existing, dh_key)
    _refuse_beyond_service(broker, service)
    _refuse_beyond(broker, client.creator, Holdings(queues=1, links=int(command.link is not None)))
    link = None if command.link is None else _new_link(broker, request.corr_id, command.link)
    try:
        dh_key, secret = agree_secret(command.dh_key)
        made = None if command.notifier is None else _make_notifier(command.notifier)
    except DecodeError:
        raise ProtocolError(CMD_SYNTAX) from None
    notifier, notifier_ids = made or (None, None)
    queue = Queue(
        recipient_id=new_id(),
        recipient_keys=(command.recipient_key,),
        secret=secret,
        sender_id=new_id() if command.link is None else command.link.sender_id,
        mode=command.mode,
        notifier=notifier,
        link=link,
        agreed=None if link is None else (command.dh_key, dh_key),
        creator=client.creator,
        unused_since=broker.timestamp(),
    )
    broker.state.add_queue(queue)
    broker.counts["queues_created"] += 1
    return _ids(broker, client, command, service, queue, dh_key, notifier_ids)


def _ids(
    broker: Broker,
    client: Client,
    command: smp.New,
    service: Service | None,
    queue: Queue,
    dh_key: X25519PublicKey,
    notifier: smp.NotifierIds | None = None,
) -> smp.Ids:
    if command.subscribe:
        broker.subscribe(broker.recipients, queue.recipient_id, client, service)
        client.receptions[queue.recipient_id] = Reception()
    elif service is not None:
        broker.state.associate(service, queue.recipient_id)
    return smp.Ids(
        recipient_id=queue.recipient_id,
        sender_id=queue.sender_id,
        dh_key=dh_key,
        mode=queue.mode,
        link_id=None if queue.link is None else queue.link.link_id,
        service_id=None if service is None else service.service_id,
        notifier=notifier,
    )


def _made_before(broker: Broker, request: Received[smp.New]) -> Queue | None:
    """The queue of an identical NEW with a link, whose answer its recipient may not have received."""
    command, link = request.message, request.message.link
    queue = None if link is None else broker.state.queues.by_sender(link.sender_id)
    if link is None or queue is None or queue.link is None or command.notifier is not None:
        return None
    same_link = link.data == queue.link.data and link.link_id in (None, queue.link.link_id)
    same_keys = queue.recipient_keys == (command.recipient_key,)
    return queue if same_link and same_keys and queue.mode is command.mode else None


def _new_link(broker: Broker, corr_id: CorrId, link: smp.NewLink) -> Link:
    """Another NEW with the same correlation id finds its sender id taken: so no two queues can be made."""
    queues = broker.state.queues
    _refuse_unless(link.sender_id == sender_id_of(corr_id), CMD_PROHIBITED)
    _refuse_unless(queues.by_sender(link.sender_id) is None, AUTH)
    _refuse_unless(link.link_id is None or queues.by_link(link.link_id) is None, AUTH)
    return Link(new_id() if link.link_id is None else link.link_id, link.data)


def _make_notifier(keys: smp.NotifierKeys) -> tuple[Notifier, smp.NotifierIds]:
    dh_key, secret = agree_secret(keys.dh_key)
    notifier = Notifier(new_id(), keys.notifier_key, secret)
    return notifier, smp.NotifierIds(notifier.notifier_id, dh_key)


def _sub(broker: Broker, client: Client, request: Received[smp.Sub], queue: Queue) -> SmpMessage:
    """A stored message follows the answer, also one that was delivered before and is not acknowledged."""
    service = acting_service(broker, client, request, ServiceRole.MESSAGING)
    _refuse_beyond_service(broker, service, queue.recipient_id)
    reception = client.receptions.setdefault(queue.recipient_id, Reception())
    _refuse_unless(not reception.by_get, CMD_PROHIBITED)
    broker.subscribe(broker.recipients, queue.recipient_id, client, service)
    reception.again = True
    client.offer(queue.recipient_id)
    return smp.Sok(None if service is None else service.service_id)


def _subs(broker: Broker, client: Client, request: Received[smp.Subs], service: Service) -> SmpMessage:
    _count_drift(broker, request.message.queues, service)
    if broker.subscribe_service(broker.recipients, service, client):
        for queue_id in service.queue_ids:
            client.offer(queue_id)
        client.offer(ALL_SENT)
    return smp.Soks(service.queues)


def _key(broker: Broker, client: Client, request: Request, queue: Queue) -> SmpMessage:
    _refuse_unless(broker.state.secure(queue, request.message.sender_key), AUTH)
    return smp.Ok()


def _rkey(broker: Broker, client: Client, request: Received[smp.Rkey], queue: Queue) -> SmpMessage:
    """Only what several people manage, an address, has several recipients."""
    keys = tuple(dict.fromkeys(request.message.keys))
    _refuse_unless(queue.mode is smp.QueueMode.CONTACT, AUTH)
    _refuse_unless(len(keys) <= MAX_RECIPIENT_KEYS, QUOTA)
    _refuse_beyond(broker, queue.creator, Holdings(keys=len(keys) - len(queue.recipient_keys)))
    broker.state.set_recipient_keys(queue, keys)
    return smp.Ok()


def _lset(broker: Broker, client: Client, request: Received[smp.Lset], queue: Queue) -> SmpMessage:
    """A link once set keeps its id and its fixed data; one that leads to a secured queue is of no use."""
    link = Link(request.message.link_id, request.message.data)
    _refuse_unless(queue.mode is smp.QueueMode.CONTACT or queue.sender_key is None, AUTH)
    if queue.link is None:
        _refuse_unless(broker.state.queues.by_link(link.link_id) is None, AUTH)
        _refuse_beyond(broker, queue.creator, Holdings(links=1))
    else:
        same = (queue.link.link_id, queue.link.data.fixed) == (link.link_id, link.data.fixed)
        _refuse_unless(same, AUTH)
    broker.state.set_link(queue, link)
    return smp.Ok()


def _ldel(broker: Broker, client: Client, request: Received[smp.Ldel], queue: Queue) -> SmpMessage:
    broker.state.set_link(queue, None)
    return smp.Ok()


def _lkey(broker: Broker, client: Client, request: Received[smp.Lkey], queue: Queue) -> SmpMessage:
    _skey(broker, client, request, queue)
    return _lnk(queue)


def _lget(broker: Broker, client: Client, request: Received[smp.Lget], queue: Queue) -> SmpMessage:
    public = queue.mode is smp.QueueMode.CONTACT or (queue.mode is None and queue.sender_key is None)
    _refuse_unless(public, AUTH)
    _refuse_blocked(queue)
    return _lnk(queue)


def _lnk(queue: Queue) -> SmpMessage:
    assert queue.link is not None
    return smp.Lnk(queue.sender_id, queue.link.data)


def _skey(broker: Broker, client: Client, request: Request, queue: Queue) -> SmpMessage:
    _refuse_unless(queue.mode is smp.QueueMode.MESSAGING, AUTH)
    return _key(broker, client, request, queue)


def _nkey(broker: Broker, client: Client, request: Received[smp.Nkey], queue: Queue) -> SmpMessage:
    try:
        notifier, ids = _make_notifier(request.message.keys)
    except DecodeError:
        raise ProtocolError(CMD_SYNTAX) from None
    broker.set_notifier(queue, notifier, by=client)
    return smp.Nid(ids)


def _ndel(broker: Broker, client: Client, request: Received[smp.Ndel], queue: Queue) -> SmpMessage:
    broker.set_notifier(queue, None, by=client)
    return smp.Ok()


def _get(broker: Broker, client: Client, request: Received[smp.Get], queue: Queue) -> SmpMessage:
    reception = client.receptions.get(queue.recipient_id)
    subscribed = broker.recipients.subscriber(queue.recipient_id) is client
    _refuse_unless(not subscribed and (reception is None or reception.by_get), CMD_PROHIBITED)
    return broker.next_message(client, queue, by_get=True) or smp.Ok()


def _ack(broker: Broker, client: Client, request: Received[smp.Ack], queue: Queue) -> SmpMessage:
    reception = client.receptions.get(queue.recipient_id)
    message_id = request.message.message_id
    if reception is None or reception.delivered != message_id:
        raise ProtocolError(NO_MSG)
    reception.delivered = None
    broker.state.acknowledge(queue, message_id)
    if reception.by_get:
        return smp.Ok()
    return broker.next_message(client, queue) or smp.Ok()


def _off(broker: Broker, client: Client, request: Received[smp.Off], queue: Queue) -> SmpMessage:
    broker.state.suspend(queue, broker.timestamp())
    return smp.Ok()


def _del(broker: Broker, client: Client, request: Received[smp.Del], queue: Queue) -> SmpMessage:
    broker.delete_queue(queue, by=client)
    client.receptions.pop(queue.recipient_id, None)
    return smp.Ok()


def _que(broker: Broker, client: Client, request: Received[smp.Que], queue: Queue) -> SmpMessage:
    info: dict[str, Any] = {
        "qiSnd": queue.sender_key is not None,
        "qiNtf": queue.notifier is not None,
    }
    reception = client.receptions.get(queue.recipient_id)
    if reception is not None:
        info["qiSub"] = {"qSubThread": "prohibitSub" if reception.by_get else "noSub"}
        if reception.delivered is not None:
            info["qiSub"]["qDelivered"] = _standard_b64(reception.delivered)
    info["qiSize"] = len(queue.messages)
    if queue.messages:
        info["qiMsg"] = _message_info(queue.messages[0])
    return smp.Info(json.dumps(info, separators=(",", ":")).encode())


def _standard_b64(data: bytes) -> str:
    """Here, and only here, the other alphabet."""
    return base64.b64encode(data).decode()


def _message_info(message: StoredMessage) -> dict[str, str]:
    received = datetime.fromtimestamp(message.content.timestamp, UTC)
    kind = "quota" if isinstance(message.content, QuotaExceeded) else "message"
    return {
        "msgId": _standard_b64(message.message_id),
        "msgTs": f"{received:%Y-%m-%dT%H:%M:%SZ}",
        "msgType": kind,
    }


def _send(broker: Broker, client: Client, request: Received[smp.Send], queue: Queue) -> SmpMessage:
    _refuse_unless(len(request.message.body) <= max_message_length(client.params.version), LARGE_MSG)
    _refuse_blocked(queue)
    if len(request.corr_id) == CORR_ID_SIZE and request.corr_id == queue.last_corr_id:
        return smp.Ok()
    broker.counts["messages_received"] += 1
    if broker.config.expire_on_send:
        broker.expire_messages(queue)
    _refuse_unless(broker.has_room(queue, request.message), QUOTA)
    _refuse_unless(broker.send(queue, request.message, request.corr_id) is not None, QUOTA)
    if queue.link is not None and queue.mode is smp.QueueMode.MESSAGING and queue.sender_key is not None:
        broker.state.set_link(queue, None)  # it was used: whoever secured the queue has what it led to
    return smp.Ok()


def _nsub(broker: Broker, client: Client, request: Received[smp.Nsub], notifier: Notifier) -> SmpMessage:
    service = acting_service(broker, client, request, ServiceRole.NOTIFIER)
    _refuse_beyond_service(broker, service, notifier.notifier_id)
    broker.subscribe(broker.notifiers, notifier.notifier_id, client, service)
    broker.offer_pending(notifier)
    return smp.Sok(None if service is None else service.service_id)


def _nsubs(broker: Broker, client: Client, request: Received[smp.Nsubs], service: Service) -> SmpMessage:
    _count_drift(broker, request.message.queues, service)
    if broker.subscribe_service(broker.notifiers, service, client):
        for queue_id in service.queue_ids:
            queue = broker.state.queues.by_notifier(queue_id)
            if queue is not None and queue.notifier is not None:
                broker.offer_pending(queue.notifier)
    return smp.Soks(service.queues)


def _rfwd(broker: Broker, client: Client, request: Received[smp.Rfwd], _subject: None) -> SmpMessage:
    return relay_forward(broker, client, request, _respond_to_forwarded)


def _respond_to_forwarded(broker: Broker, client: Client, request: Request) -> SmpMessage:
    _refuse_unless(HANDLERS[type(request.message)].by_proxy, CMD_PROHIBITED)
    response = respond(broker, client, request)
    assert not isinstance(response, Coroutine)
    return response


def _rslv(broker: Broker, client: Client, request: Received[smp.Rslv], _subject: None) -> SmpMessage:
    """Names are kept elsewhere: this router has no resolver."""
    raise ProtocolError(NAME_NO_RESOLVER)


def _ping(broker: Broker, client: Client, request: Received[smp.Ping], _subject: None) -> SmpMessage:
    return smp.Pong()


HANDLERS: Mapping[type[Any], Handler] = {
    smp.New: Handler(authentication.creator, _new, in_services_name=True),
    smp.Sub: Handler(authentication.recipient, _sub, in_services_name=True),
    smp.Subs: Handler(authentication.messaging_service, _subs),
    smp.Key: Handler(authentication.recipient, _key),
    smp.Skey: Handler(authentication.securing_sender, _skey, by_proxy=True),
    smp.Nkey: Handler(authentication.recipient, _nkey),
    smp.Ndel: Handler(authentication.recipient, _ndel),
    smp.Get: Handler(authentication.recipient, _get),
    smp.Ack: Handler(authentication.recipient, _ack),
    smp.Off: Handler(authentication.recipient, _off, when_blocked=True),
    smp.Del: Handler(authentication.recipient, _del, when_blocked=True),
    smp.Que: Handler(authentication.recipient, _que),
    smp.Send: Handler(authentication.sender, _send, when_blocked=True, by_proxy=True),
    smp.Nsub: Handler(authentication.notifier, _nsub, in_services_name=True),
    smp.Nsubs: Handler(authentication.notifier_service, _nsubs),
    smp.Rslv: Handler(authentication.nobody, _rslv, by_proxy=True),
    smp.Ping: Handler(authentication.nobody, _ping),
    smp.Rkey: Handler(authentication.recipient, _rkey),
    smp.Lset: Handler(authentication.recipient, _lset),
    smp.Ldel: Handler(authentication.recipient, _ldel),
    smp.Lkey: Handler(authentication.securing_reader, _lkey, by_proxy=True),
    smp.Lget: Handler(authentication.reader, _lget, when_blocked=True, by_proxy=True),
    smp.Prxy: Handler(authentication.nobody, proxy_session),
    smp.Pfwd: Handler(authentication.nobody, proxy_forward),
    smp.Rfwd: Handler(authentication.nobody, _rfwd),
}
