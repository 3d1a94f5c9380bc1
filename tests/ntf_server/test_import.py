"""`ntf-server import` from a database as the deployed server makes it, with rows of a real one."""

from __future__ import annotations

import asyncio
import json
import lzma
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from ntf_server import setup
from ntf_server.__main__ import main
from ntf_server.asking import ProgressLines
from ntf_server.config import CONFIG_FILE, load_config
from ntf_server.data_folder import held
from ntf_server.stores import make_store
from protocol.addresses import parse_ntf_server
from protocol.crypto import Ed25519PrivateKey, X25519PrivateKey
from protocol.encoding import EntityId
from protocol.ids_hash import ids_hash
from protocol.ntf_commands import Schk, Sub, Tchk, Tkn
from protocol.statuses import TokenStatus
from store.interface import KEPT_NOTIFICATIONS, NtfStore
from store.records import ServerKey, TokenRecord
from store.tables_postgres import connected
from tests.ntf_server.ntf_client import NtfClient
from tests.ntf_server.test_cli import init, ntf_server, started
from tests.postgres import PostgresCluster

ROWS = Path(__file__).parents[1] / "vectors" / "reference-rows.jsonl.xz"
SCHEMA = """
CREATE SCHEMA ntf_server;
SET search_path = ntf_server;
CREATE TABLE tokens (
    token_id bytea PRIMARY KEY, push_provider text NOT NULL, push_provider_token bytea NOT NULL,
    status text NOT NULL, verify_key bytea NOT NULL, dh_priv_key bytea NOT NULL, dh_secret bytea NOT NULL,
    reg_code bytea NOT NULL, cron_interval bigint NOT NULL, cron_sent_at bigint, updated_at bigint,
    UNIQUE (push_provider, push_provider_token, verify_key)
);
CREATE TABLE smp_servers (
    smp_server_id bigint PRIMARY KEY, smp_host text NOT NULL, smp_port text NOT NULL,
    smp_keyhash bytea NOT NULL,
    ntf_service_id bytea, smp_notifier_count bigint NOT NULL, smp_notifier_ids_hash bytea NOT NULL,
    ntf_service_cert bytea, ntf_service_cert_hash bytea, ntf_service_priv_key bytea
);
CREATE TABLE subscriptions (
    subscription_id bytea PRIMARY KEY, token_id bytea NOT NULL REFERENCES tokens ON DELETE CASCADE,
    smp_server_id bigint REFERENCES smp_servers, smp_notifier_id bytea NOT NULL,
    smp_notifier_key bytea NOT NULL,
    status text NOT NULL, ntf_service_assoc boolean NOT NULL, UNIQUE (smp_server_id, smp_notifier_id)
);
CREATE TABLE last_notifications (
    token_ntf_id bigint PRIMARY KEY, token_id bytea NOT NULL REFERENCES tokens ON DELETE CASCADE,
    subscription_id bytea NOT NULL REFERENCES subscriptions ON DELETE CASCADE, sent_at timestamptz NOT NULL,
    nmsg_nonce bytea NOT NULL, nmsg_data bytea NOT NULL, UNIQUE (token_id, subscription_id)
);
"""
Reference = dict[str, list[dict[str, Any]]]


def reference_rows() -> Reference:
    found: Reference = {name: [] for name in ("tokens", "smp_servers", "subscriptions", "last_notifications")}
    for line in lzma.decompress(ROWS.read_bytes()).decode().splitlines():
        entry = json.loads(line)
        found[entry["table"]].append({name: value(text) for name, text in entry["row"].items()})
    return found


def value(text: Any) -> Any:
    return bytes.fromhex(text[2:]) if isinstance(text, str) and text.startswith("\\x") else text


async def load(url: str, rows: Reference) -> None:
    async with connected(url) as db:
        await db.execute(SCHEMA)
        for table, entries in rows.items():
            for row in entries:
                values = [datetime.fromisoformat(v) if name == "sent_at" else v for name, v in row.items()]
                marks = ", ".join(f"${place}" for place in range(1, len(row) + 1))
                await db.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", *values)


@pytest.fixture(params=["sqlite", "postgres"])
def env(request: pytest.FixtureRequest, postgres: PostgresCluster) -> dict[str, str]:
    """Of a server with either kind of store."""
    if request.param == "sqlite":
        return {}
    return {"NTF_STORE_DATABASE": "postgres", "NTF_STORE_URL": postgres.new_database()}


def test_it_is_all_there() -> None:
    rows = reference_rows()
    assert {name: len(entries) for name, entries in rows.items()}.keys() == SIZES.keys()
    assert {name: len(entries) for name, entries in rows.items()} == SIZES


SIZES = {"tokens": 6, "smp_servers": 3, "subscriptions": 30, "last_notifications": 18}


async def opened(folder: Path, env: dict[str, str]) -> NtfStore:
    config = load_config(folder / "c" / CONFIG_FILE, env)
    store = make_store(folder / "c", config)
    await store.open()
    return store


