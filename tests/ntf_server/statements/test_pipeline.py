"""What the node sends is checked before anybody is asked about it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ntf_server.clock import SystemClock
from ntf_server.statements.pipeline import BATCH, Pipeline
from protocol.statements import OnChain, Signed, decode_statement, encode_statement, statement_hash
from store.interface import StoreUnavailable
from store.statement_records import (
    DEFAULT_LIMITS,
    FIRST_PAGE,
    Accepted,
    BatchPage,
    GatewayKey,
    Purged,
    PushKey,
    PushLimits,
    PushRecord,
    ReceivedStatement,
)
from tests.ntf_server.statements.builders import NEVER, sender, signed, topic


class Recorder:
    """A store that takes all, in so many pages, and the push side."""

    def __init__(self, pages: int = 1) -> None:
        self._pages = pages
        self.batches: list[Sequence[ReceivedStatement]] = []
        self.told: list[PushKey] = []
        self.failures = 0

    async def accept_statements(
        self,
        statements: Sequence[ReceivedStatement],
        now: float,
        page: BatchPage = FIRST_PAGE,
        limits: PushLimits = DEFAULT_LIMITS,
    ) -> Accepted:
        if self.failures:
            self.failures -= 1
            raise StoreUnavailable("away")
        if page == FIRST_PAGE:
            self.batches.append(statements)
        assert self.batches[-1] is statements
        following = BatchPage(after=GatewayKey(page.after + 1)) if page.after + 1 < self._pages else None
        return Accepted([PushKey(len(self.told) + 1)], following=following)

    async def watched_topics(self, limit: int) -> list[bytes]:
        return []

    async def new_rule_topics(self, limit: int, after: bytes = b"") -> list[bytes]:
        return []

    async def begin_baseline(self, topics: Sequence[bytes]) -> None:
        pass

    async def settle_rules(self, topics: Sequence[bytes]) -> None:
        pass

    async def note_listening(self, parts: Collection[int], until: float) -> None:
        pass

    async def listened_until(self, parts: Collection[int]) -> float:
        return 0.0

    async def push_records(self, subscription_id: bytes, limit: int = 0) -> list[PushRecord]:
        return []

    async def push_records_of_sender(self, sender: bytes, limit: int = 0) -> list[PushRecord]:
        return []

    async def purge_statements(self, now: int, limit: int, *, unrenewed_before: int = 0) -> Purged:
        return Purged()

    async def notify_statements(self, push_keys: Sequence[PushKey], received_at: float) -> None:
        self.told += push_keys


async def accepted(*encoded: bytes, failures: int = 0) -> list[ReceivedStatement]:
    recorder = Recorder()
    recorder.failures = failures
    await Pipeline(recorder, recorder, SystemClock()).take(encoded)
    assert recorder.told == list(range(1, len(recorder.batches) + 1))
    assert all(len(batch) <= BATCH for batch in recorder.batches)
    return [one for batch in recorder.batches for one in batch]


async def test_a_genuine_statement_is_looked_up() -> None:
    encoded = signed(sender(), topic(2), topic(1), topic(2), data=b"hello")
    (found,) = await accepted(encoded)
    assert found.statement_hash == statement_hash(encoded)
    assert (found.sender, found.topics, found.data) == (sender()[0], (topic(2), topic(1)), b"hello")
    assert isinstance(proof := decode_statement(encoded).proof, Signed)
    assert (found.signature, found.expiry) == (proof.signature, (NEVER << 32).to_bytes(8, "little"))


async def test_what_is_not_genuine_goes_no_further() -> None:
    genuine = signed(sender(), topic(1))
    statement = decode_statement(genuine)
    forged = bytearray(genuine)
    forged[-1] ^= 1
    on_chain = encode_statement(statement._replace(proof=OnChain(bytes(32), bytes(32), 1)))
    unsigned = encode_statement(statement._replace(proof=None))
    expired = signed(sender(), topic(1), expires_at=1_700_000_000)
    assert await accepted(bytes(forged), on_chain, unsigned, expired, signed(sender()), b"", b"\xff") == []
    assert await accepted() == []


async def test_a_flood_comes_in_batches() -> None:
    encoded = [signed(sender(), topic(1), sequence=number) for number in range(BATCH + 1)]
    assert [one.statement_hash for one in await accepted(*encoded)] == [*map(statement_hash, encoded)]


async def test_page_after_page_is_handed_over() -> None:
    recorder = Recorder(pages=3)
    encoded = [signed(sender(), topic(1), sequence=number) for number in range(BATCH + 1)]
    await Pipeline(recorder, recorder, SystemClock()).take(encoded)
    assert (len(recorder.batches), recorder.told) == (2, [1, 2, 3, 4, 5, 6])


async def test_statements_wait_for_the_store() -> None:
    assert len(await accepted(signed(sender(), topic(1)), failures=1)) == 1


async def test_what_the_node_had_stored_is_marked_so() -> None:
    recorder, clock = Recorder(), SystemClock()
    pipeline = Pipeline(recorder, recorder, clock)
    before = clock.now()
    await pipeline.take([signed(sender(), topic(1))], stored_since=5.0)
    await pipeline.take([signed(sender(), topic(2))])
    (stored,), (new,) = recorder.batches
    assert (stored.is_stored, stored.received_at) == (True, 5.0)
    assert (new.is_stored, before <= new.received_at <= clock.now()) == (False, True)
