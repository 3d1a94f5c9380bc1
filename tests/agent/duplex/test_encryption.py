"""The agent's file, encrypted: nothing of it can be read without the key, and the key can be changed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from agent.duplex.agent import open_duplex
from agent.duplex.database_file import KEY_VARIABLE, WrongKey, change_key, user_key
from agent.duplex.events import MessageReceived
from agent.duplex.store import reading
from smp_router.router import Router
from store.interface import StoreError, StoreUnavailable
from tests.agent.duplex.world import Person, config, connect, person

SECRET = b"nobody shall find this sentence"


@asynccontextmanager
async def alice_with(path: Path, router: Router, key: str | None) -> AsyncIterator[Person]:
    async with open_duplex(replace(config(path, router.address), key=key)) as agent:
        yield Person(agent)


def everything(path: Path) -> bytes:
    """The file, its log and all that belongs to it."""
    return b"".join(file.read_bytes() for file in sorted(path.parent.glob(f"{path.name}*")))


def belongings(path: Path) -> dict[str, int]:
    """What stands beside the file, and who may read it."""
    return {file.name: file.stat().st_mode & 0o777 for file in path.parent.glob(f"{path.stem}.*")}


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    async with Router.start() as router:
        yield router


@pytest.mark.parametrize("key", [None, "it's a key"])
async def test_what_the_file_shows(tmp_path: Path, router: Router, key: str | None) -> None:
    path = tmp_path / "alice" / "alice.db"
    async with alice_with(path, router, key) as alice, person(tmp_path / "bob.db", router.address) as bob:
        _, his = await connect(alice, bob, pq=False)
        await bob.agent.send(his, SECRET)
        assert (await alice.event(MessageReceived)).body == SECRET  # not acknowledged, so that it is kept
        shown = everything(path)
    readable = key is None
    host = router.address.hosts[0].encode()
    assert [word in shown + everything(path) for word in (SECRET, host, b"CREATE TABLE")] == [readable] * 3
    async with alice_with(path, router, key) as alice:
        assert (await alice.reads()).body == SECRET


@pytest.mark.parametrize(
    ("made_with", "opened_with", "told"),
    [
        ("right", "sesame", "with this key"),
        ("right", None, "without a key"),
        (None, "sesame", "with this key"),
    ],
)
async def test_the_wrong_key(
    tmp_path: Path, router: Router, made_with: str | None, opened_with: str | None, told: str
) -> None:
    path = tmp_path / "alice.db"
    async with alice_with(path, router, made_with):
        pass
    with pytest.raises(WrongKey, match=told) as error:
        async with alice_with(path, router, opened_with):
            pass
    text = str(error.value).replace(str(path), "")
    assert "\n" not in text
    assert "sesame" not in text
    with pytest.raises(WrongKey):
        change_key(path, opened_with, "another")
    async with alice_with(path, router, made_with):
        pass


@pytest.mark.parametrize(("old", "new"), [(None, "first"), ("first", "second"), ("second", None)])
async def test_another_key(tmp_path: Path, router: Router, old: str | None, new: str | None) -> None:
    path = tmp_path / "alice.db"
    async with person(tmp_path / "bob.db", router.address) as bob:
        async with alice_with(path, router, old) as alice:
            hers, his = await connect(alice, bob, pq=False)
            with pytest.raises(StoreUnavailable, match="in use"):
                change_key(path, old, new)
        change_key(path, old, new)
        with pytest.raises(WrongKey):
            async with alice_with(path, router, old):
                pass
        async with alice_with(path, router, new) as alice:
            await bob.agent.send(his, b"still here?")
            assert (await alice.reads()).body == b"still here?"
            created, _ = await alice.agent.create_invitation(pq=False)
            assert created > hers, "ids are not used again"
    assert belongings(path) == {"alice.db": 0o600, "alice.lock": 0o600}


async def test_a_link_to_the_file(tmp_path: Path, router: Router) -> None:
    """It is encrypted where it is, and one agent at a time has it, by whatever name."""
    path, real = tmp_path / "alice.db", tmp_path / "volume" / "real.db"
    real.parent.mkdir()
    path.symlink_to(real)
    async with alice_with(path, router, None):
        assert b"CREATE TABLE" in everything(real)
        for name in (path, real):
            with pytest.raises(StoreUnavailable, match="in use"):
                async with alice_with(name, router, None):
                    pass
    change_key(path, None, "first")
    assert path.is_symlink()
    assert b"CREATE TABLE" not in everything(real)
    async with alice_with(real, router, "first"):
        pass


def test_where_a_key_comes_from(tmp_path: Path) -> None:
    file, environment = tmp_path / "key", {KEY_VARIABLE: "from the environment"}
    assert user_key(None, {}) is None
    assert user_key(None, environment) == "from the environment"
    file.write_text("from a file\n")
    assert user_key(file, environment) == "from a file"
    file.write_text("\n")
    with pytest.raises(StoreError, match="is empty"):
        user_key(file, {})
    with pytest.raises(StoreError, match="cannot be read"):
        user_key(tmp_path / "missing", {})


async def test_a_key_is_not_changed_under_a_reader(tmp_path: Path, router: Router) -> None:
    """Its log would stay beside the new file, and be taken for that of the new file."""
    path = tmp_path / "alice.db"
    async with alice_with(path, router, "first"):
        pass
    with reading(path, "first") as db:
        db.execute("SELECT count(*) FROM connections").fetchone()
        with pytest.raises(StoreUnavailable, match="locked"):
            change_key(path, "first", "second")
        assert db.execute("SELECT count(*) FROM connections").fetchone()[0] == 0
    change_key(path, "first", "second")
    with reading(path, "second") as db:
        assert db.execute("SELECT count(*) FROM connections").fetchone()[0] == 0