async def test_clients_and_routers_notice_nothing(
    tmp_path: Path, postgres: PostgresCluster, env: dict[str, str]
) -> None:
    rows = reference_rows()
    key = Ed25519PrivateKey(b"k" * 32)
    (token,) = [row for row in rows["tokens"] if row["token_id"] == rows["subscriptions"][0]["token_id"]]
    token |= {"verify_key": key.public.der, "cron_interval": 30, "cron_sent_at": 1_794_800_000}
    rows["subscriptions"][0]["status"] = "ERR QUOTA"
    url = postgres.new_database()
    await load(url, rows)
    assert init(tmp_path).returncode == 0
    assert init(tmp_path / "old").returncode == 0
    command = ("import", "--url", url, "--config-dir", tmp_path / "c", "--identity", tmp_path / "old" / "c")
    looked = ntf_server(*command, "--dry-run", env=env)
    assert looked.returncode == 0, looked.stderr
    assert "Every row can be read." in looked.stdout
    assert not (tmp_path / "d" / "ntf-server.db").exists()
    done = ntf_server(*command, env=env)
    assert done.returncode == 0, done.stderr
    identity = (tmp_path / "old" / "c" / "fingerprint").read_text()
    assert f"ntf://{identity}@" in done.stdout
    for name in setup.IDENTITY_FILES:
        assert (tmp_path / "c" / name).read_bytes() == (tmp_path / "old" / "c" / name).read_bytes()
    store = await opened(tmp_path, env)
    try:
        await check_store(store, rows, token)
    finally:
        await store.close()
    with started(tmp_path, env=env) as (_, address):
        client = await NtfClient.open(parse_ntf_server(address))
        assert await client.ask(Tchk(), EntityId(token["token_id"]), key) == Tkn(TokenStatus.ACTIVE)
        for row in (row for row in rows["subscriptions"] if row["token_id"] == token["token_id"]):
            answer = await client.ask(Schk(), EntityId(row["subscription_id"]), key)
            # The routers are not there: what was subscribed may be found disconnected meanwhile.
            expected = {row["status"], "INACTIVE"} if row["status"] == "ACTIVE" else {row["status"]}
            assert isinstance(answer, Sub)
            assert answer.status.text in expected
        client.close()
    again = ntf_server(*command, env=env)
    assert again.returncode == 2
    assert "holds a store already" in again.stderr


async def check_store(store: NtfStore, rows: Reference, changed: dict[str, Any]) -> None:
    counts = await store.counts()
    assert (counts.tokens, counts.subscriptions, counts.servers) == (6, 30, 3)
    associated: dict[int, list[bytes]] = {}
    for row in rows["subscriptions"]:
        if row["ntf_service_assoc"] and not row["status"].startswith("ERR"):
            associated.setdefault(row["smp_server_id"], []).append(row["smp_notifier_id"])
    assert associated
    for row in rows["smp_servers"]:
        server = await store.server(ServerKey(row["smp_server_id"]))
        ids = associated.get(row["smp_server_id"], [])
        assert (server.associated_count, server.associated_hash) == (len(ids), ids_hash(ids))
        assert server.service_id == row["ntf_service_id"]
        assert server.credentials is not None
        assert server.credentials.private_key == row["ntf_service_priv_key"]
        assert row["ntf_service_cert"].endswith(server.credentials.chain[-1])
    for row in rows["tokens"]:
        (token,) = await store.tokens([EntityId(row["token_id"])])
        assert token is not None
        assert token.verify_key == row["verify_key"]
        assert X25519PrivateKey(token.dh_private).der == row["dh_priv_key"]
        assert (token.dh_secret, token.code) == (row["dh_secret"], row["reg_code"])
        assert token.status == row["status"]
        assert (token.device_token.provider.name.lower(), token.cron_minutes, token.updated_on) == (
            row["push_provider"],
            row["cron_interval"],
            row["updated_at"],
        )
        assert token.verified == (row["status"] == "ACTIVE")
        if row is changed:
            assert token.cron_due == row["cron_sent_at"] + 30 * 60
        await check_notifications(store, token, rows)


async def check_notifications(store: NtfStore, token: TokenRecord, rows: Reference) -> None:
    """The newest ones, as sent, in the order of their time."""
    own = [row for row in rows["last_notifications"] if row["token_id"] == token.token_id]
    own = sorted(own, key=lambda row: str(row["sent_at"]))[-KEPT_NOTIFICATIONS:]
    pushes = await store.pushes([token.key])
    entries = pushes[0].entries if pushes else ()
    assert [entry.nonce for entry in entries] == [row["nmsg_nonce"] for row in own]
    assert [entry.meta for entry in entries] == [row["nmsg_data"] for row in own]
    assert all(entry.sent for entry in entries)


