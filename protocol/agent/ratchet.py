"""The double ratchet with encrypted headers and post-quantum steps: states and bytes in, the same out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from protocol.agent.aead import AeadError, open_sealed, seal
from protocol.agent.e2e_params import E2eKeys, E2eParams
from protocol.agent.errors import (
    BodyNotOpened,
    DuplicateMessage,
    EarlierMessage,
    KemStateError,
    MalformedMessage,
    NoSendingChain,
    RatchetError,
    TooManySkipped,
    UnknownHeader,
)
from protocol.agent.kem import Accepted, Fresh, KemParams, decapsulate
from protocol.agent.ratchet_header import (
    EncryptedHeader,
    Header,
    RatchetMessage,
    decode_encrypted_header,
    decode_header,
    decode_ratchet_message,
    encode_encrypted_header,
    encode_header,
    header_size,
    sized_bytes,
)
from protocol.agent.ratchet_state import MessageKey, Ratchet, ReceivingChain, SendingChain, SkippedKeys
from protocol.agent.versions import E2E_PQ
from protocol.agent.x3dh import RatchetKem, accept, agree_as_creator, agree_as_joiner
from protocol.crypto import hkdf_sha512, hkdf_sha512_pair
from protocol.errors import DecodeError

MAX_SKIPPED = 512
"Keys kept for missing messages by one message."


def joiner_ratchet(
    keys: E2eKeys, kem: RatchetKem | None, theirs: E2eParams, max_version: int, fresh: Fresh
) -> Ratchet:
    """Sends first. `kem` is what `joiner_kem` made: it stands in the parameters that the peer gets."""
    agreed = agree_as_joiner(keys, kem, theirs)
    dh = fresh.dh()
    accepted = kem.accepted if kem else None
    shared = accepted.shared if accepted else b""
    root_key, chain_key, next_snd = _root(agreed.root_key, dh.exchange(theirs.k2), shared)
    return Ratchet(
        version=theirs.version,
        max_version=max_version,
        associated_data=agreed.associated_data,
        dh=dh,
        kem=kem,
        support=kem is not None,
        enable=kem is not None,
        snd_kem=accepted is not None,
        rcv_kem=False,
        root_key=root_key,
        snd=SendingChain(theirs.k2, chain_key, agreed.header_key),
        next_snd_header_key=next_snd,
        next_rcv_header_key=agreed.next_header_key,
    )


def creator_ratchet(keys: E2eKeys, theirs: E2eParams, max_version: int, pq_support: bool) -> Ratchet:
    """Receives first."""
    agreed = agree_as_creator(keys, theirs)
    return Ratchet(
        version=theirs.version,
        max_version=max_version,
        associated_data=agreed.associated_data,
        dh=keys.k2,
        kem=agreed.kem,
        support=pq_support,
        enable=pq_support,
        snd_kem=False,
        rcv_kem=False,
        root_key=agreed.root_key,
        next_snd_header_key=agreed.next_header_key,
        next_rcv_header_key=agreed.header_key,
    )


# Encrypting


@dataclass(frozen=True, slots=True)
class Sealer:
    """The key and header of one message: made when it is queued, used when it is sent, to every queue."""

    key: MessageKey
    associated_data: bytes = field(repr=False)
    header: bytes = field(repr=False)
    "With its length: the front of the message."

    def seal(self, plaintext: bytes, size: int) -> bytes:
        tag, body = seal(self.key.key, self.key.iv, self.associated_data, plaintext, size)
        return self.header + tag + body


def next_sealer(ratchet: Ratchet, max_version: int, pq: bool | None = None) -> tuple[Ratchet, Sealer]:
    """The state after the next message, and what seals it. Without `pq` the wish for KEM steps stays."""
    if ratchet.snd is None:
        raise NoSendingChain
    chain_key, key, header_iv = _chain(ratchet.snd.chain_key)
    version = ratchet.version
    enable = ratchet.enable if pq is None else pq
    support = ratchet.support or (version >= E2E_PQ and enable)
    highest = max(max_version, E2E_PQ if pq else version)
    kem = ratchet.kem.params if ratchet.kem else None
    header = Header(highest, ratchet.dh.public, kem, ratchet.previous_sent, ratchet.sent)
    plain, size = encode_header(header, version), header_size(version, support)
    tag, body = seal(ratchet.snd.header_key, header_iv, ratchet.associated_data, plain, size)
    encrypted = encode_encrypted_header(EncryptedHeader(version, header_iv, tag, body))
    following = replace(
        ratchet,
        max_version=highest,
        enable=enable,
        support=support,
        snd=replace(ratchet.snd, chain_key=chain_key),
        sent=ratchet.sent + 1,
        # The pair stays: later headers propose it again.
        kem=RatchetKem(ratchet.kem.pair) if ratchet.kem and pq is False else ratchet.kem,
    )
    return following, Sealer(key, ratchet.associated_data + encrypted, sized_bytes(version, encrypted))


# Decrypting


@dataclass(frozen=True, slots=True)
class SkippedKey:
    header_key: bytes = field(repr=False)
    number: int
    key: MessageKey


@dataclass(frozen=True, slots=True)
class Decrypted:
    """What to store: it stands also when `error` does."""

    ratchet: Ratchet
    plaintext: bytes = field(default=b"", repr=False)
    error: RatchetError | None = None
    added: tuple[SkippedKey, ...] = ()
    used: SkippedKey | None = None


def decrypt(ratchet: Ratchet, skipped: SkippedKeys, data: bytes, fresh: Fresh) -> Decrypted:
    """A RatchetError that is raised means that nothing changes."""
    try:
        message = decode_ratchet_message(data)
        encrypted = decode_encrypted_header(message.header)
        return _decrypt(ratchet, skipped, message, encrypted, fresh)
    except DecodeError:
        raise MalformedMessage from None


def _decrypt(
    ratchet: Ratchet, skipped: SkippedKeys, message: RatchetMessage, encrypted: EncryptedHeader, fresh: Fresh
) -> Decrypted:
    current = [ratchet.rcv.header_key] if ratchet.rcv else []
    for header_key in (*skipped, *current, ratchet.next_rcv_header_key):
        header = _open_header(ratchet, header_key, encrypted)
        if header is None:
            continue
        key = skipped.get(header_key, {}).get(header.number)
        if key is not None:
            return _opened(ratchet, key, message, used=SkippedKey(header_key, header.number, key))
        return _decrypt_next(ratchet, header_key, header, message, fresh)
    raise UnknownHeader


def _open_header(ratchet: Ratchet, header_key: bytes, header: EncryptedHeader) -> Header | None:
    try:
        plain = open_sealed(header_key, header.iv, ratchet.associated_data, header.tag, header.body)
    except AeadError:
        return None
    return decode_header(plain, header.version)


def _opened(
    ratchet: Ratchet,
    key: MessageKey,
    message: RatchetMessage,
    added: tuple[SkippedKey, ...] = (),
    used: SkippedKey | None = None,
) -> Decrypted:
    associated = ratchet.associated_data + message.header
    plaintext = b""
    error: RatchetError | None = None
    try:
        plaintext = open_sealed(key.key, key.iv, associated, message.tag, message.body)
    except AeadError:
        error = BodyNotOpened()
    except DecodeError:
        error = MalformedMessage()
    return Decrypted(ratchet, plaintext, error, added, used)


def _decrypt_next(
    ratchet: Ratchet, header_key: bytes, header: Header, message: RatchetMessage, fresh: Fresh
) -> Decrypted:
    """From the header on the new state is kept, whatever becomes of the body."""
    advances = ratchet.rcv is None or header_key != ratchet.rcv.header_key
    if advances and header_key != ratchet.next_rcv_header_key:
        raise UnknownHeader
    added: tuple[SkippedKey, ...] = ()
    if header.max_version > ratchet.version:
        upgraded = max(ratchet.version, min(header.max_version, ratchet.max_version))
        ratchet = replace(ratchet, version=upgraded)
    if advances:
        ratchet, added = _skip(ratchet, header.previous_count)
        ratchet = _advance(ratchet, header, fresh)
    try:
        ratchet, more = _skip(ratchet, header.number)
    except RatchetError as error:
        return Decrypted(ratchet, error=error, added=added)
    assert ratchet.rcv is not None  # a step on the same chain has one, an advance makes one
    chain_key, key, _ = _chain(ratchet.rcv.chain_key)
    received = replace(
        ratchet, rcv=ReceivingChain(chain_key, ratchet.rcv.header_key), received=ratchet.received + 1
    )
    return _opened(received, key, message, added + more)


def _skip(ratchet: Ratchet, until: int) -> tuple[Ratchet, tuple[SkippedKey, ...]]:
    """Keys of the messages before number `until` of the receiving chain, if there is one."""
    if ratchet.rcv is None:
        return ratchet, ()
    received = ratchet.received
    if received > until + 1:
        raise EarlierMessage(received - until - 1)
    if received == until + 1:
        raise DuplicateMessage
    if received + MAX_SKIPPED < until:
        raise TooManySkipped(until + 1 - received)
    chain_key, header_key, keys = ratchet.rcv.chain_key, ratchet.rcv.header_key, []
    for number in range(received, until):
        chain_key, key, _ = _chain(chain_key)
        keys.append(SkippedKey(header_key, number, key))
    return replace(ratchet, rcv=ReceivingChain(chain_key, header_key), received=until), tuple(keys)


def _advance(ratchet: Ratchet, header: Header, fresh: Fresh) -> Ratchet:
    """The peer's new key: a receiving chain with our old one, a sending chain with a new one."""
    received_secret, kem = _kem_step(ratchet, header.kem, fresh)
    sent_secret = kem.accepted.shared if kem and kem.accepted else None
    dh = fresh.dh()
    root_key, rcv_chain, next_rcv = _root(
        ratchet.root_key, ratchet.dh.exchange(header.dh), received_secret or b""
    )
    root_key, snd_chain, next_snd = _root(root_key, dh.exchange(header.dh), sent_secret or b"")
    enable = received_secret is not None or kem is not None
    return replace(
        ratchet,
        dh=dh,
        kem=kem,
        support=ratchet.support or enable,
        enable=enable,
        snd_kem=sent_secret is not None,
        rcv_kem=received_secret is not None,
        root_key=root_key,
        snd=SendingChain(header.dh, snd_chain, ratchet.next_snd_header_key),
        rcv=ReceivingChain(rcv_chain, ratchet.next_rcv_header_key),
        previous_sent=ratchet.sent,
        sent=0,
        received=0,
        next_snd_header_key=next_snd,
        next_rcv_header_key=next_rcv,
    )


