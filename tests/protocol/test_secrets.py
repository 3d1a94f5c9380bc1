"""What must not leak cannot be printed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import ntf_commands as ntf
from protocol import smp_messages as smp
from protocol.connection import Block, Outgoing, Received, Rejected
from protocol.crypto import AuthPrivateKey, Ed25519PrivateKey
from protocol.device_token import DeviceToken, WebPushToken
from protocol.encoding import NO_CORR, CorrId, EntityId
from protocol.errors import BLOCK
from protocol.handshake import Agreed
from protocol.push_messages import PnMessage
from protocol.session_params import ServiceSession, smp_params
from protocol.smp_handshake import ServiceLogin, ServiceRole
from protocol.transmission import RawTransmission
from protocol.versions import VersionRange
from tests.builders import ed25519, queue_ntf, smp_server, snew, tnew, x25519
from tests.protocol import strategies as some

secrets = st.binary(min_size=8, max_size=60)


def hides(value: Any, *hidden: bytes) -> None:
    """Neither as bytes' repr, nor as text, nor in hex; not even a piece of 6 bytes."""
    for shown in (repr(value), str(value)):
        for secret in hidden:
            for form in (repr(secret)[2:-1], secret.hex(), repr(secret[:6])[2:-1], secret[:6].hex()):
                assert form not in shown


def unlikely(secret: bytes) -> bytes:
    """Bytes that no repr holds by chance."""
    return b"\x01\xfe~SECRET~" + secret


@given(some.private_keys)
@settings(max_examples=50)
def test_private_keys(key: AuthPrivateKey) -> None:
    if len(set(key.der[16:])) < 6:
        return
    private = key.seed if hasattr(key, "seed") else key.raw
    hides(key, private)
    hides(snew(notifier_key=key), private)
    hides(Outgoing(NO_CORR, EntityId(b""), ntf.Tchk(), key), private)


@given(secrets.map(unlikely))
def test_commands(secret: bytes) -> None:
    entity = EntityId(secret)
    token = WebPushToken(b"host", b"", secret, secret, secret)
    for device in (replace(some_apns(), token=secret), token):
        hides(device, secret)
        hides(tnew(device), secret)
        hides(ntf.Trpl(device), secret)
    queue = replace(queue_ntf(), notifier_id=entity)
    ids = smp.NotifierIds(entity, x25519().public)
    data = smp.LinkData(secret, secret)
    link = smp.NewLink(entity, entity, data)
    for message in (
        ntf.Tvfy(secret),
        snew(token_id=entity, queue=queue),
        ntf.IdTkn(entity, x25519().public),
        ntf.IdSub(entity),
        smp.Nid(ids),
        smp.Sok(entity),
        smp.Ids(
            recipient_id=entity,
            sender_id=entity,
            dh_key=x25519().public,
            link_id=entity,
            service_id=entity,
            notifier=ids,
        ),
        smp.New(recipient_key=ed25519().public, dh_key=x25519().public, password=secret, link=link),
        smp.Send(True, secret),
        smp.Lset(entity, data),
        smp.Lnk(entity, data),
        smp.Prxy(smp_server(), secret),
        smp.Pfwd(19, x25519().public, secret),
        smp.Rfwd(secret),
        smp.Pres(secret),
        smp.Rres(secret),
        smp.Pkey(secret, VersionRange(8, 19), (secret,), secret),
        smp.Msg(b"id", secret),
        smp.Nmsg(secret, secret),
        PnMessage(queue, 1, secret, secret),
        queue,
    ):
        hides(message, secret)


def some_apns() -> Any:
    device: DeviceToken = tnew().device_token
    return device


@given(secrets.map(unlikely))
def test_transmissions_and_sessions(secret: bytes) -> None:
    entity, corr = EntityId(secret), CorrId(secret)
    raw = RawTransmission(secret, secret, corr, entity, secret, secret)
    received = Received(corr, entity, ntf.Tvfy(secret), raw)
    key = Ed25519PrivateKey(secret)
    service = ServiceSession(entity, b"fingerprint", ed25519().public, key)
    params = smp_params(19, secret, own_session_key=x25519(), service=service)
    for value in (
        raw,
        received,
        Rejected(corr, entity, BLOCK),
        Outgoing(corr, entity, ntf.Tvfy(secret), key),
        Block([received]),
        service,
        params,
        Agreed(params),
        ServiceLogin(ServiceRole.NOTIFIER, (b"certificate",), key, key),
    ):
        hides(value, secret)
    hides(params, x25519().raw)
