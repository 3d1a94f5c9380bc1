"""What the protocol costs: CPU time per unit, next to bare PyNaCl."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey as CertificateKey
from nacl import bindings as sodium
from nacl.signing import SigningKey as NaclSigningKey

from bench.measure import Row, beside, best_of, figure
from bench.part import Part
from protocol.blocks import BlockChain, pad
from protocol.connection import Block, Connection, Outgoing
from protocol.crypto import (
    TAG_SIZE,
    AuthPrivateKey,
    AuthPublicKey,
    Ed448PrivateKey,
    Ed25519PrivateKey,
    X25519PrivateKey,
    sha256,
)
from protocol.encoding import NO_CORR, CorrId, EntityId
from protocol.ntf_commands import NTF_COMMANDS, NTF_RESPONSES, Tchk
from protocol.ntf_handshake import NtfClientHandshake, NtfServerHandshake
from protocol.session_params import SessionParams
from protocol.smp_codec import SMP_COMMANDS, SMP_MESSAGES
from protocol.smp_handshake import SmpClientHandshake, SmpServerHandshake
from protocol.smp_messages import Nmsg, Nsub
from protocol.transmission import RawTransmission, verify
from protocol.versions import SMP_BLOCK_SIZE
from transport.certificates import KeyAlgorithm, make_ca, make_online

NMSG_PER_BLOCK = 80
NSUB_PER_BATCH = 90
DECODE_LIMIT_US = 4
SIGNATURE_SHARE = 0.7
BLOCK_SHARE = 0.6
SESSION_ID = bytes(range(32))

Work = tuple[Callable[[], object], int]


def entity_id() -> EntityId:
    return EntityId(os.urandom(24))


def corr_id() -> CorrId:
    return CorrId(os.urandom(24))


class Sessions:
    """A client and a server of each protocol after their handshakes; SMP blocks are not encrypted."""

    def __init__(self) -> None:
        now = datetime.now(UTC)
        ca_cert, ca_key = make_ca(KeyAlgorithm.ED25519, "CA", now)
        online = make_online(ca_cert, ca_key, KeyAlgorithm.ED25519, "localhost", now)
        assert isinstance(online.key, CertificateKey)
        signer = Ed25519PrivateKey(online.key.private_bytes_raw())
        session_key, chain = X25519PrivateKey(os.urandom(32)), online.chain
        key_hash = sha256(chain[1])
        self.ntf_client = Connection(
            NtfClientHandshake(SESSION_ID, key_hash, chain[0]),
            NTF_RESPONSES,
            NTF_COMMANDS,
            checks_credentials=False,
        )
        self.ntf_server = Connection(
            NtfServerHandshake(SESSION_ID, key_hash, signer, session_key),
            NTF_COMMANDS,
            NTF_RESPONSES,
            checks_credentials=True,
        )
        router = SmpServerHandshake(
            SESSION_ID, chain, signer, session_key, service_id=lambda fingerprint, role: entity_id()
        )
        self.smp_client = Connection(
            SmpClientHandshake(SESSION_ID, key_hash, chain),
            SMP_MESSAGES,
            SMP_COMMANDS,
            checks_credentials=False,
        )
        self.smp_router = Connection(router, SMP_COMMANDS, SMP_MESSAGES, checks_credentials=True)
        shake(self.ntf_client, self.ntf_server)
        shake(self.smp_client, self.smp_router)


def shake(client: Connection[Any, Any], server: Connection[Any, Any]) -> None:
    client.receive_data(server.data_to_send())
    server.receive_data(client.data_to_send())


def agreed(connection: Connection[Any, Any]) -> SessionParams:
    assert connection.params is not None
    return connection.params


def decode_work(sessions: Sessions) -> Work:
    batch = [
        Outgoing(NO_CORR, entity_id(), Nmsg(os.urandom(24), os.urandom(144))) for _ in range(NMSG_PER_BLOCK)
    ]
    block = sessions.smp_router.send(batch)
    assert len(block) == SMP_BLOCK_SIZE
    events = sessions.smp_client.receive_data(block)
    assert isinstance(events[0], Block)
    assert all(isinstance(item.message, Nmsg) for item in events[0].items)  # type: ignore[union-attr]
    return lambda: sessions.smp_client.receive_data(block), NMSG_PER_BLOCK


def sign_works(sessions: Sessions) -> dict[str, Work]:
    keys = [Ed25519PrivateKey(os.urandom(32)) for _ in range(NSUB_PER_BATCH)]
    batch = [Outgoing(corr_id(), entity_id(), Nsub(), key) for key in keys]
    text = os.urandom(87)  # as long as what NSUB signs
    bare = [NaclSigningKey(key.seed) for key in keys]

    def sign_bare() -> None:
        for key in bare:
            key.sign(text)

    return {
        "NSUB": (lambda: sessions.smp_client.send(batch), NSUB_PER_BATCH),
        "bare sign": (sign_bare, NSUB_PER_BATCH),
    }


def verify_works(sessions: Sessions) -> dict[str, Work]:
    """The whole way of a signed command at a server: block, transmission, command, signature."""
    key = Ed25519PrivateKey(os.urandom(32))
    block = sessions.ntf_client.send(Outgoing(corr_id(), entity_id(), Tchk(), key) for _ in range(4))
    public, params = key.public, agreed(sessions.ntf_server)

    def receive() -> None:
        [event] = sessions.ntf_server.receive_data(block)
        assert isinstance(event, Block)
        for item in event.items:
            assert verify(params, public, item.raw)  # type: ignore[union-attr]

    bare, signed = NaclSigningKey(key.seed).verify_key, NaclSigningKey(key.seed).sign(os.urandom(87))
    return {"TCHK": (receive, 4), "bare verify": (lambda: bare.verify(signed), 1)}


def block_works() -> dict[str, Work]:
    content, chain_key = os.urandom(16000), os.urandom(32)
    key, nonce = os.urandom(32), os.urandom(24)
    padded = pad(content, SMP_BLOCK_SIZE - TAG_SIZE)
    boxed = sodium.crypto_secretbox(padded, nonce, key)
    sending = BlockChain(chain_key)
    block = BlockChain(chain_key).encrypt(content, SMP_BLOCK_SIZE)
    return {
        "encrypt": (lambda: sending.encrypt(content, SMP_BLOCK_SIZE), 1),
        "secretbox": (lambda: sodium.crypto_secretbox(padded, nonce, key), 1),
        "decrypt": (lambda: BlockChain(chain_key).decrypt(block), 1),
        "secretbox_open": (lambda: sodium.crypto_secretbox_open(boxed, nonce, key), 1),
    }


def dummy_works(sessions: Sessions) -> dict[str, Work]:
    """Real and dummy checks of each kind of authorisation; all of them fail or pass at the last step."""
    params = agreed(sessions.ntf_server)
    kinds: dict[str, AuthPrivateKey] = {
        "Ed25519": Ed25519PrivateKey(os.urandom(32)),
        "Ed448": Ed448PrivateKey(os.urandom(57)),
        "X25519": X25519PrivateKey(os.urandom(32)),
    }
    works: dict[str, Work] = {}
    for name, key in kinds.items():
        block = sessions.ntf_client.send([Outgoing(corr_id(), entity_id(), Tchk(), key)])
        [event] = sessions.ntf_server.receive_data(block)
        assert isinstance(event, Block)
        raw = event.items[0].raw  # type: ignore[union-attr]
        works[f"{name} known"] = (_check(params, key.public, raw), 1)
        works[f"{name} unknown"] = (_check(params, None, raw), 1)
    return works


def _check(params: SessionParams, key: AuthPublicKey | None, raw: RawTransmission) -> Callable[[], object]:
    assert verify(params, key, raw) is (key is not None)
    return lambda: verify(params, key, raw)


def measure(_: Path, *, rounds: int = 20) -> list[Row]:
    sessions = Sessions()
    works = {"NMSG": decode_work(sessions)} | sign_works(sessions) | verify_works(sessions)
    us = best_of(works | block_works() | dummy_works(sessions), rounds)
    rows = [figure("decode one NMSG of a block of 80", "us CPU", us["NMSG"], aim=DECODE_LIMIT_US)]
    for ours, bare, share, what in (
        ("NSUB", "bare sign", SIGNATURE_SHARE, "encode and sign one NSUB of a batch of 90"),
        ("TCHK", "bare verify", SIGNATURE_SHARE, "receive and verify one signed NTF command"),
        ("encrypt", "secretbox", BLOCK_SHARE, "encrypt one SMP block"),
        ("decrypt", "secretbox_open", BLOCK_SHARE, "decrypt one SMP block"),
    ):
        peer = beside(f"PyNaCl's {bare}", us[bare], at_least=share)
        rows.append(figure(what, "us CPU", us[ours], peer=peer))
    for kind in ("Ed25519", "Ed448", "X25519"):
        peer = beside("a known entity", us[f"{kind} known"])
        rows.append(figure(f"check {kind}, unknown entity", "us CPU", us[f"{kind} unknown"], peer=peer))
    return rows


PROTOCOL = Part(
    name="protocol",
    title="Protocol",
    measure=measure,
    quick={"rounds": 6},
    quick_repeats=2,
    seconds=12,
    quick_seconds=6,
    why="Each notification and command passes through this code, on the one thread that runs the"
    " daemon's event loop.",
    how="One thread, no sockets. Rounds of 10 ms of every work take turns, and the best round of each"
    " counts.",
    bound="signatures and ciphers are PyNaCl's. What decryption costs beyond secretbox is the"
    " derivation of each block's key (three HMAC-SHA512, 6 us) and HSalsa20. An unknown entity"
    " must cost as much as a known one, or the time would tell which ids exist: a ratio of 1 is"
    " the aim.",
)
