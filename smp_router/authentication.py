"""Finding what a command is about and checking that its sender may touch it.

Whatever is wrong, the answer is AUTH and costs the same: a dummy key is checked where there is none.
"""

from __future__ import annotations

from typing import Any

from protocol.connection import Received
from protocol.crypto import AuthPublicKey
from protocol.encoding import EntityId
from protocol.errors import AUTH, SERVICE, ProtocolError
from protocol.smp_handshake import ServiceRole
from protocol.smp_messages import Lget, Lkey, Send, Skey
from protocol.transmission import verify
from smp_router.broker import Broker
from smp_router.client import Client
from smp_router.queues import Notifier, Queue
from smp_router.services import Service

Request = Received[Any]


def is_authorised(client: Client, key: AuthPublicKey | None, request: Request) -> bool:
    """Whether the request was authorised with this key; without one, a dummy is checked."""
    prefix = b""
    if request.raw.service_signature is not None and client.params.service is not None:
        prefix = client.params.service.fingerprint
    return verify(client.params, key, request.raw, prefix)


def _check(client: Client, key: AuthPublicKey | None, request: Request) -> None:
    if not is_authorised(client, key, request):
        raise ProtocolError(AUTH)


def creator(broker: Broker, client: Client, request: Request) -> None:
    """NEW is authorised with the key it brings."""
    _check(client, request.message.recipient_key, request)


def recipient(broker: Broker, client: Client, request: Request) -> Queue:
    queue = broker.state.queues.by_recipient(request.entity_id)
    keys = () if queue is None else queue.recipient_keys
    if len(keys) > 1:
        if client.proven_key not in keys:
            raise ProtocolError(AUTH)
    else:
        _check(client, keys[0] if keys else None, request)
    assert queue is not None
    return queue


def several_keys(broker: Broker, request: Request) -> tuple[AuthPublicKey, ...]:
    """The keys of a queue that has more than one: checking them takes long, so that it is done beforehand."""
    queue = broker.state.queues.by_recipient(request.entity_id)
    return () if queue is None or len(queue.recipient_keys) < 2 else queue.recipient_keys


def securing_sender(broker: Broker, client: Client, request: Received[Skey]) -> Queue:
    """SKEY is authorised with the key it brings."""
    return _bringing_key(client, broker.state.queues.by_sender(request.entity_id), request)


def securing_reader(broker: Broker, client: Client, request: Received[Lkey]) -> Queue:
    """LKEY is, too, and names the queue by its link."""
    return _bringing_key(client, broker.state.queues.by_link(request.entity_id), request)


def _bringing_key(client: Client, queue: Queue | None, request: Request) -> Queue:
    _check(client, None if queue is None else request.message.sender_key, request)
    assert queue is not None
    return queue


def reader(broker: Broker, client: Client, request: Received[Lget]) -> Queue:
    """Whoever knows the link id may read."""
    queue = broker.state.queues.by_link(request.entity_id)
    if queue is None:
        raise ProtocolError(AUTH)
    return queue


def sender(broker: Broker, client: Client, request: Received[Send]) -> Queue:
    """An unsecured queue takes only messages without authorisation, a secured one only authorised ones."""
    queue = broker.state.queues.by_sender(request.entity_id)
    key = None if queue is None else queue.sender_key
    if request.raw.auth:
        _check(client, key, request)
    elif queue is None or key is not None:
        raise ProtocolError(AUTH)
    assert queue is not None
    if queue.suspended:
        raise ProtocolError(AUTH)
    return queue


def notifier(broker: Broker, client: Client, request: Request) -> Notifier:
    queue = broker.state.queues.by_notifier(request.entity_id)
    found = None if queue is None else queue.notifier
    _check(client, None if found is None else found.key, request)
    assert found is not None
    return found


def messaging_service(broker: Broker, client: Client, request: Request) -> Service:
    return _service_command(broker, client, request, ServiceRole.MESSAGING)


def notifier_service(broker: Broker, client: Client, request: Request) -> Service:
    return _service_command(broker, client, request, ServiceRole.NOTIFIER)


def nobody(broker: Broker, client: Client, request: Request) -> None:
    """The command needs no authorisation."""


def _service_command(broker: Broker, client: Client, request: Request, role: ServiceRole) -> Service:
    """SUBS and NSUBS: the service's session key is the main authorisation."""
    session = client.params.service
    key = session.session_key if session is not None and request.entity_id == session.service_id else None
    valid = verify(client.params, key, request.raw)
    service = _known(broker, request.entity_id, role)
    if not valid or service is None or request.raw.service_signature is not None:
        raise ProtocolError(SERVICE)
    return service


def acting_service(broker: Broker, client: Client, request: Request, role: ServiceRole) -> Service | None:
    """The service in whose name NEW, SUB or NSUB came: only if it carries the service's signature too.

    In a session of a service with the role for it, such commands must carry it.
    """
    signature = request.raw.service_signature
    session = client.params.service
    if signature is None:
        if session is not None and _known(broker, session.service_id, role) is not None:
            raise ProtocolError(SERVICE)
        return None
    if session is None or not session.session_key.verify(signature, request.raw.signed):
        raise ProtocolError(SERVICE)
    service = _known(broker, session.service_id, role)
    if service is None:
        raise ProtocolError(SERVICE)
    return service


def _known(broker: Broker, service_id: EntityId, role: ServiceRole) -> Service | None:
    service = broker.state.services.get(service_id)
    return service if service is not None and service.role is role else None
