"""What a push carries: which last notifications go into it, encrypted for the device."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from ntf_server.config import PushConfig
from ntf_server.push.lanes import Kind
from ntf_server.push.payloads import padded_size
from ntf_server.push.provider import (
    CheckMessages,
    MessageList,
    PushNotification,
    StatementNotice,
    Verification,
)
from ntf_server.push.scheduler import Taken
from ntf_server.statements.payloads import Matched, NotifyType, payload
from protocol.blocks import PAD_LENGTH_SIZE
from protocol.encoding import NONCE_SIZE
from protocol.push_messages import encode_pn_message, seal_push
from protocol.statuses import TokenStatus
from store.records import LastNotification, SubKey, TokenPush, TokenRecord
from store.statement_records import Channel, StatementPush

MAX_ENTRIES = 6
"Entries of one push."
NONCES_DRAWN = 128
PUSH_ID_SIZE = 16
_SEPARATOR = b";"

PushEntry = LastNotification | StatementPush
Content = TokenRecord | TokenPush | StatementPush
"What the store told about a job: a token to be written to, one with notifications, a statement."
E = TypeVar("E", LastNotification, StatementPush)


class Composed(NamedTuple, Generic[E]):
    """`text` carries `entries`, oldest first; both are empty if there is nothing to push. Do not print."""

    text: bytes
    entries: Sequence[E]
    unsent: Sequence[E]
    "Those of `entries` that no accepted push carried yet."
    trimmed: int = 0
    "Entries that would have belonged here but did not fit; unsent ones of them go into the next push."
    refused: Sequence[E] = ()
    "Unsent entries that fit in no push at all."
    more: bool = False
    "Unsent entries are left for another push."


def compose(
    entries: Sequence[LastNotification], room: int, *, repeat_sent: bool = False
) -> Composed[LastNotification]:
    """The next push of a token, from its entries in the order they came, in at most `room` bytes.

    Unsent entries first, the oldest of them first; the newest ones already sent fill up what is left.
    Without unsent entries there is nothing to push, unless `repeat_sent`.
    """
    texts: dict[SubKey, bytes] = {}
    waiting = [entry for entry in entries if not entry.sent]
    wanted, refused = _first_fitting(waiting, MAX_ENTRIES, room, texts)
    if not wanted and not repeat_sent:
        return Composed(b"", (), (), refused=refused)
    filled = False
    if len(wanted) < MAX_ENTRIES and len(waiting) < len(entries):
        newest_sent = [entry for entry in reversed(entries) if entry.sent]
        wanted += _first_fitting(newest_sent, MAX_ENTRIES - len(wanted), room, texts)[0]
        filled = True
    chosen = _fit(wanted, room, texts)
    unsent = chosen
    if filled:
        unsent = [entry for entry in chosen if not entry.sent]
        chosen.sort(key=_seq)
    return Composed(
        _SEPARATOR.join([texts[entry.sub_key] for entry in chosen]),
        chosen,
        unsent,
        len(wanted) - len(chosen),
        refused,
        len(unsent) + len(refused) < len(waiting),
    )


def _first_fitting(
    entries: Sequence[LastNotification], limit: int, room: int, texts: dict[SubKey, bytes]
) -> tuple[list[LastNotification], list[LastNotification]]:
    """The first entries that fit into a push, up to `limit`, and those before them that do not."""
    fitting: list[LastNotification] = []
    refused: list[LastNotification] = []
    for entry in entries:
        if len(fitting) == limit:
            break
        text = texts[entry.sub_key] = _encode(entry)
        (fitting if len(text) <= room else refused).append(entry)
    return fitting, refused


def _fit(by_worth: list[LastNotification], room: int, texts: dict[SubKey, bytes]) -> list[LastNotification]:
    """As many as fit together, the worthiest first."""
    left = room + len(_SEPARATOR)
    for number, entry in enumerate(by_worth):
        left -= len(texts[entry.sub_key]) + len(_SEPARATOR)
        if left < 0:
            return by_worth[:number]
    return by_worth[:]


def _encode(entry: LastNotification) -> bytes:
    return encode_pn_message(entry.server, entry.notifier_id, entry.received_at, entry.nonce, entry.meta)


def _seq(entry: LastNotification) -> int:
    return entry.seq


class Push(NamedTuple):
    """One push on its way. Do not print."""

    taken: Taken
    token: TokenRecord | StatementPush
    push_id: uuid.UUID
    notification: PushNotification
    composed: Composed[LastNotification] | Composed[StatementPush] | None
    "None: the push carries no notifications."
    started: float

    @property
    def entries(self) -> Sequence[PushEntry]:
        return self.composed.entries if self.composed else ()

    @property
    def unsent(self) -> Sequence[PushEntry]:
        return self.composed.unsent if self.composed else ()


class Composer:
    """Makes pushes of what the scheduler took and the store told about it."""

    def __init__(self, config: PushConfig, random: Callable[[int], bytes], title: str = "") -> None:
        """`title` is what alerts of statements show."""
        self._config = config
        self._title = title
        self._random = random
        self._nonces: list[bytes] = []

    def has_content(self, taken: Taken, content: Content) -> bool:
        if isinstance(content, TokenPush):
            return self._repeats(taken) or any(not entry.sent for entry in content.entries)
        if isinstance(content, StatementPush):
            return True
        if taken.job.kind is Kind.VERIFICATION:
            return content.status.allows_verification
        return content.status is TokenStatus.ACTIVE

    def compose(self, taken: Taken, content: Content, now: float) -> Push:
        if isinstance(content, TokenPush):
            return self._messages(taken, content, now)
        if isinstance(content, StatementPush):
            return self._statement(taken, content, now)
        return self._urgent(taken, content, now)

    def _messages(self, taken: Taken, push: TokenPush, now: float) -> Push:
        """Its `entries` are empty if all there is to say fits in no push."""
        token = push.token
        padding = self._padding(token)
        composed = compose(push.entries, padding - PAD_LENGTH_SIZE, repeat_sent=self._repeats(taken))
        nonce = self._nonce()
        boxed = seal_push(token.dh_secret, nonce, composed.text, padding)
        push_id = _message_id(token, composed.entries)
        return Push(taken, token, push_id, MessageList(nonce, boxed), composed, now)

    def _statement(self, taken: Taken, push: StatementPush, now: float) -> Push:
        is_voip = push.channel is Channel.VOIP
        notify_type = NotifyType.VOIP if is_voip or push.is_call else NotifyType.ALERT
        text = payload(push.channel, notify_type, Matched(push.sender, push.topic, push.data), self._title)
        # If no answer comes it is sent again, and a device that got both shows one. Calls have no such thing.
        collapse_id = push.statement_hash.hex() if push.channel is Channel.APNS else ""
        notice = StatementNotice(text.body, is_voip, collapse_id)
        return Push(taken, push, _statement_id(push), notice, Composed(b"", (push,), (push,)), now)

    def _urgent(self, taken: Taken, token: TokenRecord, now: float) -> Push:
        notification: PushNotification = CheckMessages()
        if taken.job.kind is Kind.VERIFICATION:
            nonce = self._nonce()
            boxed = seal_push(token.dh_secret, nonce, token.code, self._padding(token))
            notification = Verification(nonce, boxed)
        if taken.attempts is not None and not taken.arrived:
            push_id = taken.attempts.push_id
        else:
            push_id = uuid.UUID(bytes=self._random(PUSH_ID_SIZE), version=4)
        return Push(taken, token, push_id, notification, None, now)

    def _repeats(self, taken: Taken) -> bool:
        return taken.arrived and not self._config.coalesce

    def _padding(self, token: TokenRecord) -> int:
        return padded_size(token.device_token.provider, self._config.padding)

    def _nonce(self) -> bytes:
        """Drawn many at a time: a system call per push would also hand the interpreter to other threads."""
        if not self._nonces:
            drawn = self._random(NONCE_SIZE * NONCES_DRAWN)
            self._nonces = [drawn[i : i + NONCE_SIZE] for i in range(0, len(drawn), NONCE_SIZE)]
        return self._nonces.pop()


def _statement_id(push: StatementPush) -> uuid.UUID:
    """The same whenever and by whomever it is pushed."""
    digest = hashlib.blake2b(push.subscription_id + push.statement_hash, digest_size=PUSH_ID_SIZE)
    return uuid.UUID(bytes=digest.digest(), version=4)


def _message_id(token: TokenRecord, entries: Sequence[LastNotification]) -> uuid.UUID:
    """Follows from the content: the same over retries, outages and restarts, and another if it changes."""
    content = b",".join([b"%d:%d" % (entry.sub_key, entry.seq) for entry in entries])
    digest = hashlib.blake2b(content, digest_size=PUSH_ID_SIZE, key=token.dh_secret)
    return uuid.UUID(bytes=digest.digest(), version=4)