async def test_unreadable_rows_are_listed(tmp_path: Path, postgres: PostgresCluster) -> None:
    rows = reference_rows()
    secret = b"SECRET" + bytes(26)
    rows["tokens"][0]["dh_secret"] = secret[:20]
    rows["tokens"][3]["push_provider"] = "carrier_pigeon"
    rows["subscriptions"][0]["status"] = "WHATEVER"
    rows["subscriptions"][1]["smp_notifier_key"] = secret
    rows["smp_servers"][1]["ntf_service_priv_key"] = secret
    url = postgres.new_database()
    await load(url, rows)
    assert init(tmp_path).returncode == 0
    (tmp_path / "url").write_text(url)
    command = ("import", "--url-file", tmp_path / "url", "--config-dir", tmp_path / "c")
    refused = ntf_server(*command)
    assert refused.returncode == 2
    assert "--skip-unreadable" in refused.stderr
    assert refused.stderr.count("\n") == 1
    report = (tmp_path / "d" / "import-report.txt").read_text()
    lost = [row for row in rows["subscriptions"] if row["token_id"] == rows["tokens"][0]["token_id"]]
    bad = [row["subscription_id"] for row in (*lost, *rows["subscriptions"][:2])]
    gone = [row for row in rows["last_notifications"] if row["subscription_id"] in bad]
    lines = report.splitlines()
    assert len([line for line in lines if line.startswith("tokens ")]) == 2
    assert len([line for line in lines if line.startswith("subscriptions ")]) == len(bad)
    assert len([line for line in lines if line.startswith("last_notifications ")]) == len(gone)
    assert f"tokens {rows['tokens'][0]['token_id'][:4].hex()}…: dh_secret has a wrong size" in lines
    assert "SECRET" not in report
    assert b"SECRET".hex() not in report
    assert "smp_servers 2: taken without its service" in refused.stdout
    done = ntf_server(*command, "--skip-unreadable")
    assert done.returncode == 0, done.stderr
    store = await opened(tmp_path, {})
    counts = await store.counts()
    await store.close()
    assert (counts.tokens, counts.subscriptions) == (4, 30 - len(bad))


async def test_it_refuses_while_a_server_runs(tmp_path: Path, postgres: PostgresCluster) -> None:
    url = postgres.new_database()
    await load(url, reference_rows())
    assert init(tmp_path).returncode == 0
    command = ("import", "--config-dir", tmp_path / "c", "--url")
    with held(tmp_path / "d"):
        refused = ntf_server(*command, url)
    assert refused.returncode == 2
    assert "is in use by process" in refused.stderr
    for wrong, expected in (
        (postgres.new_database(), "there is no schema 'ntf_server'"),
        ("mysql://x", "must be postgresql://"),
        ("postgresql://ntf@127.0.0.1:1/x", "cannot be reached"),
    ):
        refused = ntf_server(*command, wrong)
        assert refused.returncode == 2
        assert expected in refused.stderr
        assert refused.stderr.count("\n") == 1


class Interrupted(Exception):
    """Of the test."""


async def test_an_interrupted_import_goes_on(
    tmp_path: Path, postgres: PostgresCluster, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres.new_database()
    await load(url, reference_rows())
    assert init(tmp_path).returncode == 0
    monkeypatch.setattr("store.importing.PAGE", 7)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    seen: list[tuple[str, int]] = []
    stop_at = ("writing subscriptions", 14)

    def fail(self: ProgressLines, what: str, done: int, total: int) -> None:
        seen.append((what, done))
        if seen.count(stop_at) == 1 and seen[-1] == stop_at:
            raise Interrupted

    monkeypatch.setattr(ProgressLines, "__call__", fail)
    command = ["import", "--url", url, "--config-dir", str(tmp_path / "c")]
    with pytest.raises(Interrupted):
        await asyncio.to_thread(main, command)
    store_file = tmp_path / "d" / "ntf-server.db"
    assert not store_file.exists()
    assert await asyncio.to_thread(main, command) == 0
    after = [entry for entry in seen[seen.index(stop_at) + 1 :] if entry[0] == "writing subscriptions"]
    assert after[0] == ("writing subscriptions", 21)
    store = await opened(tmp_path, env)
    counts = await store.counts()
    await store.close()
    assert counts.subscriptions == 30


async def test_one_router_in_two_spellings_is_one(tmp_path: Path, postgres: PostgresCluster) -> None:
    rows = reference_rows()
    rows["smp_servers"][0] |= {"smp_host": "LOCALHOST.", "smp_port": ""}
    rows["smp_servers"][2] |= {"smp_host": "localhost", "smp_port": "5223"}
    rows["subscriptions"][0]["smp_server_id"] = 1
    rows["subscriptions"][1]["smp_server_id"] = 1
    rows["subscriptions"][2]["smp_notifier_id"] = rows["subscriptions"][1]["smp_notifier_id"]
    url = postgres.new_database()
    await load(url, rows)
    assert init(tmp_path).returncode == 0
    done = ntf_server("import", "--url", url, "--config-dir", tmp_path / "c", "--skip-unreadable")
    assert done.returncode == 0, done.stderr
    assert "smp_servers 3: the same router as smp_servers 1" in done.stdout
    assert "1 rows: the same queue" in done.stdout
    store = await opened(tmp_path, {})
    counts = await store.counts()
    server = await store.server(ServerKey(1))
    await store.close()
    assert (counts.servers, counts.subscriptions) == (2, 29)
    # Only queues of the service that was kept are subscribed by it.
    assert server.associated_count == sum(row["ntf_service_assoc"] for row in rows["subscriptions"][:2])
