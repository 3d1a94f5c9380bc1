"""What happens to statements: decoded, checked, matched in the store, handed to the push side."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from ntf_server.clock import Clock
from ntf_server.metrics import counter, histogram
from ntf_server.outage import STORE_PAUSE
from protocol.encoding import new_tuple
from protocol.errors import DecodeError
from protocol.statement_signatures import is_genuine
from protocol.statements import EXPIRY_SIZE, OnChain, Signed, decode_statement
from store.interface import LeaseLost, StatementStore, StoreError
from store.statement_records import (
    DEFAULT_LIMITS,
    FIRST_PAGE,
    Accepted,
    BatchPage,
    PushKey,
    PushLimits,
    ReceivedStatement,
)

log = logging.getLogger(__name__)

BATCH = 256
"Statements checked and stored together."
TURN = 64
"Signatures checked, in some milliseconds, before everybody else has a turn."

RECEIVED = counter("statements_received", "Statements that the node sent")
DROPPED = counter("statements_dropped", "Statements that were not even looked up", ["reason"])
LIMITED = counter("statements_limited", "Pushes not made because the sender had too many")
REPEATED = counter("statements_repeated", "Pushes not made because they were made before")
MATCHED = counter("statements_matched", "Pushes that statements led to")
DEVICE_LIMITED = counter(
    "statements_device_limited", "Pushes not made because a device had too many, all senders together"
)
STORED_BEFORE = counter(
    "statements_stored_before", "Pushes not made because the node had the statement before the rule was made"
)
CUT = counter("statements_cut", "Statements that were for more subscriptions than one may be for")
ACCEPT_SECONDS = histogram("statements_accept_seconds", "Time to look up and store a batch of statements")


class DroppedStatement(Exception):
    """A statement that is not looked up; the argument is the reason."""


class Came(NamedTuple):
    """When statements came to the node, at the earliest."""

    at: float
    is_stored: bool


class StatementSink(Protocol):
    """The push side."""

    async def notify_statements(self, push_keys: Sequence[PushKey], received_at: float) -> None:
        """Returns when there is room for them in memory."""


class Pipeline:
    """`take` is what a watcher calls. It returns when all is stored, so that the node waits meanwhile."""

    def __init__(
        self,
        store: StatementStore,
        sink: StatementSink,
        clock: Clock,
        limits: PushLimits = DEFAULT_LIMITS,
        is_watched: Callable[[bytes], bool] = lambda topic: True,
    ) -> None:
        """`is_watched`: whether this daemon, and no other, watches a topic."""
        self._is_watched = is_watched
        self._store = store
        self._sink = sink
        self._clock = clock
        self._limits = limits

    async def take(self, encoded: Sequence[bytes], stored_since: float | None = None) -> None:
        """`stored_since`: the node had them when their topics were subscribed, but not before this time."""
        RECEIVED.inc(len(encoded))
        came = Came(self._clock.now(), is_stored=False)
        if stored_since is not None:
            came = Came(stored_since, is_stored=True)
        for start in range(0, len(encoded), BATCH):
            received_at = self._clock.monotonic()
            genuine = await self._genuine(encoded[start : start + BATCH], came)
            if genuine:
                await self._accept(genuine, received_at)

    async def _genuine(self, encoded: Sequence[bytes], came: Came) -> list[ReceivedStatement]:
        """Those to look up. Checking a signature takes long: others have a turn in between."""
        signed = _all_signed(encoded, self._clock.now(), came, self._is_watched)
        genuine: list[ReceivedStatement] = []
        for start in range(0, len(signed), TURN):
            turn = signed[start : start + TURN]
            genuine += [received for proof, received in turn if is_genuine(received.encoded, proof)]
            await asyncio.sleep(0)
        if forged := len(signed) - len(genuine):
            log.warning("%d statements with forged signatures were dropped", forged)
            DROPPED.labels("forged").inc(forged)
        return genuine

    async def _accept(self, statements: Sequence[ReceivedStatement], received_at: float) -> None:
        """Page by page; what a page leads to is pushed while the next one waits for room."""
        page: BatchPage | None = FIRST_PAGE
        while page is not None:
            try:
                accepted = await self._accept_page(statements, page)
            except LeaseLost:
                # Whoever watches these topics by now reads them from the node when it begins.
                DROPPED.labels("elsewhere").inc(len(statements))
                return
            LIMITED.inc(accepted.limited)
            REPEATED.inc(accepted.repeated)
            DEVICE_LIMITED.inc(accepted.device_limited)
            STORED_BEFORE.inc(accepted.stored)
            MATCHED.inc(len(accepted.pushes))
            if accepted.cut:
                CUT.inc(accepted.cut)
                log.warning("a statement is for more subscriptions than one may be for")
            await self._sink.notify_statements(accepted.pushes, received_at)
            page = accepted.following

    async def _accept_page(self, statements: Sequence[ReceivedStatement], page: BatchPage) -> Accepted:
        """However long the store is unavailable: the node would not send them again. LeaseLost if another
        daemon watches by now."""
        while True:
            try:
                with ACCEPT_SECONDS.time():
                    now = self._clock.now()
                    return await self._store.accept_statements(statements, now, page, self._limits)
            except LeaseLost:
                raise
            except StoreError as error:
                log.error("statements wait for the store: %s", error)
                await asyncio.sleep(STORE_PAUSE)


def _all_signed(
    encoded: Sequence[bytes], now: float, came: Came, is_watched: Callable[[bytes], bool]
) -> list[tuple[Signed, ReceivedStatement]]:
    signed = []
    for one in encoded:
        try:
            signed.append(_signed(one, now, came, is_watched))
        except DroppedStatement as dropped:
            DROPPED.labels(*dropped.args).inc()
    return signed


def _signed(
    encoded: bytes, now: float, came: Came, is_watched: Callable[[bytes], bool]
) -> tuple[Signed, ReceivedStatement]:
    """A statement whose signature is worth a check."""
    try:
        statement = decode_statement(encoded)
    except DecodeError:
        raise DroppedStatement("malformed") from None
    expires_at, proof = statement.expires_at, statement.proof
    if expires_at <= now:
        raise DroppedStatement("expired")
    if isinstance(proof, OnChain):
        raise DroppedStatement("on_chain")
    if proof is None:
        raise DroppedStatement("unsigned")
    topics = tuple(dict.fromkeys(filter(None, statement.topics)))
    if not topics:
        raise DroppedStatement("no_topic")
    if not any(map(is_watched, topics)):
        raise DroppedStatement("elsewhere")
    carried = (statement.data or b"", expires_at, statement.expiry.to_bytes(EXPIRY_SIZE, "little"))
    received = (encoded, proof.signer, topics, *carried, proof.signature, came.is_stored, came.at)
    return proof, new_tuple(ReceivedStatement, received)
