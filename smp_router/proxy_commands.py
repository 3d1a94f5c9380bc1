"""PRXY and PFWD for clients of this router as a proxy, RFWD for proxies that bring commands of theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from protocol.blocks import pack_batches, split_batch
from protocol.connection import Outgoing, Received, Rejected, read_item, write_item
from protocol.errors import (
    BLOCK,
    CRYPTO,
    PROXY_BASIC_AUTH,
    PROXY_TIMEOUT,
    TE_NO_AUTH,
    DecodeError,
    ProtocolError,
    proxy_broker_error,
)
from protocol.proxy import ClientLayer, Forwarded, ForwardedAnswer, open_forwarded, seal_forwarded_answer
from protocol.session_params import SessionParams, smp_params
from protocol.smp_codec import SMP_COMMANDS
from protocol.smp_messages import Err, Pfwd, Prxy, Rfwd, Rres, SmpCommand, SmpMessage
from protocol.versions import SMP_BLOCK_SIZE, SMP_VERSIONS
from smp_router.broker import Broker
from smp_router.client import ROUTER_MESSAGES, Client

if TYPE_CHECKING:
    from smp_router.relays import Relays

NO_RELAY_KEY = proxy_broker_error(b"TRANSPORT " + TE_NO_AUTH.text)
MAX_CONNECTING_PER_CLIENT = 8
Respond = Callable[[Broker, Client, Received[SmpCommand]], SmpMessage]


async def proxy_session(
    broker: Broker, client: Client, request: Received[Prxy], _subject: None
) -> SmpMessage:
    if not broker.config.proxy or not broker.config.admits(request.message.password):
        raise ProtocolError(PROXY_BASIC_AUTH)
    if client.connecting >= MAX_CONNECTING_PER_CLIENT:
        raise ProtocolError(PROXY_TIMEOUT)

    def may_dial() -> bool:
        return client.allowance is None or client.allowance.new_relay()

    client.connecting += 1
    try:
        connecting = _relays(broker).connect(request.message.server, client.creator, may_dial)
        return await _while_counted(broker, client, connecting)
    finally:
        client.connecting -= 1


async def proxy_forward(
    broker: Broker, client: Client, request: Received[Pfwd], _subject: None
) -> SmpMessage:
    broker.counts["commands_forwarded"] += 1
    forwarding = _relays(broker).forward(request.entity_id, request.corr_id, request.message)
    return await _while_counted(broker, client, forwarding)


def _relays(broker: Broker) -> Relays:
    """Made by the first command: a router that forwards nothing starts faster without a client's modules."""
    if broker.relays is None:
        from smp_router.relays import Relays

        broker.relays = Relays(broker.config)
    return broker.relays


async def _while_counted(broker: Broker, client: Client, work: Any) -> SmpMessage:
    """A client that has too much under way is told so at once: the rest of its commands must not wait."""
    if client.forwarding >= broker.config.max_forwarded:
        work.close()
        raise ProtocolError(PROXY_TIMEOUT)
    client.forwarding += 1
    try:
        answer: SmpMessage = await work
        return answer
    finally:
        client.forwarding -= 1


def relay_forward(broker: Broker, client: Client, request: Received[Rfwd], respond: Respond) -> SmpMessage:
    """Open both layers, carry the command out for whoever sent it, seal the answer in both layers."""
    params = client.params
    if params.shared_secret is None or params.own_session_key is None:
        raise ProtocolError(NO_RELAY_KEY)
    try:
        forwarded = open_forwarded(params.shared_secret, request.corr_id, request.message.body)
        layer = ClientLayer.agree(params.own_session_key, forwarded.key, forwarded.corr_id)
        content = layer.open_command(forwarded.body)
    except DecodeError:
        raise ProtocolError(CRYPTO) from None
    broker.counts["commands_relayed"] += 1
    sealed = layer.seal_answer(_answer(broker, _inner_params(params, forwarded), _only(content), respond))
    answer = ForwardedAnswer(forwarded.corr_id, sealed)
    return Rres(seal_forwarded_answer(params.shared_secret, request.corr_id, answer))


def _only(content: bytes) -> bytes:
    """What is no batch is answered to the client, as a transmission is that does not parse."""
    try:
        transmissions = split_batch(content)
    except DecodeError:
        return b""
    if len(transmissions) != 1:
        raise ProtocolError(BLOCK)
    return transmissions[0]


def _inner_params(params: SessionParams, forwarded: Forwarded) -> SessionParams:
    """As if the client had a session of its own: in its version, under the proxy's session id."""
    version = min(forwarded.version, SMP_VERSIONS.max)
    return smp_params(version, params.session_id, own_session_key=params.own_session_key)


def _answer(broker: Broker, params: SessionParams, transmission: bytes, respond: Respond) -> bytes:
    item = read_item(params, transmission, SMP_COMMANDS, checks_credentials=True)
    answer: SmpMessage
    if isinstance(item, Rejected):
        answer = Err(item.error)
    else:
        try:
            answer = respond(broker, Client(params, 0, broker.state.records), item)
        except ProtocolError as refusal:
            answer = Err(refusal.error)
    written = write_item(params, Outgoing(item.corr_id, item.entity_id, answer), ROUTER_MESSAGES)
    (packed,) = pack_batches([written], SMP_BLOCK_SIZE)
    return packed
