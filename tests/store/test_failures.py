"""What goes wrong with files: a clear error, no damage, and work goes on when the cause is gone."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sqlite3
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from protocol.encoding import EntityId
from store import migrate
from store.interface import SchemaError, StoreDamaged, StoreError, StoreUnavailable
from store.records import TokenRecord
from store.sql_store import QUEUED_OPERATIONS
from store.sqlite import SqliteStore
from store.sqlite_engine import connected
from store.sqlite_errors import store_errors
from tests.store.builders import active_token, entity, find_token, new_subscription, new_token, subscribe

NOBODY = 65534


def open_sqlite(path: Path) -> closing[sqlite3.Connection]:
    return closing(sqlite3.connect(path, isolation_level=None))


async def make_database(path: Path) -> EntityId:
    store = SqliteStore(path)
    await store.open()
    token = await active_token(store)
    await store.close()
    return token.token_id


async def check_works(store: SqliteStore, token_id: EntityId) -> None:
    assert await find_token(store, token_id) is not None
    token = await active_token(store)
    await subscribe(store, new_subscription(token.key))


async def test_files_are_their_owners_only(tmp_path: Path) -> None:
    path = tmp_path / "ntf.db"
    old_mask = os.umask(0)
    try:
        store = SqliteStore(path)
        await store.open()
        await active_token(store)
        files = [path.with_name(path.name + suffix) for suffix in ("", "-wal", "-shm")]
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in files}
        await store.close()
    finally:
        os.umask(old_mask)
    assert modes == {"ntf.db": 0o600, "ntf.db-wal": 0o600, "ntf.db-shm": 0o600}


async def test_an_open_mode_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "ntf.db"
    await make_database(path)
    path.chmod(0o644)
    store = SqliteStore(path)
    await store.open()
    await store.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """A disk that is full: no file of this process can grow beyond `size`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


async def test_a_full_disk_refuses_until_there_is_room(tmp_path: Path) -> None:
    path = tmp_path / "ntf.db"
    token_id = await make_database(path)
    store = SqliteStore(path)
    await store.open()
    created, refused = [], 0
    with largest_file(400_000):
        for _ in range(40):
            news = [new_token() for _ in range(50)]
            results = await asyncio.gather(*map(store.create_token, news), return_exceptions=True)
            for new, result in zip(news, results, strict=True):
                if isinstance(result, BaseException):
                    assert isinstance(result, StoreUnavailable)
                    refused += 1
                else:
                    created.append(new.token_id)
        assert await find_token(store, token_id) is not None
    assert refused
    assert created
    await check_works(store, token_id)
    assert (await store.counts()).tokens == len(created) + 2
    await store.close()
    with open_sqlite(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert db.execute("SELECT count(*) FROM tokens").fetchone() == (len(created) + 2,)


def test_a_database_at_its_size_limit_says_full(tmp_path: Path) -> None:
    path = tmp_path / "ntf.db"
    with pytest.raises(StoreUnavailable, match="full"), store_errors(path), open_sqlite(path) as db:
        db.execute("PRAGMA max_page_count = 2")
        db.execute("CREATE TABLE one (column)")
        db.execute("CREATE TABLE two (column)")


async def test_a_locked_database_refuses_until_it_is_free(tmp_path: Path) -> None:
    path = tmp_path / "ntf.db"
    token_id = await make_database(path)
    store = SqliteStore(path, busy_timeout=0.05)
    await store.open()
    with open_sqlite(path) as other:
        other.execute("BEGIN IMMEDIATE")
        results = await asyncio.gather(
            *(store.create_token(new_token()) for _ in range(5)), return_exceptions=True
        )
        assert {type(result) for result in results} == {StoreUnavailable}
        assert "locked by another process" in str(results[0])
        assert await find_token(store, token_id) is not None
        late = SqliteStore(path, busy_timeout=0.05)
        with pytest.raises(StoreUnavailable, match="locked"):
            await late.open()
        other.execute("ROLLBACK")
    await check_works(store, token_id)
    await store.close()


async def test_garbage_is_not_a_database(tmp_path: Path) -> None:
    path = tmp_path / "ntf.db"
    path.write_bytes(b"garbage!" * 1000)
    store = SqliteStore(path)
    with pytest.raises(StoreUnavailable, match="not a database or is damaged"):
        await store.open()
    assert path.read_bytes() == b"garbage!" * 1000


async def test_damaged_pages_are_told(tmp_path: Path) -> None:
    path = tmp_path / "ntf.db"
    store = SqliteStore(path)
    await store.open()
    news = [new_token() for _ in range(500)]
    await asyncio.gather(*map(store.create_token, news))
    await store.close()
    content = bytearray(path.read_bytes())
    half = len(content) // 2
    content[half:] = b"\xa5" * (len(content) - half)
    path.write_bytes(content)
    store = SqliteStore(path)
    await store.open()
    results = await asyncio.gather(*(find_token(store, new.token_id) for new in news), return_exceptions=True)
    errors = {str(result) for result in results if isinstance(result, BaseException)}
    assert {type(result) for result in results if isinstance(result, BaseException)} == {StoreDamaged}
    assert any("damaged" in error for error in errors)
    await store.close()


async def test_a_header_overwritten_while_closed(tmp_path: Path) -> None:
    path = tmp_path / "ntf.db"
    await make_database(path)
    content = bytearray(path.read_bytes())
    content[:100] = bytes(100)
    path.write_bytes(content)
    with pytest.raises(StoreUnavailable, match="damaged"):
        await SqliteStore(path).open()
    assert path.read_bytes() == content


async def test_a_later_schema_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "ntf.db"
    await make_database(path)
    with open_sqlite(path) as db:
        db.execute(f"PRAGMA user_version = {migrate.STEPS.latest + 1}")
    before = path.read_bytes()
    with pytest.raises(SchemaError, match=f"version {migrate.STEPS.latest + 1}"):
        await SqliteStore(path).open()
    assert path.read_bytes() == before


async def test_a_database_of_another_program_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "ntf.db"
    with open_sqlite(path) as db:
        db.execute("CREATE TABLE notes (text)")
    before = path.read_bytes()
    with pytest.raises(SchemaError, match="another program"):
        await SqliteStore(path).open()
    assert path.read_bytes() == before


async def test_reading_does_not_migrate(tmp_path: Path) -> None:
    path = tmp_path / "ntf.db"
    migrate.migrate(path, to=migrate.STEPS.latest - 1)
    with pytest.raises(SchemaError, match="old schema"):
        await SqliteStore(path, read_only=True).open()


async def test_a_file_that_cannot_be_opened_leaves_no_thread(tmp_path: Path) -> None:
    """It would report its end to an event loop that may be closed by then."""
    for _ in range(20):
        before = set(threading.enumerate())
        with pytest.raises(sqlite3.OperationalError):
            await connected(lambda: sqlite3.connect(tmp_path / "no" / "folder"))
        assert set(threading.enumerate()) <= before


async def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="cannot be opened"):
        await SqliteStore(tmp_path / "nowhere" / "ntf.db").open()


