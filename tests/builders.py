"""Valid keys, ids and messages in one call, made of the fixed inputs of the captured vectors."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from protocol import ntf_commands as ntf
from protocol import smp_messages as smp
from protocol.addresses import SmpQueueNtf, SmpServer
from protocol.crypto import (
    AuthPrivateKey,
    AuthPublicKey,
    Ed448PrivateKey,
    Ed25519PrivateKey,
    X25519PrivateKey,
    X25519PublicKey,
)
from protocol.device_token import ApnsToken, DeviceToken, FcmToken, Provider, WebPushToken
from protocol.encoding import CorrId, EntityId
from protocol.smp_handshake import ServiceLogin, ServiceRole

VECTORS = Path(__file__).parent / "vectors" / "vectors.json"


@cache
def _document() -> Any:
    return json.loads(VECTORS.read_bytes())


def inputs() -> Any:
    return _document()["inputs"]


def vectors(group: str) -> list[Any]:
    """The vectors of a group; never none, so that a test over them cannot pass unseen."""
    found = [vector for vector in _document()["vectors"] if vector["group"] == group]
    assert found, group
    return found


def vector_groups() -> set[str]:
    return {vector["group"] for vector in _document()["vectors"]}


def fixed(name: str) -> bytes:
    """An input by its name: `sessionId`, `corrId`, `notifierId`…"""
    return bytes.fromhex(inputs()[f"{name}_hex"])


def ed25519(name: str = "queueSk") -> Ed25519PrivateKey:
    return Ed25519PrivateKey(bytes.fromhex(inputs()["ed25519_seeds"][name]))


def ed448(fill: int = 7) -> Ed448PrivateKey:
    return Ed448PrivateKey(bytes((fill,)) * 57)


def x25519(name: str = "queueX") -> X25519PrivateKey:
    return X25519PrivateKey(bytes.fromhex(inputs()["x25519_private"][name]))


def server_chain() -> tuple[bytes, ...]:
    """A server's leaf and CA; the leaf's key is `ed25519("serverCertSk")`."""
    return tuple(bytes.fromhex(der) for der in inputs()["serverCerts_der_hex"])


def service_chain() -> tuple[bytes, ...]:
    """A service's self-signed certificate; its key is `ed25519("serviceCertSk")`."""
    return tuple(bytes.fromhex(der) for der in inputs()["serviceCert_der_hex"])


def service_login(role: ServiceRole = ServiceRole.NOTIFIER) -> ServiceLogin:
    return ServiceLogin(role, service_chain(), ed25519("serviceCertSk"), ed25519("serviceSessSk"))


def corr_id(number: int = 1) -> CorrId:
    return CorrId(number.to_bytes(24, "big"))


def entity_id(number: int = 1) -> EntityId:
    return EntityId(b"e" + number.to_bytes(23, "big"))


def smp_server(host: str = "localhost", port: str = "5223") -> SmpServer:
    return SmpServer((host,), port, fixed("keyHash"))


def queue_ntf(number: int = 1, server: SmpServer | None = None) -> SmpQueueNtf:
    return SmpQueueNtf(server or smp_server(), entity_id(number))


def apns_token(token: bytes = b"abcd" * 16, provider: Provider = Provider.APNS_TEST) -> ApnsToken:
    return ApnsToken(provider, token)


def fcm_token(token: bytes = b"registration:token") -> FcmToken:
    return FcmToken(token)


def web_push_token(host: bytes = b"push.example", port: bytes = b"") -> WebPushToken:
    return WebPushToken(host, port, b"/secret/path", b"a" * 16, b"\x04" + b"p" * 64)


def tnew(
    device: DeviceToken | None = None,
    auth_key: AuthPublicKey | None = None,
    dh_key: X25519PublicKey | None = None,
) -> ntf.Tnew:
    return ntf.Tnew(device or apns_token(), auth_key or ed25519().public, dh_key or x25519("tknX").public)


def snew(
    token_id: EntityId | None = None,
    queue: SmpQueueNtf | None = None,
    notifier_key: AuthPrivateKey | None = None,
) -> ntf.Snew:
    return ntf.Snew(token_id or EntityId(fixed("tokenId")), queue or queue_ntf(), notifier_key or ed25519())


def new(notifier: bool = False, password: bytes | None = None) -> smp.New:
    keys = smp.NotifierKeys(ed25519().public, x25519("clientX").public) if notifier else None
    return smp.New(
        recipient_key=ed25519().public, dh_key=x25519("clientX").public, password=password, notifier=keys
    )


def ids() -> smp.Ids:
    return smp.Ids(recipient_id=entity_id(1), sender_id=entity_id(2), dh_key=x25519("serverX").public)


def nmsg(number: int = 1) -> smp.Nmsg:
    return smp.Nmsg(number.to_bytes(24, "big"), bytes((number % 256,)) * 144)
