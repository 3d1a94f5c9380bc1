"""Token and subscription states: what the words are, and which input moves which state."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import NamedTuple

from protocol.encoding import Reader
from protocol.errors import DecodeError


class IllegalMove(Exception):
    """A state was given an input that its table does not list."""


class InvalidReason(StrEnum):
    BAD = "BAD"
    TOPIC = "TOPIC"
    EXPIRED = "EXPIRED"
    UNREGISTERED = "UNREGISTERED"


class TokenStatus(StrEnum):
    NEW = "NEW"
    REGISTERED = "REGISTERED"
    INVALID = "INVALID"
    INVALID_BAD = "INVALID,BAD"
    INVALID_TOPIC = "INVALID,TOPIC"
    INVALID_EXPIRED = "INVALID,EXPIRED"
    INVALID_UNREGISTERED = "INVALID,UNREGISTERED"
    CONFIRMED = "CONFIRMED"
    ACTIVE = "ACTIVE"
    EXPIRED = "EXPIRED"

    @property
    def is_invalid(self) -> bool:
        return self.value.startswith("INVALID")


VERIFIABLE = frozenset({TokenStatus.REGISTERED, TokenStatus.CONFIRMED, TokenStatus.ACTIVE})

SUBSCRIBING = frozenset(
    {TokenStatus.ACTIVE, TokenStatus.EXPIRED, *(status for status in TokenStatus if status.is_invalid)}
)
"Dead ones too, if they were verified once: their client may be about to repair them."


class TokenInput(Enum):
    REGISTERED = "TNEW"
    VERIFICATION_ACCEPTED = "the provider took the verification push"
    CODE_MATCHED = "TVFY with the right code"
    REPLACED = "TRPL"
    CALLED_BAD = "the provider does not know the device token"
    CALLED_WRONG_TOPIC = "the provider has the device token for another app"
    CALLED_EXPIRED = "the provider says that the device token expired"
    CALLED_UNREGISTERED = "the provider says that the app is gone from the device"


INPUT_FOR_REASON: Mapping[InvalidReason, TokenInput] = {
    InvalidReason.BAD: TokenInput.CALLED_BAD,
    InvalidReason.TOPIC: TokenInput.CALLED_WRONG_TOPIC,
    InvalidReason.EXPIRED: TokenInput.CALLED_EXPIRED,
    InvalidReason.UNREGISTERED: TokenInput.CALLED_UNREGISTERED,
}


def _token_moves() -> dict[tuple[TokenStatus, TokenInput], TokenStatus]:
    moves = {
        (TokenStatus.REGISTERED, TokenInput.VERIFICATION_ACCEPTED): TokenStatus.CONFIRMED,
        # A repeated verification push may be accepted late; it never takes a state back.
        (TokenStatus.CONFIRMED, TokenInput.VERIFICATION_ACCEPTED): TokenStatus.CONFIRMED,
        (TokenStatus.ACTIVE, TokenInput.VERIFICATION_ACCEPTED): TokenStatus.ACTIVE,
    }
    for status in TokenStatus:
        if status in VERIFIABLE:
            moves[status, TokenInput.CODE_MATCHED] = TokenStatus.ACTIVE
        dead = status.is_invalid or status in (TokenStatus.EXPIRED, TokenStatus.NEW)
        moves[status, TokenInput.REGISTERED] = TokenStatus.REGISTERED if dead else status
        moves[status, TokenInput.REPLACED] = TokenStatus.REGISTERED
        for reason, event in INPUT_FOR_REASON.items():
            moves[status, event] = TokenStatus(f"INVALID,{reason}")
    return moves


TOKEN_MOVES: Mapping[tuple[TokenStatus, TokenInput], TokenStatus] = _token_moves()


def move_token(status: TokenStatus, event: TokenInput) -> TokenStatus:
    try:
        return TOKEN_MOVES[status, event]
    except KeyError:
        raise IllegalMove(f"token {status}: {event.value}") from None


def pull_token_status(r: Reader) -> TokenStatus:
    try:
        return TokenStatus(r.pull_tail().decode("ascii"))
    except ValueError:
        raise DecodeError from None


def token_status_text(status: TokenStatus, with_reason: bool) -> bytes:
    text = status.value if with_reason else status.value.partition(",")[0]
    return text.encode("ascii")


class SubState(StrEnum):
    NEW = "NEW"
    PENDING = "PENDING"
    ACTIVE = "ACTIVE"
    INACTIVE = "INACTIVE"
    END = "END"
    DELETED = "DELETED"
    AUTH = "AUTH"
    SERVICE = "SERVICE"
    ERR = "ERR"


SUBSCRIBABLE = frozenset({SubState.NEW, SubState.PENDING, SubState.ACTIVE, SubState.INACTIVE})
"Subscribed at start-up and after every reconnection."

RETRIED_SLOWLY = frozenset({SubState.END, SubState.SERVICE, SubState.ERR})
"Tried again with a slow back-off; AUTH and DELETED are final until SNEW comes again."

MAX_ERROR_DETAIL = 200
"Keeps `SUB ERR …` inside one NTF block."


@dataclass(frozen=True, slots=True)
class SubStatus:
    """A state, and for ERR the router's words."""

    state: SubState
    detail: str = ""

    @property
    def text(self) -> str:
        return f"ERR {self.detail}" if self.state is SubState.ERR else self.state

    @classmethod
    def parse(cls, text: str) -> SubStatus:
        word, _, detail = text.partition(" ")
        try:
            state = SubState(word)
        except ValueError:
            raise DecodeError from None
        if (state is SubState.ERR) != (" " in text):
            raise DecodeError
        return cls(state, detail)