async def test_a_folder_in_the_files_place(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="cannot be opened"):
        await SqliteStore(tmp_path).open()


@contextmanager
def without_privileges() -> Iterator[None]:
    """Root may write everywhere, so a test of permissions runs as nobody."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


async def test_a_read_only_file(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "ntf.db"
        await make_database(path)
        before = path.read_bytes()
        for place, mode in ((path, 0o400), (path.parent, 0o500)):
            if os.geteuid() == 0:
                os.chown(place, NOBODY, NOBODY)
            place.chmod(mode)
        with without_privileges(), pytest.raises(StoreUnavailable, match=r"read-only|cannot be opened"):
            await SqliteStore(path).open()
        assert path.read_bytes() == before
        path.parent.chmod(0o700)


async def test_a_failing_operation_does_not_take_others_with_it(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "ntf.db")
    await store.open()
    good = new_token()
    twin = new_token()
    await store.create_token(twin)
    clash = new_token()
    object.__setattr__(clash, "token_id", twin.token_id)
    results = await asyncio.gather(
        store.create_token(clash), store.create_token(good), return_exceptions=True
    )
    assert isinstance(results[0], StoreError)
    assert not isinstance(results[0], StoreUnavailable)
    assert await find_token(store, good.token_id) == results[1]
    assert (await store.counts()).tokens == 2
    await store.close()


async def test_a_cancelled_caller_does_not_stop_the_others(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "ntf.db")
    await store.open()
    impatient = asyncio.ensure_future(store.create_token(new_token()))
    patient = asyncio.ensure_future(store.create_token(new_token()))
    await asyncio.sleep(0)
    impatient.cancel()
    record = await patient
    assert await find_token(store, record.token_id) == record
    assert (await store.counts()).tokens == 2
    assert await find_token(store, entity()) is None
    await store.close()


async def more_than_fit(store: SqliteStore) -> list[asyncio.Task[TokenRecord | None]]:
    """Callers under way, half of whom find the queue full."""
    calls = [asyncio.ensure_future(find_token(store, entity())) for _ in range(2 * QUEUED_OPERATIONS + 10)]
    await asyncio.sleep(0)
    return calls


async def test_closing_with_a_full_queue_leaves_nobody_waiting(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "ntf.db")
    await store.open()
    async with asyncio.timeout(60):
        calls = await more_than_fit(store)
        await store.close()
        results = await asyncio.gather(*calls, return_exceptions=True)
    refused = [result for result in results if result is not None]
    assert results[0] is None
    assert all(isinstance(result, StoreUnavailable) for result in refused)


async def test_callers_who_find_the_queue_full_wait_for_their_turn(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "ntf.db")
    await store.open()
    async with asyncio.timeout(60):
        calls = await more_than_fit(store)
        calls[QUEUED_OPERATIONS].cancel()  # the first of those who wait outside
        results = await asyncio.gather(*calls, return_exceptions=True)
    assert [place for place, result in enumerate(results) if result is not None] == [QUEUED_OPERATIONS]
    await store.close()
