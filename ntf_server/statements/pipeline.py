"""What happens to statements: decoded, checked, matched in the store, handed to the push side."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from ntf_server.clock import Clock
from ntf_server.metrics import counter, histogram
from ntf_server.outage import STORE_PAUSE
from protocol.encoding import new_tuple
from protocol.errors import DecodeError
from protocol.statement_signatures import is_genuine
from protocol.statements import OnChain, Signed, decode_statement
from store.interface import LeaseLost, StatementStore, StoreError
from store.statement_records import FIRST_PAGE, Accepted, BatchPage, PushKey, ReceivedStatement

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
CUT = counter("statements_cut", "Statements that were for more subscriptions than one may be for")
ACCEPT_SECONDS = histogram("statements_accept_seconds", "Time to look up and store a batch of statements")


class DroppedStatement(Exception):
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
        signed = _all_signed(encoded, self._clock.now())
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
            accepted = await self._accept_page(statements, page)
            LIMITED.inc(accepted.limited)
            REPEATED.inc(accepted.repeated)
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
                    return await self._store.accept_statements(statements, self._clock.now(), page)
            except LeaseLost:
                raise
            except StoreError as error:
                log.error("statements wait for the store: %s", error)
                await asyncio.sleep(STORE_PAUSE)


def _all_signed(encoded: Sequence[bytes], now: float) -> list[tuple[Signed, ReceivedStatement]]:
    signed = []
    for one in encoded:
        try:
            signed.append(_signed(one, now))
        except DroppedStatement as dropped:
            DROPPED.labels(*dropped.args).inc()
    return signed


def _signed(encoded: bytes, now: float) -> tuple[Signed, ReceivedStatement]:
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
    received = (encoded, proof.signer, topics, statement.data or b"", expires_at)
    return proof, new_tuple(ReceivedStatement, received)
