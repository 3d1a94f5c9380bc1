"""What a push carries: the last notifications that fit, read from the store and encrypted for the device."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from ntf_server.config import PushConfig
from ntf_server.metrics import counter
from ntf_server.outage import STORE_PAUSE
from ntf_server.push.lanes import Job, Kind, device_job, statement_job
from ntf_server.push.provider import (
    CheckMessages,
    Destination,
    MessageList,
    PushNotification,
    StatementNotice,
    Verification,
    destination_of,
    padded_size,
)
from ntf_server.push.scheduler import Taken
from ntf_server.statements.payloads import Matched, NotifyType, code_payload, payload
from protocol.blocks import PAD_LENGTH_SIZE
from protocol.device_token import Provider
from protocol.encoding import NONCE_SIZE
from protocol.hiding import hides_bytes
from protocol.push_messages import encode_pn_message, seal_push
from protocol.statuses import VERIFIABLE, TokenStatus
from store.interface import DeliveryStore, LeaseLost, StoreError
from store.leases import STATEMENTS, Ownership, of_pushes
from store.records import LastNotification, SubKey, TokenKey, TokenPush, TokenRecord
from store.statement_records import (
    DEFAULT_LIMITS,
    Channel,
    Claim,
    DeviceRegistration,
    Outcome,
    PushKey,
    PushLimits,
    StatementPush,
)

log = logging.getLogger(__name__)

SWEEP_PAGE = 256
"Unsent tokens read from the store at once."
MAX_ENTRIES = 6
"Entries of one push."
NONCES_DRAWN = 128
PUSH_ID_SIZE = 16
_SEPARATOR = b";"

PushEntry = LastNotification | StatementPush
Device = TokenRecord | StatementPush | DeviceRegistration
Content = TokenRecord | TokenPush | StatementPush | DeviceRegistration
"What the store told about a job: a token to be written to, one with notifications, a statement, a device."
E = TypeVar("E", LastNotification, StatementPush)
T = TypeVar("T")

STATEMENTS_ABANDONED = counter(
    "statement_pushes_abandoned", "Pushes of statements that an earlier run may have made: not made again"
)
STATEMENTS_DROPPED = counter(
    "statement_pushes_dropped", "Pushes of statements that were not wanted any more, or too late", ["outcome"]
)


class Patience:
    """However long the store is unavailable, until `ended`: from then on a failure is final."""

    def __init__(self) -> None:
        self.ended = False

    async def ask(self, call: Callable[[], Awaitable[T]]) -> T | None:
        """The result of a call to the store; None if it failed and we are to stop."""
        while True:
            try:
                return await call()
            except StoreError as error:
                log.error("push waits for the store: %s", error)
            if self.ended:
                return None
            await asyncio.sleep(STORE_PAUSE)


class PushReader:
    """Reads for the dispatcher, however long the store is unavailable, and claims what may be pushed once."""

    def __init__(
        self,
        store: DeliveryStore,
        ownership: Ownership,
        patience: Patience,
        now: Callable[[], float],
        limits: PushLimits = DEFAULT_LIMITS,
    ) -> None:
        self._now = now
        self._limits = limits
        self._store = store
        self._ownership = ownership
        self._patience = patience
        self._statements_term: int | None = None
        self._taking_over = asyncio.Lock()

    async def unsent(self) -> AsyncIterator[Job]:
        """All that the store knows as unsent, page by page."""
        after = TokenKey(0)
        while page := await self._read(self._store.unsent_tokens, after=after, limit=SWEEP_PAGE):
            for after in page:
                yield Job(Kind.MESSAGE, after)
        last = PushKey(0)
        if self._ownership.owns(STATEMENTS):
            await self._take_statements_over()
            while pushes := await self._read(
                self._store.unsent_statement_pushes, after=last, limit=SWEEP_PAGE
            ):
                for last in pushes:
                    yield statement_job(last)

    async def read(self, jobs: Sequence[Job]) -> dict[Job, Content]:
        """What the store knows about them, in one read for each kind. Do not print."""
        found: dict[Job, Content] = {}
        if messages := {job.token_key: job for job in self.ours(jobs) if job.kind is Kind.MESSAGE}:
            for push in await self._read(self._store.pushes, list(messages)):
                found[messages[push.token.key]] = push
        if devices := [job.registration_key for job in jobs if job.kind is Kind.DEVICE]:
            for device in await self._read(self._store.registrations, devices):
                found[device_job(device.key)] = device
        if urgent := [job for job in jobs if job.urgent and job.kind is not Kind.DEVICE]:
            keys = [job.token_key for job in urgent]
            tokens = {token.key: token for token in await self._read(self._store.tokens_by_key, keys)}
            found |= {job: tokens[job.token_key] for job in urgent if job.token_key in tokens}
        statements = [job.push_key for job in jobs if job.kind is Kind.STATEMENT]
        if statements and self._ownership.owns(STATEMENTS):
            await self._take_statements_over()
            for statement in await self._read(self._store.statement_pushes, statements):
                found[statement_job(statement.key)] = statement
        return found

    def ours(self, jobs: Sequence[Job]) -> Sequence[Job]:
        """Without those that another daemon pushes by now."""
        if not self._ownership.is_shared:
            return jobs
        owns = self._ownership.owns
        return [job for job in jobs if job.kind is not Kind.MESSAGE or owns(of_pushes(job.token_key))]

    async def claim(self, composed: Sequence[Push]) -> dict[Job, bool]:
        """Returns those that are not to be pushed now, and whether they are to be read again. Those of
        statements are marked: should this process die, nobody knows whether they were sent, and none is to be
        made twice."""
        once = {push.token.key: push.taken.job for push in composed if isinstance(push.token, StatementPush)}
        if not once:
            return {}
        claim = await self._patience.ask(partial(_unless_lost, partial(self._claim, list(once)))) or Claim()
        for outcome in Outcome:
            if count := sum(found is outcome for found in claim.dropped.values()):
                STATEMENTS_DROPPED.labels(outcome.value).inc(count)
        return {job: key in claim.changed for key, job in once.items() if key not in claim.claimed}

    async def _claim(self, keys: Sequence[PushKey]) -> Claim:
        return await self._store.claim_statement_pushes(keys, self._now(), self._limits)

    async def _read(
        self, read: Callable[..., Awaitable[list[T]]], *args: object, **options: object
    ) -> list[T]:
        return await self._patience.ask(partial(read, *args, **options)) or []

    async def _take_statements_over(self) -> None:
        """Before anything is claimed: what an earlier run, or another daemon, handed to a provider and has no
        answer for is not pushed again. One daemon pushes all of them: the one that watches."""
        async with self._taking_over:
            term = self._ownership.term(STATEMENTS)
            if term == self._statements_term:
                return
            count = await self._patience.ask(partial(_unless_lost, self._store.abandon_claimed_pushes))
            if count is None:
                return
            self._statements_term = term
            if count:
                log.warning("%d pushes of statements have an unknown end: they are not made again", count)
                STATEMENTS_ABANDONED.inc(count)


async def _unless_lost(call: Callable[[], Awaitable[T]]) -> T | None:
    """None: another daemon pushes statements by now."""
    try:
        return await call()
    except LeaseLost:
        return None


@hides_bytes
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
    token: Device
    push_id: str
    notification: PushNotification
    composed: Composed[LastNotification] | Composed[StatementPush] | None
    "None: the push carries no notifications."
    started: float

    @property
    def is_to_known_device(self) -> bool:
        """One that took a push before, so that an answer tells about the provider."""
        if isinstance(self.token, StatementPush):
            return self.token.is_proven
        return self.taken.job.party is not None

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
        self._paddings = {provider: padded_size(provider, config.padding) for provider in Provider}

    def destination(self, taken: Taken, content: Content) -> Destination | None:
        """Where a push goes; None: there is nothing to push."""
        token = content.token if isinstance(content, TokenPush) else content
        return destination_of(token.device_token) if self._has_content(taken, content) else None

    def _has_content(self, taken: Taken, content: Content) -> bool:
        if isinstance(content, TokenPush):
            return False in [entry.sent for entry in content.entries] or self._repeats(taken)
        if isinstance(content, StatementPush | DeviceRegistration):
            return True
        if taken.job.kind is Kind.VERIFICATION:
            return content.status in VERIFIABLE
        return content.status is TokenStatus.ACTIVE

    def compose(self, taken: Taken, content: Content, now: float) -> Push:
        if isinstance(content, TokenPush):
            return self._messages(taken, content, now)
        if isinstance(content, StatementPush):
            return self._statement(taken, content, now)
        if isinstance(content, DeviceRegistration):
            return self._device(taken, content, now)
        return self._urgent(taken, content, now)

    def _messages(self, taken: Taken, push: TokenPush, now: float) -> Push:
        """Its `entries` are empty if all there is to say fits in no push."""
        token = push.token
        padding = self._paddings[token.device_token.provider]
        composed = compose(push.entries, padding - PAD_LENGTH_SIZE, repeat_sent=self._repeats(taken))
        nonce = self._nonce()
        boxed = seal_push(token.dh_secret, nonce, composed.text, padding)
        push_id = _message_id(token, composed.entries)
        return Push(taken, token, push_id, MessageList(nonce, boxed), composed, now)

    def _statement(self, taken: Taken, push: StatementPush, now: float) -> Push:
        is_voip = push.channel is Channel.VOIP
        notify_type = NotifyType.VOIP if push.is_for_call else NotifyType.ALERT
        matched = Matched(push.sender, push.topic, push.data, push.signature, push.expiry)
        text = payload(push.channel, notify_type, matched, self._title)
        # If no answer comes it is sent again, and a device that got both shows one. Calls have no such thing.
        collapse_id = push.statement_hash.hex() if push.channel is Channel.APNS else ""
        notice = StatementNotice(text.body, is_voip, collapse_id, is_call=push.is_for_call)
        return Push(taken, push, _statement_id(push), notice, Composed(b"", (push,), (push,)), now)

    def _device(self, taken: Taken, device: DeviceRegistration, now: float) -> Push:
        body = code_payload(device.channel, device.subscription_id, device.code)
        notice = StatementNotice(body, device.channel is Channel.VOIP, is_background=True)
        push_id = _uuid(hashlib.blake2b(device.code, digest_size=PUSH_ID_SIZE).digest())
        return Push(taken, device, push_id, notice, None, now)

    def _urgent(self, taken: Taken, token: TokenRecord, now: float) -> Push:
        notification: PushNotification = CheckMessages()
        if taken.job.kind is Kind.VERIFICATION:
            nonce = self._nonce()
            padding = self._paddings[token.device_token.provider]
            boxed = seal_push(token.dh_secret, nonce, token.code, padding)
            notification = Verification(nonce, boxed)
        if taken.attempts is not None and not taken.arrived:
            push_id = taken.attempts.push_id
        else:
            push_id = _uuid(self._random(PUSH_ID_SIZE))
        return Push(taken, token, push_id, notification, None, now)

    def _repeats(self, taken: Taken) -> bool:
        return taken.arrived and not self._config.coalesce

    def _nonce(self) -> bytes:
        """Drawn many at a time: a system call per push would also hand the interpreter to other threads."""
        if not self._nonces:
            drawn = self._random(NONCE_SIZE * NONCES_DRAWN)
            self._nonces = [drawn[i : i + NONCE_SIZE] for i in range(0, len(drawn), NONCE_SIZE)]
        return self._nonces.pop()


def _statement_id(push: StatementPush) -> str:
    """The same whenever and by whomever it is pushed."""
    digest = hashlib.blake2b(push.subscription_id + push.statement_hash, digest_size=PUSH_ID_SIZE)
    return _uuid(digest.digest())


def _message_id(token: TokenRecord, entries: Sequence[LastNotification]) -> str:
    """Follows from the content: the same over retries, outages and restarts, and another if it changes."""
    content = b",".join([b"%d:%d" % (entry.sub_key, entry.seq) for entry in entries])
    digest = hashlib.blake2b(content, digest_size=PUSH_ID_SIZE, key=token.dh_secret)
    return _uuid(digest.digest())


def _uuid(data: bytes) -> str:
    """As text, of version 4; the library's class takes four times as long, and there is one for each push."""
    text = data.hex()
    return f"{text[:8]}-{text[8:12]}-4{text[13:16]}-a{text[17:20]}-{text[20:]}"
