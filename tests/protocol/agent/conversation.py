"""One side of a ratchet with its skipped keys, as a store would keep them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from protocol.agent.e2e_params import E2E_PARAMS
from protocol.agent.errors import (
    BodyNotOpened,
    DuplicateMessage,
    EarlierMessage,
    MalformedMessage,
    RatchetError,
    TooManySkipped,
    UnknownHeader,
)
from protocol.agent.kem import Fresh
from protocol.agent.ratchet import Decrypted, creator_ratchet, decrypt, joiner_ratchet, next_sealer
from protocol.agent.ratchet_state import MessageKey, Ratchet, decode_ratchet, encode_ratchet
from protocol.encoding import Reader
from tests.protocol.agent.captured import Script, creator_keys, joiner_keys, ratchet_kem, raw


@dataclass
class Party:
    ratchet: Ratchet
    skipped: dict[bytes, dict[int, MessageKey]] = field(default_factory=dict)

    def encrypt(self, plaintext: bytes, size: int, max_version: int, pq: bool | None = None) -> bytes:
        self.ratchet, sealer = next_sealer(self._stored(), max_version, pq)
        return sealer.seal(plaintext, size)

    def decrypt(self, message: bytes, fresh: Fresh) -> bytes:
        """Keeps what must be kept, then raises what was returned as an error."""
        done = decrypt(self._stored(), self.skipped, message, fresh)
        self._keep(done)
        if done.error:
            raise done.error
        return done.plaintext

    def _stored(self) -> Ratchet:
        return decode_ratchet(encode_ratchet(self.ratchet))

    def _keep(self, done: Decrypted) -> None:
        self.ratchet = done.ratchet
        if done.used:
            del self.skipped[done.used.header_key][done.used.number]
        for key in done.added:
            self.skipped.setdefault(key.header_key, {})[key.number] = key.key

    def counters(self) -> dict[str, Any]:
        r = self.ratchet
        return {
            "enable": r.enable,
            "nr": r.received,
            "ns": r.sent,
            "pn": r.previous_sent,
            "rcv_kem": r.rcv_kem,
            "root_key": r.root_key.hex(),
            "skipped": sum(len(keys) for keys in self.skipped.values()),
            "snd_kem": r.snd_kem,
            "support": r.support,
            "versions": [r.version, r.max_version],
        }


def parties(vector: Any) -> dict[str, Party]:
    """Both sides of an `x3dh` vector or a conversation, as they start."""
    theirs, ours = (E2E_PARAMS.pull(Reader(raw(vector[name]))) for name in ("a_params", "b_params"))
    kem, dh = ratchet_kem(vector["b_initial"]["kem"]), Script(vector["b_dh_private"])
    return {
        "a": Party(
            creator_ratchet(creator_keys(vector), ours, vector["max_version"], vector["a_pq_support"])
        ),
        "b": Party(joiner_ratchet(joiner_keys(vector), kem, theirs, vector["max_version"], dh)),
    }


def outcome(error: RatchetError) -> str:
    """An error by the name that the vectors have for it."""
    if isinstance(error, EarlierMessage):
        return f"earlier:{error.count}"
    if isinstance(error, TooManySkipped):
        return f"too_many_skipped:{error.count}"
    return {
        DuplicateMessage: "duplicate",
        UnknownHeader: "header",
        BodyNotOpened: "aes",
        MalformedMessage: "parse",
    }[type(error)]
