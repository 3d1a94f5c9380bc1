"""The NTF handshake: the server speaks first, the client chooses the version."""

from __future__ import annotations

from construct import If, Int16ub, Struct

from protocol.crypto import SigningKey, X25519PrivateKey, X25519PublicKey
from protocol.errors import (
    TE_BAD_AUTH,
    TE_IDENTITY,
    TE_SESSION,
    TE_VERSION,
    DecodeError,
    HandshakeError,
)
from protocol.handshake import Agreed, Step, VersionRangeFormat, agree_version, offered_range, parse_hello
from protocol.session_params import ntf_params
from protocol.signed_key import LargeString, ShortString, open_signed_key, sign_key
from protocol.versions import NTF_BATCHING, NTF_BLOCK_SIZE, NTF_VERSIONS, VersionRange

ServerHello = Struct(
    "versions" / VersionRangeFormat,
    "session_id" / ShortString,
    "signed_key" / If(lambda hello: hello.versions.max >= NTF_BATCHING, LargeString),
)
ClientHello = Struct("version" / Int16ub, "key_hash" / ShortString)


class NtfServerHandshake:
    block_size = NTF_BLOCK_SIZE

    def __init__(
        self,
        session_id: bytes,
        key_hash: bytes,
        signer: SigningKey,
        session_key: X25519PrivateKey,
        versions: VersionRange = NTF_VERSIONS,
    ) -> None:
        self._session_id = session_id
        self._key_hash = key_hash
        self._signer = signer
        self._session_key = session_key
        self._versions = versions

    def start(self) -> bytes:
        modern = self._versions.max >= NTF_BATCHING
        return bytes(
            ServerHello.build(
                {
                    "versions": {"min": self._versions.min, "max": self._versions.max},
                    "session_id": self._session_id,
                    "signed_key": sign_key(self._signer, self._session_key.public) if modern else None,
                }
            )
        )

    def receive(self, content: bytes) -> Step:
        hello = parse_hello(ClientHello, content)
        if hello.key_hash != self._key_hash:
            raise HandshakeError(TE_IDENTITY)
        if hello.version not in self._versions:
            raise HandshakeError(TE_VERSION)
        params = ntf_params(hello.version, self._session_id, own_session_key=self._session_key)
        return Step(agreed=Agreed(params))


class NtfClientHandshake:
    block_size = NTF_BLOCK_SIZE

    def __init__(
        self, session_id: bytes, key_hash: bytes, leaf: bytes, versions: VersionRange = NTF_VERSIONS
    ) -> None:
        """`leaf`: the certificate that the server showed in TLS."""
        self._session_id = session_id
        self._key_hash = key_hash
        self._leaf = leaf
        self._versions = versions

    def start(self) -> None:
        return None

    def receive(self, content: bytes) -> Step:
        hello = parse_hello(ServerHello, content)
        if hello.session_id != self._session_id:
            raise HandshakeError(TE_SESSION)
        version = agree_version(self._versions, offered_range(hello))
        server_key = None if hello.signed_key is None else self._open(hello.signed_key)
        reply = ClientHello.build({"version": version, "key_hash": self._key_hash})
        return Step(reply, Agreed(ntf_params(version, self._session_id, peer_session_key=server_key)))

    def _open(self, signed_key: bytes) -> X25519PublicKey:
        try:
            return open_signed_key(self._leaf, signed_key, X25519PublicKey)
        except DecodeError:
            raise HandshakeError(TE_BAD_AUTH) from None
