"""The public keys that start a ratchet: in confirmations with one version, in links with a range."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.agent.kem import (
    KEM_CIPHERTEXT_SIZE,
    KEM_PUBLIC_SIZE,
    Accepted,
    KemPair,
    KemParams,
    Proposed,
    pull_optional_kem,
    push_optional_kem,
    sized,
)
from protocol.agent.versions import E2E_PQ
from protocol.agent.x448 import X448Pair, X448PublicKey, decode_x448, pull_x448, push_x448
from protocol.crypto import sha256
from protocol.encoding import Reader, Writer
from protocol.errors import DecodeError
from protocol.query import bytes_text, parse_bytes, parse_versions, required, split_query, versions_text
from protocol.versions import VersionRange, pull_version_range, push_version_range


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


def pull_e2e_params(r: Reader) -> E2eParams:
    version, k1, k2 = r.pull_word16(), pull_x448(r), pull_x448(r)
    return E2eParams(version, k1, k2, pull_optional_kem(r) if version >= E2E_PQ else None)


def push_e2e_params(w: Writer, params: E2eParams) -> None:
    w.push_word16(params.version)
    push_x448(w, params.k1)
    push_x448(w, params.k2)
    if params.version >= E2E_PQ:
        push_optional_kem(w, params.kem)


def pull_e2e_uri(r: Reader) -> E2eUri:
    return E2eUri(pull_version_range(r), pull_x448(r), pull_x448(r), pull_optional_kem(r))


def push_e2e_uri(w: Writer, uri: E2eUri) -> None:
    push_version_range(w, uri.versions)
    push_x448(w, uri.k1)
    push_x448(w, uri.k2)
    push_optional_kem(w, uri.kem)


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
