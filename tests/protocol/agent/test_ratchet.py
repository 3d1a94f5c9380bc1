"""The ratchet under loss, delay, repetition and malice; two of ours against a small model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.agent.aead import AeadError, open_sealed, seal
from protocol.agent.e2e_params import E2eKeys
from protocol.agent.errors import (
    BodyNotOpened,
    DuplicateMessage,
    EarlierMessage,
    KemStateError,
    MalformedMessage,
    RatchetError,
    UnknownHeader,
)
from protocol.agent.kem import Accepted
from protocol.agent.ratchet import MAX_SKIPPED, decrypt
from protocol.agent.ratchet_header import (
    decode_encrypted_header,
    decode_ratchet_message,
    header_size,
    sized_bytes,
)
from protocol.agent.ratchet_state import E2E_KEYS, decode_ratchet, encode_ratchet
from protocol.agent.versions import E2E_PQ
from protocol.agent.x3dh import RatchetKem, agree_as_creator, joiner_kem
from protocol.agent.x448 import X448PublicKey, decode_x448
from protocol.crypto import hkdf_sha512
from protocol.errors import DecodeError
from tests.protocol.agent.conversation import Party
from tests.protocol.agent.random_secrets import RandomSecrets, new_parties

SIZE = 60
FRESH = RandomSecrets(7)


def classic() -> tuple[Party, Party]:
    return new_parties(creator_pq=False, joiner_pq=False, propose=False)


def talking(pq: bool = False) -> tuple[Party, Party]:
    """Creator and joiner that have heard from each other."""
    creator, joiner = new_parties(creator_pq=pq, joiner_pq=pq, propose=pq)
    creator.decrypt(joiner.encrypt(b"1", SIZE, E2E_PQ), FRESH)
    joiner.decrypt(creator.encrypt(b"2", SIZE, E2E_PQ), FRESH)
    return creator, joiner


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    pq=st.booleans(),
    seed=st.integers(0, 99),
    steps=st.lists(
        st.tuples(st.booleans(), st.sampled_from(["send", "send", "newest", "oldest", "lose", "repeat"])),
        max_size=30,
    ),
)
def test_everything_that_arrives_is_read_once(pq: bool, seed: int, steps: list[tuple[bool, str]]) -> None:
    fresh = RandomSecrets(seed)
    creator, joiner = talking(pq)
    waiting: dict[bool, list[tuple[bytes, bytes]]] = {False: [], True: []}
    read: dict[bool, list[bytes]] = {False: [], True: []}
    for number, (by_creator, what) in enumerate(steps):
        sender, reader = (creator, joiner) if by_creator else (joiner, creator)
        queue, text = waiting[by_creator], b"%d" % number
        if what == "send":
            queue.append((text, sender.encrypt(text, SIZE, E2E_PQ, pq)))
        elif queue and what == "lose":
            queue.pop(0)
        elif queue and what == "repeat":
            queue.insert(0, queue[0])
        elif queue:
            text, message = queue.pop(0 if what == "oldest" else -1)
            if text in read[by_creator]:
                with pytest.raises((DuplicateMessage, EarlierMessage, UnknownHeader)):
                    reader.decrypt(message, fresh)
            else:
                assert reader.decrypt(message, fresh) == text
                read[by_creator].append(text)


@pytest.mark.parametrize("pq", [False, True])
def test_bytes_that_are_no_message(pq: bool) -> None:
    creator, joiner = talking(pq)
    message, before = creator.encrypt(b"x", SIZE, E2E_PQ), joiner.ratchet
    headless = len(message) - len(decode_ratchet_message(message).body) - 16
    for end in range(headless):
        with pytest.raises(MalformedMessage):
            decrypt(before, {}, message[:end], FRESH)
    for end in range(headless, headless + 16):
        with pytest.raises(MalformedMessage):
            decrypt(before, {}, message[:end], FRESH)
    cut = decrypt(before, {}, message[:-1], FRESH)
    assert isinstance(cut.error, BodyNotOpened)
    assert cut.ratchet.received == before.received + 1
    assert joiner.decrypt(message, FRESH) == b"x"


@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    _, joiner = classic()
    with pytest.raises(RatchetError):
        joiner.decrypt(data, FRESH)


@given(position=st.integers(0, 220), bit=st.integers(0, 7))
def test_any_changed_bit(position: int, bit: int) -> None:
    creator, joiner = talking()
    message = bytearray(creator.encrypt(b"x", SIZE, E2E_PQ))
    message[position % len(message)] ^= 1 << bit
    with pytest.raises(
        RatchetError
    ):  # with another version in front the numbers in the header read otherwise
        joiner.decrypt(bytes(message), FRESH)


def test_a_skipped_key_is_used_up_by_a_body_that_does_not_open() -> None:
    creator, joiner = talking()
    late, other = creator.encrypt(b"late", SIZE, E2E_PQ), creator.encrypt(b"other", SIZE, E2E_PQ)
    joiner.decrypt(other, FRESH)
    before = joiner.ratchet
    with pytest.raises(BodyNotOpened):
        joiner.decrypt(late[:-1] + bytes((late[-1] ^ 1,)), FRESH)
    assert joiner.ratchet == before
    with pytest.raises(EarlierMessage):
        joiner.decrypt(late, FRESH)


def test_old_chains_are_forgotten_with_their_last_key() -> None:
    creator, joiner = talking()
    old = [creator.encrypt(b"old %d" % n, SIZE, E2E_PQ) for n in range(3)]
    joiner.decrypt(old[1], FRESH)
    creator.decrypt(joiner.encrypt(b"step", SIZE, E2E_PQ), FRESH)
    joiner.decrypt(creator.encrypt(b"step", SIZE, E2E_PQ), FRESH)
    creator.decrypt(joiner.encrypt(b"step", SIZE, E2E_PQ), FRESH)
    joiner.decrypt(creator.encrypt(b"step", SIZE, E2E_PQ), FRESH)
    with pytest.raises(UnknownHeader):  # its chain is known by the keys of its missing messages only
        joiner.decrypt(old[1], FRESH)
    assert joiner.decrypt(old[0], FRESH) == b"old 0"
    assert joiner.decrypt(old[2], FRESH) == b"old 2"
    with pytest.raises(UnknownHeader):
        joiner.decrypt(old[2], FRESH)


def test_a_step_whose_previous_chain_was_too_long_changes_nothing() -> None:
    creator, joiner = talking()
    for _ in range(MAX_SKIPPED + 2):
        creator.encrypt(b"lost", SIZE, E2E_PQ)
    creator.decrypt(joiner.encrypt(b"step", SIZE, E2E_PQ), FRESH)
    before = joiner.ratchet
    with pytest.raises(RatchetError):
        joiner.decrypt(creator.encrypt(b"after the gap", SIZE, E2E_PQ), FRESH)
    assert joiner.ratchet == before


def test_no_post_quantum_steps_below_their_version() -> None:
    """Whatever one side wishes: an older peer could not read the longer headers."""
    creator, joiner = classic()
    for party in (creator, joiner):
        older = E2E_PQ - 1
        party.ratchet = replace(
            party.ratchet, version=older, max_version=older, enable=True, support=False, kem=None
        )
    for number in range(4):
        sender, reader = (joiner, creator) if number % 2 == 0 else (creator, joiner)
        message = sender.encrypt(b"%d" % number, SIZE, E2E_PQ - 1)
        assert len(decode_ratchet_message(message).header) < 200
        assert reader.decrypt(message, FRESH) == b"%d" % number
        for party in (sender, reader):
            assert not party.ratchet.support
            assert party.ratchet.kem is None


def test_a_first_message_that_tells_of_an_earlier_chain() -> None:
    """There is none: nothing is to be skipped."""
    creator, joiner = new_parties(creator_pq=False, joiner_pq=False, propose=False)
    joiner.ratchet = replace(joiner.ratchet, previous_sent=3)
    assert creator.decrypt(joiner.encrypt(b"1", SIZE, E2E_PQ), FRESH) == b"1"
    assert creator.skipped == {}


def test_sizes_and_ends_of_headers() -> None:
    assert header_size(E2E_PQ - 1, pq_support=True) == header_size(E2E_PQ, pq_support=False)
    _, joiner = talking()
    header = decode_ratchet_message(joiner.encrypt(b"1", SIZE, E2E_PQ)).header
    decode_encrypted_header(header)
    with pytest.raises(DecodeError):
        decode_encrypted_header(header + b"x")


@pytest.mark.parametrize(
    "change", [lambda der: b"\0" + der[1:], lambda der: der + b"x", lambda der: der[:-1]]
)
def test_x448_keys_of_another_form(change: Callable[[bytes], bytes]) -> None:
    der = FRESH.dh().public.der
    assert decode_x448(der).der == der
    with pytest.raises(DecodeError):
        decode_x448(change(der))


def test_a_message_padded_wrongly_by_its_sender() -> None:
    """The peer itself is the attacker: it has the keys."""
    creator, joiner = talking()
    sealed = creator.encrypt(b"x", SIZE, E2E_PQ)
    assert joiner.ratchet.rcv is not None
    bare = decode_ratchet_message(sealed)
    keys = hkdf_sha512(b"", joiner.ratchet.rcv.chain_key, b"SimpleXChainRatchet", 96)
    associated = joiner.ratchet.associated_data + bare.header
    body = AESGCM(keys[32:64]).encrypt(keys[64:80], b"\xff\xff", associated)
    message = sized_bytes(E2E_PQ, bare.header) + body[-16:] + body[:-16]
    with pytest.raises(MalformedMessage):
        joiner.decrypt(message, FRESH)
    assert joiner.ratchet.received == 2


def test_a_key_that_would_make_a_secret_of_zeros() -> None:
    creator, joiner = talking()
    weak = X448PublicKey(bytes(56))
    joiner.ratchet = replace(joiner.ratchet, dh=replace(joiner.ratchet.dh, public=weak))
    creator_before = creator.ratchet
    step = joiner.encrypt(b"weak", SIZE, E2E_PQ)
    with pytest.raises(MalformedMessage):
        creator.decrypt(step, FRESH)
    assert creator.ratchet == creator_before
    with pytest.raises(DecodeError):
        creator.ratchet.dh.exchange(weak)


def test_an_acceptance_of_nothing() -> None:
    creator, joiner = new_parties(creator_pq=False, joiner_pq=False, propose=False)
    creator.decrypt(joiner.encrypt(b"1", SIZE, E2E_PQ), FRESH)
    creator.ratchet = replace(
        creator.ratchet,
        support=True,
        kem=joiner_kem(E2eKeys(FRESH.dh(), FRESH.dh(), FRESH.kem_pair()).params(E2E_PQ), True, E2E_PQ, FRESH),
    )
    message, before = creator.encrypt(b"2", SIZE, E2E_PQ), joiner.ratchet
    with pytest.raises(KemStateError):
        joiner.decrypt(message, FRESH)
    assert joiner.ratchet == before
    params = E2eKeys(FRESH.dh(), FRESH.dh()).params(E2E_PQ)
    with pytest.raises(KemStateError):
        accepted = Accepted(FRESH.encapsulate(FRESH.kem_pair().public).ciphertext, FRESH.kem_pair().public)
        agree_as_creator(E2eKeys(FRESH.dh(), FRESH.dh()), replace(params, kem=accepted))


def test_the_stored_form() -> None:
    creator, joiner = talking(pq=True)
    for party in (creator, joiner):
        assert decode_ratchet(encode_ratchet(party.ratchet)) == party.ratchet
    assert isinstance(creator.ratchet.kem, RatchetKem)
    stored = encode_ratchet(creator.ratchet)
    for end in range(0, len(stored), 97):
        with pytest.raises(DecodeError):
            decode_ratchet(stored[:end])
    with pytest.raises(DecodeError):
        decode_ratchet(b"\x09" + stored[1:])
    keys = E2E_KEYS.encode(E2eKeys(FRESH.dh(), FRESH.dh()))
    with pytest.raises(DecodeError):
        E2E_KEYS.decode(keys + b"x")


def test_secrets_are_not_printed() -> None:
    creator, _ = talking(pq=True)
    assert creator.ratchet.root_key.hex() not in repr(creator.ratchet)
    assert "private" not in repr(creator.ratchet)
    kem = FRESH.kem_pair()
    keys = E2eKeys(FRESH.dh(), FRESH.dh(), kem)
    assert "X448PublicKey" in repr(keys)
    for secret in (keys.k1.private, keys.k2.private, kem.secret):
        assert repr(secret) not in repr(keys)


def test_aead_refuses_what_was_changed() -> None:
    tag, body = seal(bytes(32), bytes(16), b"ad", b"text", 20)
    for wrong in (
        (bytes(16), b"ad", tag, b"x" + body[1:]),
        (bytes(16), b"AD", tag, body),
        (bytes(15) + b"1", b"ad", tag, body),
    ):
        with pytest.raises(AeadError):
            open_sealed(bytes(32), *wrong)
