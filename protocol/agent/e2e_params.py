"""The public keys that start a ratchet: in confirmations with one version, in links with a range."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.agent.forms import VERSIONS, Form, record
from protocol.agent.kem import (
    KEM_CIPHERTEXT_SIZE,
    KEM_PUBLIC_SIZE,
    OPTIONAL_KEM,
    Accepted,
    KemPair,
    KemParams,
    Proposed,
    sized,
)
from protocol.agent.versions import E2E_PQ
from protocol.agent.x448 import X448, X448Pair, X448PublicKey, decode_x448
from protocol.crypto import sha256
from protocol.encoding import Reader, Writer
from protocol.errors import DecodeError
from protocol.query import bytes_text, parse_bytes, parse_versions, required, split_query, versions_text
from protocol.versions import VersionRange


@dataclass(frozen=True, slots=True)
class E2eParams:
    version: int
    k1: X448PublicKey
    k2: X448PublicKey
    kem: KemParams | None = None

    @property
    def hash(self) -> bytes:
        """Tells keys apart in synchronisation, and decides who of two sends first."""
        return sha256(self.k1.raw + self.k2.raw)


@dataclass(frozen=True, slots=True)
class E2eUri:
    """The same in a link: the reader chooses the version."""

    versions: VersionRange
    k1: X448PublicKey
    k2: X448PublicKey
    kem: KemParams | None = None

    def at(self, version: int) -> E2eParams:
        return E2eParams(version, self.k1, self.k2, self.kem if version >= E2E_PQ else None)


@dataclass(frozen=True, slots=True)
class E2eKeys:
    """The private side: two pairs, and a KEM pair if post-quantum keys were offered."""

    k1: X448Pair
    k2: X448Pair
    kem: KemPair | None = field(default=None, repr=False)

    def uri(self, versions: VersionRange) -> E2eUri:
        return E2eUri(versions, self.k1.public, self.k2.public, self._proposed())

    def params(self, version: int) -> E2eParams:
        return self.uri(VersionRange(version, version)).at(version)

    def _proposed(self) -> Proposed | None:
        return Proposed(self.kem.public) if self.kem else None


def _pull_params(r: Reader) -> E2eParams:
    version, k1, k2 = r.pull_word16(), X448.pull(r), X448.pull(r)
    return E2eParams(version, k1, k2, OPTIONAL_KEM.pull(r) if version >= E2E_PQ else None)


def _push_params(w: Writer, params: E2eParams) -> None:
    w.push_word16(params.version)
    X448.push(w, params.k1)
    X448.push(w, params.k2)
    if params.version >= E2E_PQ:
        OPTIONAL_KEM.push(w, params.kem)


E2E_PARAMS = Form(_pull_params, _push_params)
E2E_URI = record(E2eUri, versions=VERSIONS, k1=X448, k2=X448, kem=OPTIONAL_KEM)


def e2e_uri_text(uri: E2eUri) -> str:
    text = f"v={versions_text(uri.versions)}&x3dh={bytes_text(uri.k1.der)},{bytes_text(uri.k2.der)}"
    if uri.kem is None or uri.versions.max < E2E_PQ:
        return text
    if isinstance(uri.kem, Accepted):
        text += f"&kem_ct={bytes_text(uri.kem.ciphertext)}"
    return text + f"&kem_key={bytes_text(uri.kem.public)}"


def parse_e2e_uri(text: str) -> E2eUri:
    fields = split_query(text)
    first, _, second = required(fields, "x3dh").partition(",")
    k1, k2 = decode_x448(parse_bytes(first)), decode_x448(parse_bytes(second))
    versions = parse_versions(required(fields, "v"))
    return E2eUri(versions, k1, k2, _parse_kem(fields.get("kem_ct"), fields.get("kem_key")))


def _parse_kem(ciphertext: str | None, public: str | None) -> KemParams | None:
    if public is None:
        if ciphertext is not None:
            raise DecodeError
        return None
    key = sized(parse_bytes(public), KEM_PUBLIC_SIZE)
    if ciphertext is None:
        return Proposed(key)
    return Accepted(sized(parse_bytes(ciphertext), KEM_CIPHERTEXT_SIZE), key)