def pull_sub_status(r: Reader) -> SubStatus:
    try:
        return SubStatus.parse(r.pull_tail().decode("utf-8"))
    except UnicodeDecodeError:
        raise DecodeError from None


class SubInput(Enum):
    HANDED_OVER = "given to the router's subscriber"
    SUBSCRIBED = "SOK"
    DISCONNECTED = "the router's connection dropped"
    ENDED = "END"
    QUEUE_DELETED = "DELD"
    REFUSED = "ERR AUTH"
    SERVICE_REFUSED = "ERR SERVICE"
    FAILED = "another error of the router"
    CREATED_AGAIN = "SNEW repeated"
    RETRIED = "the slow back-off elapsed"
    SERVICE_CLEARED = "the service that the queue was associated with is gone"


class SubEvent(NamedTuple):
    """What happened to a subscription, and for FAILED the words that SCHK tells."""

    input: SubInput
    detail: str = ""

    @classmethod
    def failed(cls, detail: str) -> SubEvent:
        return cls(SubInput.FAILED, detail.encode("ascii", "replace")[:MAX_ERROR_DETAIL].decode())


_EVENT_TARGETS = {
    SubInput.SUBSCRIBED: SubState.ACTIVE,
    SubInput.ENDED: SubState.END,
    SubInput.QUEUE_DELETED: SubState.DELETED,
    SubInput.REFUSED: SubState.AUTH,
    SubInput.SERVICE_REFUSED: SubState.SERVICE,
    SubInput.FAILED: SubState.ERR,
}


def _sub_moves() -> dict[tuple[SubState, SubInput], SubState]:
    moves = {(state, event): target for event, target in _EVENT_TARGETS.items() for state in SubState}
    for state in SubState:
        alive = state in SUBSCRIBABLE
        # A dropped connection says nothing new about queues that were not subscribed.
        moves[state, SubInput.DISCONNECTED] = SubState.INACTIVE if state is SubState.ACTIVE else state
        moves[state, SubInput.CREATED_AGAIN] = state if alive else SubState.NEW
        if alive:
            moves[state, SubInput.HANDED_OVER] = SubState.PENDING
            moves[state, SubInput.SERVICE_CLEARED] = SubState.INACTIVE
        if state in RETRIED_SLOWLY:
            moves[state, SubInput.RETRIED] = SubState.PENDING
    return moves


SUB_MOVES: Mapping[tuple[SubState, SubInput], SubState] = _sub_moves()


def move_sub(state: SubState, event: SubInput) -> SubState:
    try:
        return SUB_MOVES[state, event]
    except KeyError:
        raise IllegalMove(f"subscription {state}: {event.value}") from None


class BulkMove(NamedTuple):
    """One input for many subscriptions at once: those in `sources` move to `target`, others stay."""

    sources: frozenset[SubState]
    target: SubState

    def moved(self, state: SubState) -> SubState:
        return self.target if state in self.sources else state


def bulk_move(event: SubInput, among: Collection[SubState] = frozenset(SubState)) -> BulkMove:
    """For inputs that lead to one state only, wherever they change anything."""
    moves = {state: SUB_MOVES.get((state, event), state) for state in among}
    sources = frozenset(state for state, target in moves.items() if target is not state)
    (target,) = {moves[state] for state in sources}
    return BulkMove(sources, target)
