"""Integrity, states of synchronisation, retries; and that every captured kind is tested somewhere."""

from __future__ import annotations

import pytest

from protocol.agent.errors import BodyNotOpened, DuplicateMessage, UnknownHeader
from protocol.agent.integrity import (
    BadHash,
    BadId,
    Duplicate,
    Integrity,
    IntegrityOk,
    LastMessage,
    Skipped,
    check_integrity,
)
from protocol.agent.ratchet_sync import SyncState, sends_first
from protocol.agent.retry import SLOW, Retry, first
from tests.protocol.agent.captured import kinds

TESTED = {
    "aead sntrup761 x3dh ratchet_header ratchet_conversation",
    "kem_params e2e_params e2e_params_uri",
    "queue_uri_text queue_uri_binary queue_info_binary conn_req_text conn_req_text_decode conn_req_binary",
    "short_link sender_id link_data_contact link_data_invitation link_data_refused",
    "agent_envelope agent_message a_message refused refused_text queue_message contact_request handshake",
    "rk_hash retry_interval sync_class version padded_length",
}


def test_no_kind_is_forgotten() -> None:
    assert kinds() == {kind for line in TESTED for kind in line.split()}


LAST = LastMessage(5, b"hash of 5")


@pytest.mark.parametrize(
    ("message_id", "previous", "expected"),
    [
        (6, b"hash of 5", IntegrityOk()),
        (6, b"other", BadHash()),
        (4, b"hash of 5", BadId(5)),
        (5, b"hash of 5", Duplicate()),
        (7, b"hash of 5", Skipped(6, 6)),
        (9, b"other", Skipped(6, 8)),
    ],
)
def test_integrity(message_id: int, previous: bytes, expected: Integrity) -> None:
    assert check_integrity(LAST, message_id, previous) == expected


def test_the_first_message() -> None:
    assert check_integrity(LastMessage(), 1, b"") == IntegrityOk()


STATES = {
    # may send, may start, after a lost body, after an unknown header, after a duplicate, after success
    SyncState.OK: (True, False, SyncState.ALLOWED, SyncState.REQUIRED, SyncState.OK, SyncState.OK),
    SyncState.ALLOWED: (True, True, SyncState.ALLOWED, SyncState.REQUIRED, SyncState.ALLOWED, SyncState.OK),
    SyncState.REQUIRED: (
        False,
        True,
        SyncState.ALLOWED,
        SyncState.REQUIRED,
        SyncState.REQUIRED,
        SyncState.OK,
    ),
    SyncState.STARTED: (False, False, *[SyncState.STARTED] * 4),
    SyncState.AGREED: (False, False, *[SyncState.AGREED] * 3, SyncState.OK),
}


@pytest.mark.parametrize("state", SyncState)
def test_sync_states(state: SyncState) -> None:
    errors = (BodyNotOpened(), UnknownHeader(), DuplicateMessage())
    found = (state.may_send, state.may_start, *map(state.after_error, errors), state.after_success())
    assert found == STATES[state]


def test_equal_keys_both_receive() -> None:
    assert not sends_first(b"same", b"same")


def test_the_slow_interval() -> None:
    retry = first(SLOW).next(SLOW)
    assert retry == Retry(450_000_000, 300_000_000)
    assert retry.seconds == 450.0
    for _ in range(20):
        retry = retry.next(SLOW)
    assert retry.delay == SLOW.maximum
