"""What happens to statements: decoded, checked, matched in the store, handed to the push side."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Protocol

from ntf_server.clock import Clock
from ntf_server.metrics import counter, histogram
from protocol.errors import DecodeError
from protocol.statement_signatures import is_genuine
from protocol.statements import OnChain, Signed, decode_statement, statement_hash
from store.interface import StatementStore, StoreError
from store.statement_records import PushKey, ReceivedStatement

log = logging.getLogger(__name__)

BATCH = 64
"Statements checked and stored together."
TURN = 0.005
"Seconds of checking after which everybody else has a turn."
STORE_PAUSE = 1.0

RECEIVED = counter("statements_received", "Statements that the node sent")
DROPPED = counter("statements_dropped", "Statements that were not even looked up", ["reason"])
LIMITED = counter("statements_limited", "Pushes not made because the sender had too many")
REPEATED = counter("statements_repeated", "Pushes not made because they were made before")
MATCHED = counter("statements_matched", "Pushes that statements led to")
ACCEPT_SECONDS = histogram("statements_accept_seconds", "Time to look up and store a batch of statements")


class Dropped(Exception):
    """A statement that is not looked up; the argument is the reason."""


class StatementSink(Protocol):
    """The push side."""

    async def notify_statements(self, push_keys: Sequence[PushKey], received_at: float) -> None:
        """Returns when there is room for them in memory."""


class Pipeline:
    """`take` is what a watcher calls. It returns when all is stored, so that the node waits meanwhile."""

    def __init__(self, store: StatementStore, sink: StatementSink, clock: Clock) -> None:
        self._store = store
        self._sink = sink
        self._clock = clock

    async def take(self, encoded: Sequence[bytes]) -> None:
        RECEIVED.inc(len(encoded))
        for start in range(0, len(encoded), BATCH):
            received_at = self._clock.monotonic()
            genuine = await self._genuine(encoded[start : start + BATCH])
            if genuine:
                await self._accept(genuine, received_at)

    async def _genuine(self, encoded: Sequence[bytes]) -> list[ReceivedStatement]:
        """Those to look up. Checking a signature takes long: others have a turn in between."""
        found: list[ReceivedStatement] = []
        turn_ends = time.perf_counter() + TURN
        for one in encoded:
            try:
                found.append(self._checked(one))
            except Dropped as dropped:
                DROPPED.labels(*dropped.args).inc()
            if time.perf_counter() > turn_ends:
                await asyncio.sleep(0)
                turn_ends = time.perf_counter() + TURN
        return found

    def _checked(self, encoded: bytes) -> ReceivedStatement:
        try:
            statement = decode_statement(encoded)
        except DecodeError:
            raise Dropped("malformed") from None
        if statement.expires_at <= self._clock.now():
            raise Dropped("expired")
        if isinstance(statement.proof, OnChain):
            raise Dropped("on_chain")
        if not isinstance(statement.proof, Signed):
            raise Dropped("unsigned")
        topics = tuple(dict.fromkeys(statement.named_topics))
        if not topics:
            raise Dropped("no_topic")
        if not is_genuine(statement):
            log.warning("a statement with a forged signature was dropped")
            raise Dropped("forged")
        signer, data = statement.proof.signer, statement.data or b""
        return ReceivedStatement(statement_hash(encoded), signer, topics, data, statement.expires_at)

    async def _accept(self, statements: Sequence[ReceivedStatement], received_at: float) -> None:
        """However long the store is unavailable: the node would not send them again."""
        while True:
            try:
                with ACCEPT_SECONDS.time():
                    accepted = await self._store.accept_statements(statements, self._clock.now())
                break
            except StoreError as error:
                log.error("statements wait for the store: %s", error)
                await asyncio.sleep(STORE_PAUSE)
        LIMITED.inc(accepted.limited)
        REPEATED.inc(accepted.repeated)
        MATCHED.inc(len(accepted.pushes))
        await self._sink.notify_statements(accepted.pushes, received_at)
