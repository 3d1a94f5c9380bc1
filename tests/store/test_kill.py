"""A process killed at any moment loses nothing that it acknowledged."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

KILLS = 10
ROOT = Path(__file__).parents[2]


def storm(path: Path, acknowledged: int) -> list[list[str]]:
    """Let a process write until it has told so many writes, kill it, and return all it told."""
    command = [sys.executable, "-m", "tests.store.storm", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(acknowledged)]
        process.kill()
        lines += process.stdout.readlines()
    assert process.returncode == -9
    return [line.decode().split() for line in lines if line.endswith(b"\n")]


def test_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "ntf.db"
    randomness = random.Random(7)
    told: list[list[str]] = []
    for _ in range(KILLS):
        told += storm(path, randomness.randint(20, 600))
        check(path, told)


def check(path: Path, told: list[list[str]]) -> None:
    said = {word: {line[1] for line in told if line[0] == word} for word in ("token", "deleting", "deleted")}
    subscriptions = {line[1] for line in told if line[0] == "subscription"}
    nonces = {line[1]: line[2] for line in told if line[0] == "notification"}
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert db.execute("PRAGMA foreign_key_check").fetchall() == []
        tokens = {row[0].hex() for row in db.execute("SELECT token_id FROM tokens WHERE status = 'ACTIVE'")}
        stored = {row[0].hex() for row in db.execute("SELECT subscription_id FROM subscriptions")}
        kept = {
            row[0].hex(): row[1].hex()
            for row in db.execute(
                "SELECT subscription_id, nonce FROM unsent_notifications JOIN subscriptions USING (sub_key)"
            )
        }
        totals = db.execute("SELECT tokens, subscriptions FROM totals").fetchone()
        counted = db.execute(
            "SELECT (SELECT count(*) FROM tokens), (SELECT count(*) FROM subscriptions)"
        ).fetchone()
    assert said["token"] <= tokens
    assert subscriptions - said["deleting"] <= stored
    assert not said["deleted"] & stored
    for subscription_id in nonces.keys() - said["deleting"]:
        assert kept[subscription_id] == nonces[subscription_id]
    assert totals == counted


FAILING = """
import asyncio, pathlib, sys
from store.sqlite import SqliteStore

store = SqliteStore(pathlib.Path(sys.argv[1]))

async def fail():
    await store.open()
    raise SystemExit("before the store was closed")

asyncio.run(fail())
"""


def test_a_process_that_fails_before_it_closes_the_store_ends(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", FAILING, tmp_path / "ntf.db"], cwd=ROOT, timeout=60, capture_output=True
    )
    assert process.returncode == 1
    assert b"before the store was closed" in process.stderr
