"""`doctor` and `test` against real routers, a real provider, and servers with something wrong."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import stat
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from ntf_demo.demo import Playground, playground
from ntf_demo.fake_push.faults import Fault
from ntf_demo.fake_push.server import FakePushConfig, FakePushServer
from ntf_server.config import CONFIG_FILE, load_config, render_config
from store.migrate import STEPS
from tests.agent.notifications.world import phone, verified, watched
from tests.ntf_server.push.builders import pem
from tests.ntf_server.test_cli import Finished, init, ntf_server, started
from tests.ports import free_port


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Playground]:
    """A router, a provider and a server in this process, whose files say what it was started with."""
    async with playground(tmp_path) as running:
        ini = tmp_path / "etc" / CONFIG_FILE
        config = load_config(ini, {})
        config = replace(
            config,
            TRANSPORT=replace(config.TRANSPORT, listen="127.0.0.1", port=running.server.listener.port),
            SUBSCRIBER=replace(config.SUBSCRIBER, allow_private_routers=True),
            WEBPUSH=replace(config.WEBPUSH, allow_private_addresses=True, ca_file=running.push.ca_file),
            APNS=replace(
                config.APNS,
                allow_test_provider=True,
                test_port=running.push.port,
                test_ca_file=running.push.ca_file,
            ),
        )
        ini.write_text(render_config(config))
        yield running


async def command(tmp_path: Path, name: str, *options: object) -> Finished:
    return await asyncio.to_thread(ntf_server, name, "--config-dir", tmp_path / "etc", *options)


async def doctor(tmp_path: Path) -> tuple[int, dict[str, list[str]]]:
    """The exit code, and what it says by check and level."""
    done = await command(tmp_path, "doctor", "--json")
    said: dict[str, list[str]] = {}
    for finding in json.loads(done.stdout):
        said.setdefault(f"{finding['check']} {finding['level']}", []).append(finding["says"])
    return done.returncode, said


async def test_a_healthy_server(tmp_path: Path, world: Playground) -> None:
    async with phone(tmp_path / "phone.db", world.router.address) as alice:
        await verified(world, alice.agent.notifications)
        await alice.agent.create_invitation(pq=False)
        await watched(world, alice)
        pushes = len(world.accepted())
        code, said = await doctor(tmp_path)
        assert (code, [key for key in said if key.endswith("problem")]) == (0, [])
        assert said["server ok"] == [f"answers as {world.server.address}"]
        assert said["routers ok"] == ["1 of 1 in use answered"]
        assert said["push ok"][0] == "APNS_TEST knows this server"
        assert "is whole, schema version" in said["store ok"][0]
        assert "keep it offline" in said["identity warning"][0]
        assert len(world.accepted()) == pushes + 1  # the fake provider takes any token
        world.router.faults.refuse()
        world.router.faults.drop_connections()
        code, said = await doctor(tmp_path)
        nobody = "0 of 1 in use answered: look at the network and DNS of this machine"
        assert (code, said["routers problem"]) == (1, [nobody])
        assert world.router.address.hosts[0] in said["routers warning"][0]


async def test_a_provider_that_refuses_us(tmp_path: Path, world: Playground) -> None:
    world.push.add_fault(Fault(status=403, reason="InvalidProviderToken"))
    code, said = await doctor(tmp_path)
    assert code == 1
    assert said["push problem"][0].startswith("APNS_TEST refuses this server: ")


async def test_a_provider_that_is_not_there(tmp_path: Path, world: Playground) -> None:
    world.push.add_fault(Fault(action="drop"))
    code, said = await doctor(tmp_path)
    assert code == 1
    assert said["push problem"][0].startswith("APNS_TEST cannot be reached: ")


async def test_google_knows_the_service_account_or_not(tmp_path: Path) -> None:
    """Its token service is asked for a real token; it takes grants of one key only."""
    init(tmp_path)
    known, other = (rsa.generate_private_key(65537, 2048) for _ in range(2))
    async with FakePushServer(FakePushConfig(folder=tmp_path, fcm_key=known.public_key())) as google:
        origin = f"https://127.0.0.1:{google.port}"

        async def asked(key: rsa.RSAPrivateKey) -> tuple[int, str]:
            account = {"client_email": "a@b.example", "project_id": "proj", "private_key": pem(key).decode()}
            file = tmp_path / "account.json"
            file.write_text(json.dumps(account | {"token_uri": f"{origin}/token"}))
            env = {
                "NTF_FCM_SERVICE_ACCOUNT_FILE": str(file),
                "NTF_FCM_ENDPOINT": origin,
                "NTF_FCM_CA_FILE": str(google.ca_file),
            }
            done = await asyncio.to_thread(ntf_server, "doctor", "--config-dir", tmp_path / "c", env=env)
            (line,) = [line for line in done.stdout.splitlines() if "FCM" in line]
            return done.returncode, line

        assert await asked(known) == (0, "push          ok       FCM knows this server")
        assert len(google.pushes) == 1
        google.add_fault(Fault(api="fcm", status=404, reason="UNREGISTERED"))
        assert await asked(known) == (0, "push          ok       FCM knows this server")
        code, line = await asked(other)
        assert (code, "FCM refuses this server: Google's token service answered 400" in line) == (1, True)
        assert len(google.pushes) == 2
        google.add_fault(Fault(api="oauth", action="drop"))
        code, line = await asked(known)
        assert (code, "FCM cannot be reached: " in line) == (1, True)


async def test_own_routers_are_more_than_a_warning(tmp_path: Path, world: Playground) -> None:
    async with phone(tmp_path / "phone.db", world.router.address) as alice:
        await verified(world, alice.agent.notifications)
        await alice.agent.create_invitation(pq=False)
        await watched(world, alice)
    world.router.faults.refuse()
    env = {"NTF_SUBSCRIBER_OWN_HOSTS": world.router.address.hosts[0]}
    done = await asyncio.to_thread(ntf_server, "doctor", "--config-dir", tmp_path / "etc", env=env)
    assert f"routers       problem  {world.router.address.host_port}: " in done.stdout


def test_a_server_that_is_not_ready_says_so_itself(tmp_path: Path, unused_tcp_port: int) -> None:
    init(tmp_path)
    env = {
        "NTF_TRANSPORT_LISTEN": "127.0.0.1",
        "NTF_TRANSPORT_PORT": str(unused_tcp_port),
        "NTF_METRICS_PORT": str(free_port()),
        "NTF_WEBPUSH_ENABLED": "off",
    }
    with started(tmp_path, env=env) as (process, _):
        done = ntf_server("doctor", "--config-dir", tmp_path / "c", env=env)
        assert "health        problem  providers: none is set up\n" in done.stdout
        assert "push          problem  no provider is set up: nobody can be notified\n" in done.stdout
        # One that runs and does not answer: as if it hung, or was started with another port.
        env["NTF_TRANSPORT_PORT"] = "1"
        done = ntf_server("doctor", "--config-dir", tmp_path / "c", env=env)
    assert f"server        problem  process {process.pid} runs, but nobody answers on port 1: " in done.stdout
    assert done.returncode == 1


def test_everything_wrong_is_named(tmp_path: Path) -> None:
    init(tmp_path)
    (tmp_path / "c" / "server.key").chmod(0o644)
    (tmp_path / "c").chmod(0o755)
    (tmp_path / "d" / "ntf-server.db").write_bytes(b"garbage" * 1000)
    where = ("--config-dir", tmp_path / "c")
    env = {"NTF_TRANSPORT_LISTEN": "192.0.2.1", "NTF_APNS_KEY_FILE": "/no/such.p8", "NTF_TYPO": "1"}
    done = ntf_server("doctor", *where, env=env)
    assert done.returncode == 1
    assert done.stderr == ""
    for text in (
        "configuration warning  unknown variable NTF_TYPO",
        f"permissions   problem  others can read {tmp_path / 'c' / 'server.key'}",
        "store         problem",
        "ports         problem  [TRANSPORT] port: 192.0.2.1 is no address of this machine",
        "push          problem  [APNS] key_file needs key_id and team_id",
    ):
        assert text in done.stdout, done.stdout
    fixed = ntf_server("doctor", "--fix", *where, env=env)
    assert "taken from all but its owner" in fixed.stdout
    assert stat.S_IMODE((tmp_path / "c" / "server.key").stat().st_mode) == 0o600


def test_a_database_of_an_earlier_version_is_no_problem(tmp_path: Path) -> None:
    """As an operator finds it who has installed a new version and not started it."""
    init(tmp_path)
    where = ("--config-dir", tmp_path / "c")
    for version in (STEPS.latest, STEPS.latest - 1):
        assert ntf_server("migrate", "--to", version, "--yes", *where).returncode == 0
    done = ntf_server("doctor", *where)
    assert done.returncode == 0, done.stdout
    assert f"schema version {STEPS.latest - 1}, start brings it to {STEPS.latest}\n" in done.stdout
    assert "routers       warning  none was asked: " in done.stdout


def test_a_database_that_vanished(tmp_path: Path) -> None:
    init(tmp_path)
    where = ("--config-dir", tmp_path / "c")
    assert ntf_server("start", "--maintenance", *where).returncode == 0
    (tmp_path / "d" / "ntf-server.db").unlink()
    told = "is missing or empty, but this server had a database"
    assert ntf_server("doctor", *where).stdout.count(told) == 1
    assert told in ntf_server("status", *where).stdout


def test_no_configuration(tmp_path: Path) -> None:
    done = ntf_server("doctor", "--config-dir", tmp_path)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        f"configuration problem  {tmp_path / CONFIG_FILE} does not exist; `ntf-server init` makes it,"
        " --config-dir says where",
        "Problems: 1, warnings: 0",
    ]


async def test_one_real_push(tmp_path: Path, world: Playground) -> None:
    sent = await command(tmp_path, "test", "--provider", "apns-test", "--token", "ab01")
    assert (sent.returncode, sent.stdout.partition(":")[0]) == (0, "apns-test took it")
    assert world.accepted()[-1].token == "ab01"
    world.push.add_fault(Fault(status=410, reason="Unregistered"))
    refused = await command(tmp_path, "test", "--provider", "apns-test", "--token", "ab01")
    assert (refused.returncode, refused.stdout) == (
        1,
        "apns-test did not take it: DeviceGone, UNREGISTERED\n",
    )
    unknown = await command(tmp_path, "test", "--provider", "fcm", "--token", "x")
    assert (unknown.returncode, unknown.stderr) == (
        2,
        "ntf-server: fcm is not set up; see [FCM] of the configuration\n",
    )


async def test_one_real_web_push(tmp_path: Path, world: Playground) -> None:
    point = ec.generate_private_key(ec.SECP256R1()).public_key()
    p256dh = point.public_bytes(serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint)
    keys = {"p256dh": _text(p256dh), "auth": _text(secrets.token_bytes(16))}
    endpoint = f"https://127.0.0.1:{world.push.port}/push/abc"
    subscription = json.dumps({"endpoint": endpoint, "keys": keys})
    sent = await command(tmp_path, "test", "--provider", "webpush", "--token", subscription)
    assert sent.returncode == 0, sent.stdout + sent.stderr
    nonsense = await command(tmp_path, "test", "--provider", "webpush", "--token", "{}")
    assert nonsense.returncode == 2
    assert "is not a subscription" in nonsense.stderr


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
