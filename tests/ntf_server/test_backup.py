"""Backup and restore as an operator does them: from a running server, onto another machine."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest

from ntf_server.backup import restore_backup
from protocol.addresses import NtfServer, parse_ntf_server
from protocol.device_token import ApnsToken, Provider
from protocol.ntf_commands import Tchk, Tkn
from store import migrate
from tests.ntf_server.ntf_client import Device, NtfClient
from tests.ntf_server.test_cli import Finished, init, ntf_server, started
from tests.store.test_failures import largest_file

NOBODY = 65534
AS_NOBODY = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")


def backup(folder: Path, target: Path, *options: str) -> Finished:
    return ntf_server("backup", target, "--config-dir", folder / "c", *options)


def restore(source: Path, folder: Path, user: Sequence[str] = ()) -> Finished:
    where = ("--config-dir", folder / "c", "--data-dir", folder / "d")
    return ntf_server("restore", source, *where, user=user)


async def registered(address: NtfServer, devices: list[Device], stop: asyncio.Event) -> None:
    """Devices register one after the other; each is in the list when it was told its id."""
    client = await NtfClient.open(address)
    while not stop.is_set():
        device = Device.make(ApnsToken(Provider.APNS_NULL, b"%04x" % len(devices)))
        await device.register(client)
        devices.append(device)
    client.close()


async def check_known(address: NtfServer, devices: list[Device]) -> None:
    client = await NtfClient.open(address)
    for device in devices:
        assert isinstance(await device.ask(client, Tchk()), Tkn)
    client.close()


async def test_a_busy_server_moves_to_another_machine(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    init(old)
    devices: list[Device] = []
    with started(old) as (_, text):
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(registered(parse_ntf_server(text), devices, stop))
            while len(devices) < 20:
                await asyncio.sleep(0.01)
            before = len(devices)
            made = await asyncio.to_thread(backup, old, tmp_path / "backup", "--identity")
            stop.set()
    assert made.returncode == 0, made.stderr
    assert len(devices) > before, "nobody was held up"
    for file in (tmp_path / "backup").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    done = restore(tmp_path / "backup", new)
    assert done.returncode == 0, done.stderr
    with started(new) as (_, text):
        address = parse_ntf_server(text)
        assert address.key_hash == parse_ntf_server(done.stdout.splitlines()[-1].split()[-1]).key_hash
        await check_known(address, devices[:before])
    assert str(new) in (new / "c" / "ntf-server.ini").read_text()
    assert str(old) not in (new / "c" / "ntf-server.ini").read_text()


def hand_over(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        os.chown(path, NOBODY, NOBODY)


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("setpriv") is None, reason="only root can be others")
async def test_another_user_on_another_machine(tmp_path: Path) -> None:
    """The administrator hands the backup over; nothing of it depends on who made it or where."""
    init(tmp_path)
    device = Device.make(ApnsToken(Provider.APNS_NULL, b"00"))
    with started(tmp_path) as (_, text):
        client = await NtfClient.open(parse_ntf_server(text))
        await device.register(client)
        client.close()
    assert backup(tmp_path, tmp_path / "backup", "--identity").returncode == 0
    with tempfile.TemporaryDirectory() as home:  # pytest's own folders are root's alone
        there = Path(home)
        shutil.copytree(tmp_path / "backup", there / "backup")
        hand_over(there)
        done = restore(there / "backup", there, user=AS_NOBODY)
        assert done.returncode == 0, done.stderr
        for file in (*(there / "c").iterdir(), *(there / "d").iterdir()):
            assert (file.owner(), stat.S_IMODE(file.stat().st_mode)) == ("nobody", 0o600)
        with started(there, user=AS_NOBODY) as (process, text):
            assert psutil.Process(process.pid).uids().effective == NOBODY
            await check_known(parse_ntf_server(text), [device])


async def test_what_was_there_is_put_aside(tmp_path: Path) -> None:
    init(tmp_path)
    devices: list[Device] = []
    with started(tmp_path) as (_, text):
        assert backup(tmp_path, tmp_path / "b").returncode == 0
        refused = restore(tmp_path / "b", tmp_path)
        assert refused.returncode == 2
        assert "is in use by process" in refused.stderr
        client = await NtfClient.open(parse_ntf_server(text))
        device = Device.make(ApnsToken(Provider.APNS_NULL, b"00"))
        await device.register(client)
        devices.append(device)
    done = restore(tmp_path / "b", tmp_path)
    assert done.returncode == 0
    assert rows(tmp_path / "d" / "ntf-server.db") == 0
    (aside,) = (tmp_path / "d").glob("replaced-*")
    assert f"What was there before: {aside}\n" in done.stdout
    assert rows(aside / "ntf-server.db") == 1


def test_a_full_disk_costs_nothing_of_what_was_there(made: Path) -> None:
    database = made / "d" / "ntf-server.db"
    before = database.read_bytes()
    with pytest.raises(OSError, match="File too large"), largest_file(4096):
        restore_backup(made / "b", made / "c", made / "d", datetime.now(UTC))
    assert database.read_bytes() == before
    assert not list((made / "d").glob("replaced-*"))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be others")
def test_what_root_does_belongs_to_the_owner_of_the_folders(made: Path) -> None:
    """Else the server could not read its own certificate after `sudo ntf-server cert`."""
    hand_over(made)
    assert ntf_server("cert", "--config-dir", made / "c").returncode == 0
    assert restore(made / "b", made).returncode == 0
    (made / "c" / "ntf-server.ini").unlink()
    assert init(made).returncode == 0
    for folder in (made / "c", made / "d"):
        files = [file for file in folder.iterdir() if file.is_file()]
        assert {file.owner() for file in files} == {"nobody"}, files


def rows(database: Path) -> int:
    with closing(sqlite3.connect(database)) as db:
        (count,) = db.execute("SELECT count(*) FROM tokens").fetchone()
        return int(count)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A server that was stopped, and its backup in `b`."""
    init(tmp_path)
    migrate.migrate(tmp_path / "d" / "ntf-server.db")
    assert backup(tmp_path, tmp_path / "b").returncode == 0
    return tmp_path