def _kem_step(
    ratchet: Ratchet, theirs: KemParams | None, fresh: Fresh
) -> tuple[bytes | None, RatchetKem | None]:
    """The secret that their acceptance carries, and our KEM from here on."""
    wanted = ratchet.enable and ratchet.version >= E2E_PQ
    if theirs is None:
        return None, RatchetKem(fresh.kem_pair()) if wanted and ratchet.kem is None else None
    secret = None
    if isinstance(theirs, Accepted):
        if ratchet.kem is None:
            raise KemStateError
        secret = decapsulate(ratchet.kem.pair.secret, theirs.ciphertext)
    if not wanted:
        return secret, None
    return secret, accept(fresh.kem_pair(), theirs.public, fresh.encapsulate(theirs.public))


def _root(root_key: bytes, dh: bytes, shared: bytes) -> tuple[bytes, bytes, bytes]:
    keys = hkdf_sha512(root_key, dh + shared, b"SimpleXRootRatchet", 96)
    return keys[:32], keys[32:64], keys[64:]


def _chain(chain_key: bytes) -> tuple[bytes, MessageKey, bytes]:
    """The next chain key, the message's key and the IV of its header."""
    first, second = hkdf_sha512_pair(chain_key, b"SimpleXChainRatchet")
    return first[:32], MessageKey(first[32:], second[:16]), second[16:32]
