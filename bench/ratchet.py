"""What the ratchet costs: CPU time per message, beside bare primitives."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.x448 import X448PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from pqcrypto.kem import sntrup_761

from bench.measure import Row, beside, best_of, figure
from bench.part import Part
from protocol.agent.e2e_params import E2eKeys
from protocol.agent.envelopes import padded_sizes
from protocol.agent.kem import Encapsulated, KemPair, encapsulate, new_kem_pair
from protocol.agent.ratchet import Decrypted, creator_ratchet, decrypt, joiner_ratchet, next_sealer
from protocol.agent.ratchet_header import HEADER_SIZE, PQ_HEADER_SIZE
from protocol.agent.ratchet_state import Ratchet, decode_ratchet, encode_ratchet
from protocol.agent.versions import AGENT_VERSIONS, E2E_VERSIONS
from protocol.agent.x3dh import joiner_kem, joiner_params
from protocol.agent.x448 import X448_SIZE, X448Pair, x448_pair
from protocol.crypto import hkdf_sha512, hkdf_sha512_pair

Work = tuple[Callable[[], object], int]
VERSION = E2E_VERSIONS.max
TEXT = b"x" * 200
MESSAGE_SHARE = 0.3
STEP_SHARE = 0.6


class Random:
    """KEM pairs are made ahead, as the agent does."""

    def __init__(self) -> None:
        self._pair = new_kem_pair()

    def dh(self) -> X448Pair:
        return x448_pair(os.urandom(X448_SIZE))

    def kem_pair(self) -> KemPair:
        return self._pair

    def encapsulate(self, public: bytes) -> Encapsulated:
        return encapsulate(public)


FRESH = Random()


def encrypt(ratchet: Ratchet, size: int) -> tuple[Ratchet, bytes]:
    following, sealer = next_sealer(ratchet, VERSION)
    return following, sealer.seal(TEXT, size)


def opened(ratchet: Ratchet, message: bytes) -> Decrypted:
    done = decrypt(ratchet, {}, message, FRESH)
    assert done.error is None
    return done


def talking(pq: bool, size: int) -> tuple[Ratchet, Ratchet]:
    """Two that have exchanged enough to have agreed on KEM steps, if they want them."""
    keys = E2eKeys(FRESH.dh(), FRESH.dh(), FRESH.kem_pair() if pq else None)
    theirs, joiner = keys.params(VERSION), E2eKeys(FRESH.dh(), FRESH.dh())
    kem = joiner_kem(theirs, pq, VERSION, FRESH)
    b = joiner_ratchet(joiner, kem, theirs, VERSION, FRESH)
    a = creator_ratchet(keys, joiner_params(joiner, kem, VERSION), VERSION, pq)
    for _ in range(2):
        b, message = encrypt(b, size)
        a = opened(a, message).ratchet
        a, message = encrypt(a, size)
        b = opened(b, message).ratchet
    return a, b


def works(pq: bool) -> dict[str, Work]:
    size = padded_sizes(AGENT_VERSIONS.max, pq).message
    a, b = talking(pq, size)
    a, first = encrypt(a, size)
    b = opened(b, first).ratchet
    _, same = encrypt(a, size)
    _, step = encrypt(b, size)
    stored = encode_ratchet(a)
    return {
        "encrypt": (lambda: encrypt(a, size), 1),
        "decrypt": (lambda: opened(b, same), 1),
        "step": (lambda: opened(decode_ratchet(stored), step), 1),
        "store": (lambda: encode_ratchet(decode_ratchet(stored)), 1),
    }


def primitives(pq: bool) -> dict[str, Work]:
    key, iv, associated = os.urandom(32), os.urandom(16), os.urandom(236)
    size = padded_sizes(AGENT_VERSIONS.max, pq).message
    header, body = bytes(PQ_HEADER_SIZE if pq else HEADER_SIZE), bytes(size)
    gcm, other = AESGCM(key), os.urandom(32)
    sealed_header, sealed = gcm.encrypt(iv, header, associated), gcm.encrypt(iv, body, associated)
    private, peer = X448PrivateKey.generate(), X448PrivateKey.generate().public_key()
    pair = new_kem_pair()
    made = encapsulate(pair.public)

    def seal() -> None:
        hkdf_sha512_pair(key, b"SimpleXChainRatchet")
        AESGCM(other).encrypt(iv, header, associated)
        AESGCM(key).encrypt(iv, body, associated)

    def unseal() -> None:
        hkdf_sha512_pair(key, b"SimpleXChainRatchet")
        AESGCM(key).decrypt(iv, sealed_header, associated)
        AESGCM(key).decrypt(iv, sealed, associated)

    def advance() -> None:
        unseal()
        X448PrivateKey.generate().public_key()
        for _ in range(2):
            hkdf_sha512(key, private.exchange(peer), b"SimpleXRootRatchet", 96)
        if pq:
            sntrup_761.encaps(pair.public)
            sntrup_761.decaps(pair.secret, made.ciphertext)

    return {"encrypt alone": (seal, 1), "decrypt alone": (unseal, 1), "step alone": (advance, 1)}


def measure(_: Path, *, rounds: int = 20) -> list[Row]:
    rows: list[Row] = []
    for pq in (False, True):
        us, kind = best_of(works(pq) | primitives(pq), rounds), "with PQ" if pq else "without PQ"
        for name, what, share in (
            ("encrypt", "encrypt one message", MESSAGE_SHARE),
            ("decrypt", "decrypt one message", MESSAGE_SHARE),
            ("step", "decrypt one that changes direction", STEP_SHARE),
        ):
            peer = beside("primitives", us[f"{name} alone"], at_least=share)
            rows.append(figure(f"{what}, {kind}", "us CPU", us[name], peer=peer))
        rows.append(figure(f"read and write the state, {kind}", "us CPU", us["store"]))
    pair = best_of({"pair": (new_kem_pair, 1)}, rounds=5)["pair"]
    return [*rows, figure("make a KEM pair", "us CPU", pair)]


RATCHET = Part(
    name="ratchet",
    title="Ratchet",
    measure=measure,
    quick={"rounds": 6},
    seconds=18,
    quick_seconds=4,
    why="The agents' end-to-end encryption of each message.",
    how="One message of 200 bytes, padded as on the wire (15,840 bytes; 13,618 with post-quantum"
    " steps), beside the HKDF, AES-GCM, X448 and sntrup761 calls that it cannot do without.",
    bound="those calls. A message without a change of direction is cheaper than the signature of the"
    " SEND that carries it. A change of direction with post-quantum steps also needs a new KEM"
    " pair: pairs are made ahead of need, in another process.",
)
