"""The state tables, every state crossed with every input."""

from __future__ import annotations

import itertools

import pytest

from protocol import statuses
from protocol.encoding import Reader
from protocol.errors import DecodeError
from protocol.statuses import (
    INPUT_FOR_REASON,
    MAX_ERROR_DETAIL,
    RETRIED_SLOWLY,
    SUBSCRIBABLE,
    SUBSCRIBING,
    IllegalMove,
    InvalidReason,
    SubEvent,
    SubInput,
    SubState,
    SubStatus,
    TokenInput,
    TokenStatus,
    bulk_move,
    move_sub,
    move_token,
    pull_sub_status,
    pull_token_status,
    token_status_text,
)

DEAD = {status for status in TokenStatus if status.is_invalid} | {TokenStatus.EXPIRED, TokenStatus.NEW}
VERIFIABLE = {TokenStatus.REGISTERED, TokenStatus.CONFIRMED, TokenStatus.ACTIVE}


def token_after(status: TokenStatus, event: TokenInput) -> TokenStatus | None:
    """None: illegal."""
    match event:
        case TokenInput.REPLACED:
            return TokenStatus.REGISTERED
        case TokenInput.REGISTERED:
            return TokenStatus.REGISTERED if status in DEAD else status
        case TokenInput.CODE_MATCHED:
            return TokenStatus.ACTIVE if status in VERIFIABLE else None
        case TokenInput.VERIFICATION_ACCEPTED:
            promoted = {TokenStatus.REGISTERED: TokenStatus.CONFIRMED}
            return promoted.get(status, status) if status in VERIFIABLE else None
        case TokenInput.CALLED_BAD:
            return TokenStatus.INVALID_BAD
        case TokenInput.CALLED_WRONG_TOPIC:
            return TokenStatus.INVALID_TOPIC
        case TokenInput.CALLED_EXPIRED:
            return TokenStatus.INVALID_EXPIRED
        case TokenInput.CALLED_UNREGISTERED:
            return TokenStatus.INVALID_UNREGISTERED


@pytest.mark.parametrize(("status", "event"), list(itertools.product(TokenStatus, TokenInput)))
def test_tokens(status: TokenStatus, event: TokenInput) -> None:
    expected = token_after(status, event)
    if expected is not None:
        assert move_token(status, event) is expected
        return
    with pytest.raises(IllegalMove, match=status.value):
        move_token(status, event)


FROM_ROUTER = {
    SubInput.SUBSCRIBED: SubState.ACTIVE,
    SubInput.ENDED: SubState.END,
    SubInput.QUEUE_DELETED: SubState.DELETED,
    SubInput.REFUSED: SubState.AUTH,
    SubInput.SERVICE_REFUSED: SubState.SERVICE,
    SubInput.FAILED: SubState.ERR,
}


def sub_after(state: SubState, event: SubInput) -> SubState | None:
    if event in FROM_ROUTER:
        return FROM_ROUTER[event]
    match event:
        case SubInput.DISCONNECTED:
            return SubState.INACTIVE if state is SubState.ACTIVE else state
        case SubInput.CREATED_AGAIN:
            return state if state in SUBSCRIBABLE else SubState.NEW
        case SubInput.HANDED_OVER:
            return SubState.PENDING if state in SUBSCRIBABLE else None
        case SubInput.SERVICE_CLEARED:
            return SubState.INACTIVE if state in SUBSCRIBABLE else None
    return SubState.PENDING if state in RETRIED_SLOWLY else None


@pytest.mark.parametrize(("state", "event"), list(itertools.product(SubState, SubInput)))
def test_subscriptions(state: SubState, event: SubInput) -> None:
    expected = sub_after(state, event)
    if expected is not None:
        assert move_sub(state, event) is expected
        return
    with pytest.raises(IllegalMove, match=state.value):
        move_sub(state, event)


def test_every_state_can_come_back() -> None:
    """SNEW leads any subscription, and TRPL any token, to a live state."""
    assert all(move_sub(state, SubInput.CREATED_AGAIN) in SUBSCRIBABLE for state in SubState)
    assert all(move_token(status, TokenInput.REPLACED) in VERIFIABLE for status in TokenStatus)
    assert {SubState.AUTH, SubState.DELETED} == set(SubState) - SUBSCRIBABLE - RETRIED_SLOWLY


def test_what_tokens_allow() -> None:
    assert statuses.VERIFIABLE == VERIFIABLE
    assert (DEAD - {TokenStatus.NEW}) | {TokenStatus.ACTIVE} == SUBSCRIBING


@pytest.mark.parametrize("reason", InvalidReason)
def test_reasons(reason: InvalidReason) -> None:
    status = move_token(TokenStatus.ACTIVE, INPUT_FOR_REASON[reason])
    assert status.is_invalid
    assert token_status_text(status, with_reason=True) == f"INVALID,{reason.value}".encode()
    assert token_status_text(status, with_reason=False) == b"INVALID"


@pytest.mark.parametrize("text", [b"", b"OTHER", b"INVALID,", b"active", b"ACTIVE ", b"\xff"])
def test_unknown_token_status(text: bytes) -> None:
    with pytest.raises(DecodeError):
        pull_token_status(Reader(text))


@pytest.mark.parametrize("text", [b"", b"OTHER", b"ERR", b"NEW ", b"NEW x", b"\xff", b"ERR \xff"])
def test_unknown_sub_status(text: bytes) -> None:
    with pytest.raises(DecodeError):
        pull_sub_status(Reader(text))


def test_error_details() -> None:
    assert SubStatus.parse("ERR ") == SubStatus(SubState.ERR)
    event = SubEvent.failed("ü" + "x" * 500)
    status = SubStatus(move_sub(SubState.ACTIVE, event.input), event.detail)
    assert status.text == "ERR ?" + "x" * (MAX_ERROR_DETAIL - 1)
    assert SubStatus.parse(status.text) == status


def test_bulk_moves_are_the_table_for_many() -> None:
    assert bulk_move(SubInput.DISCONNECTED) == (frozenset({SubState.ACTIVE}), SubState.INACTIVE)
    assert bulk_move(SubInput.DISCONNECTED).moved(SubState.ACTIVE) is SubState.INACTIVE
    assert bulk_move(SubInput.DISCONNECTED).moved(SubState.AUTH) is SubState.AUTH
    assert bulk_move(SubInput.RETRIED) == (RETRIED_SLOWLY, SubState.PENDING)
    assert bulk_move(SubInput.SUBSCRIBED, SUBSCRIBABLE) == (SUBSCRIBABLE - {SubState.ACTIVE}, SubState.ACTIVE)
    with pytest.raises(ValueError, match="unpack"):
        bulk_move(SubInput.SUBSCRIBED, ())