def test_a_damaged_backup_is_not_used(made: Path) -> None:
    copy = made / "b" / "ntf-server.db"
    content = bytearray(copy.read_bytes())
    content[5000] ^= 1
    copy.write_bytes(content)
    before = (made / "d" / "ntf-server.db").read_bytes()
    refused = restore(made / "b", made)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "was changed" in refused.stderr
    assert (made / "d" / "ntf-server.db").read_bytes() == before


def test_an_unfinished_backup_is_not_used(made: Path) -> None:
    (made / "b" / "backup.json").unlink()
    assert "is not a whole backup" in restore(made / "b", made).stderr


def test_a_backup_of_a_later_program_is_not_used(made: Path) -> None:
    manifest = made / "b" / "backup.json"
    values = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(values | {"schema": 999, "program": "9.9"}))
    assert "install version 9.9 or later" in restore(made / "b", made).stderr


def test_a_folder_with_something_in_it_is_left_alone(made: Path) -> None:
    again = backup(made, made / "b")
    assert again.returncode == 2
    assert "is not empty" in again.stderr


def test_a_damaged_database_makes_no_backup(made: Path) -> None:
    database = made / "d" / "ntf-server.db"
    content = bytearray(database.read_bytes())
    content[8192:12288] = b"\xff" * 4096
    database.write_bytes(content)
    failed = backup(made, made / "other")
    assert failed.returncode == 2
    assert "damaged" in failed.stderr
    assert not list((made / "other").iterdir())


async def test_upgrade_and_roll_back(tmp_path: Path) -> None:
    """From the schema before to this one and back, by `migrate` and by a backup: devices stay known."""
    init(tmp_path)
    database = tmp_path / "d" / "ntf-server.db"
    latest = migrate.STEPS.latest
    devices: list[Device] = []
    with started(tmp_path) as (_, text):
        client = await NtfClient.open(parse_ntf_server(text))
        devices.append(Device.make(ApnsToken(Provider.APNS_NULL, b"00")))
        await devices[0].register(client)
        client.close()
    down = ntf_server("migrate", "--to", latest - 1, "--yes", "--config-dir", tmp_path / "c")
    assert down.returncode == 0, down.stderr
    assert rows(database) == 1
    assert backup(tmp_path, tmp_path / "before").returncode == 0
    with started(tmp_path) as (_, text):  # upgrades by itself
        await check_known(parse_ntf_server(text), devices)
    assert restore(tmp_path / "before", tmp_path).returncode == 0
    with closing(sqlite3.connect(database)) as db:
        assert migrate.schema_version(db) == latest - 1
    with started(tmp_path) as (_, text):
        await check_known(parse_ntf_server(text), devices)
