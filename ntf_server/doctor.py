"""`ntf-server doctor`: looks at everything that can be wrong, and says what to do about it."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import http.client
import json
import os
import shutil
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

from cryptography import x509

from ntf_server import checks, setup
from ntf_server.clock import SystemClock, utc_now
from ntf_server.config import (
    CONFIG_FILE,
    LOCALHOST,
    Config,
    ConfigError,
    MetricsConfig,
    load_config,
    unknown_variables,
)
from ntf_server.data_folder import expect_database, holder
from ntf_server.findings import Finding, Level, ok, problem, warning
from ntf_server.push.credentials import KeyFileError
from ntf_server.push.provider import (
    CheckMessages,
    ProviderDown,
    ProviderRefusesUs,
    PushError,
    PushProvider,
    RetryLater,
)
from ntf_server.push.providers import make_providers
from ntf_server.secret_files import readable_by_others, secret_files
from ntf_server.statements.examination import examine_gateway
from ntf_server.status import PROBE, probe
from ntf_server.stores import make_store
from ntf_server.subscriber import is_at, make_dialer
from protocol.addresses import SmpServer, canonical_host
from protocol.device_token import ApnsToken, DeviceToken, FcmToken, Provider
from smp_client.dialer import Dialer
from smp_client.errors import ClientError
from smp_client.session import connect_smp
from store.backup import check_database
from store.interface import SchemaOld, StoreError
from store.migrate import STEPS
from transport.certificates import CA_KEY, load_server_files
from transport.errors import TransportError

EXPIRES_SOON = timedelta(days=30)
LITTLE_DISK = 1_000_000_000
NO_DISK = 50_000_000
MOST_ASKED = 500
ROUTERS_AT_A_TIME = 64
CLOCK_UNSYNCHRONISED = 5  # TIME_ERROR of adjtimex(2)
TIMEX_SIZE = 256
NOBODY: Mapping[Provider, DeviceToken] = {
    Provider.APNS_PROD: ApnsToken(Provider.APNS_PROD, b"00" * 32),
    Provider.APNS_DEV: ApnsToken(Provider.APNS_DEV, b"00" * 32),
    Provider.APNS_TEST: ApnsToken(Provider.APNS_TEST, b"00" * 32),
    Provider.FCM: FcmToken(b"nobody"),
}
"Tokens that no device has: a provider that knows us says so, and no push goes out."

UNUSED = {Provider.APNS_PROD: "[APNS] has no key_file", Provider.FCM: "[FCM] has no service_account_file"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--fix", action="store_true", help="take secret files from other users")


def run(args: argparse.Namespace) -> int:
    return asyncio.run(_run(args.config_dir, os.environ, fix=args.fix, as_json=args.json))


async def _run(config_dir: Path, env: Mapping[str, str], *, fix: bool, as_json: bool) -> int:
    """Print what was found; 1 if anything is a problem."""
    found: list[Finding] = []
    async for finding in examine(config_dir, env, fix=fix):
        if finding in found:
            continue  # two checks may meet the same obstacle
        found.append(finding)
        if not as_json:
            print(f"{finding.check:<14}{finding.level:<9}{finding.says}", flush=True)
    levels = Counter(finding.level for finding in found)
    if as_json:
        print(json.dumps([asdict(finding) for finding in found], indent=2))
    else:
        print(f"Problems: {levels[Level.PROBLEM]}, warnings: {levels[Level.WARNING]}")
    return int(levels[Level.PROBLEM] > 0)


async def examine(config_dir: Path, env: Mapping[str, str], *, fix: bool) -> AsyncIterator[Finding]:
    """Everything, as it is found; without a configuration there is nothing else to look at."""
    try:
        config = load_config(config_dir / CONFIG_FILE, env)
        data_dir = setup.data_folder(config)
    except ConfigError as error:
        yield problem("configuration", error)
        return
    for finding in (
        *_configuration(config, config_dir, env),
        *_identity(config_dir),
        *_permissions(config_dir, config, fix=fix),
        *_clock(),
        *_disk(data_dir),
        *_database_file(config_dir, config),
    ):
        yield finding
    network = _network(config_dir, config, data_dir)
    routers, push = _routers(config_dir, config), _providers(config, data_dir)
    for found in (network, routers, push, examine_gateway(config_dir, config)):
        async for finding in found:
            yield finding


def _configuration(config: Config, config_dir: Path, env: Mapping[str, str]) -> Iterator[Finding]:
    yield ok("configuration", f"{config_dir / CONFIG_FILE} can be read")
    yield from (warning("configuration", line) for line in unknown_variables(env))
    for line in (*checks.setting_problems(config), *checks.file_problems(config)):
        yield problem("configuration", line)


def _identity(config_dir: Path) -> Iterator[Finding]:
    try:
        chain = [x509.load_der_x509_certificate(each) for each in load_server_files(config_dir).chain]
    except TransportError as error:
        yield problem("identity", error)
        return
    end = min(certificate.not_valid_after_utc for certificate in chain)
    until = f"the certificate is valid until {end:%Y-%m-%d}"
    if end - utc_now() > EXPIRES_SOON:
        yield ok("identity", until)
    else:
        yield warning("identity", f"{until}: renew it with `ntf-server cert`")
    if (config_dir / CA_KEY).exists():
        yield warning("identity", f"{config_dir / CA_KEY} is here: keep it offline, only `cert` needs it")


def _permissions(config_dir: Path, config: Config, *, fix: bool) -> Iterator[Finding]:
    exposed = readable_by_others(secret_files(config_dir, config))
    if not exposed:
        yield ok("permissions", "keys and data can be read by their owner only")
    for path in exposed:
        if not fix:
            yield problem("permissions", f"others can read {path}: chmod it to 600, or run doctor --fix")
            continue
        try:
            path.chmod(0o700 if path.is_dir() else 0o600)
            yield ok("permissions", f"{path}: taken from all but its owner")
        except OSError as error:
            yield problem("permissions", f"others can read {path}, and it stays so: {error.strerror}")


def _clock() -> Iterator[Finding]:
    """As the kernel knows it; APNs and FCM refuse tokens of a clock that is minutes wrong."""
    adjtimex = getattr(ctypes.CDLL(None), "adjtimex", None)
    if adjtimex is not None and adjtimex(ctypes.create_string_buffer(TIMEX_SIZE)) == CLOCK_UNSYNCHRONISED:
        yield warning("clock", f"{utc_now():%Y-%m-%d %H:%M} UTC, not synchronised: run chrony or similar")
    else:
        yield ok("clock", f"{utc_now():%Y-%m-%d %H:%M} UTC")


def _disk(data_dir: Path) -> Iterator[Finding]:
    if not data_dir.is_dir():
        return
    free = shutil.disk_usage(data_dir).free
    says = f"{free / 1e9:.1f} GB free for {data_dir}"
    if free > LITTLE_DISK:
        yield ok("disk", says)
    else:
        yield Finding("disk", Level.WARNING if free > NO_DISK else Level.PROBLEM, f"{says}: make room")


def _database_file(config_dir: Path, config: Config) -> Iterator[Finding]:
    if config.STORE.database != "sqlite":
        return  # opened to find its routers
    path = setup.database_path(config)
    try:
        expect_database(config_dir, path)
        if not path.exists():
            yield ok("store", f"{path} does not exist yet: start makes it")
            return
        version = check_database(path)
    except StoreError as error:
        yield problem("store", error)
        return
    newer = "" if version == STEPS.latest else f", start brings it to {STEPS.latest}"
    yield ok("store", f"{path} is whole, schema version {version}{newer}")


async def _network(config_dir: Path, config: Config, data_dir: Path) -> AsyncIterator[Finding]:
    try:
        address = setup.address(config_dir, config)
    except TransportError:
        return  # told by the check of the identity
    silent = await probe(address, config)
    process = holder(data_dir)
    if silent is None:
        yield ok("server", f"answers as {address}")
        for finding in await _ready(config.METRICS):
            yield finding
    elif process is not None:
        where = f"nobody answers on port {config.TRANSPORT.port}: {silent}"
        yield problem("server", f"process {process} runs, but {where}; see its log, restart it")
    else:
        yield warning("server", f"does not run: {silent}")
        found = [problem("ports", line) for line in checks.port_problems(config)]
        for finding in found or [ok("ports", "free to listen on")]:
            yield finding
    try:
        await asyncio.get_running_loop().getaddrinfo(config.TRANSPORT.host, None)
        yield ok("DNS", f"{config.TRANSPORT.host} is known here")
    except OSError as error:
        yield warning("DNS", f"{config.TRANSPORT.host} cannot be looked up here: {error.strerror}")


async def _ready(config: MetricsConfig) -> list[Finding]:
    """What the running server itself says is wrong, if it can be asked."""
    if not config.port:
        return []
    try:
        status, text = await asyncio.to_thread(_ask_ready, config.host or LOCALHOST, config.port)
    except (OSError, http.client.HTTPException) as error:
        return [warning("health", f"[METRICS] port {config.port} does not answer: {error}")]
    lines = [line.removeprefix("- ") for line in text.splitlines()[1:]]
    level = Level.WARNING if status == http.HTTPStatus.OK else Level.PROBLEM
    return [Finding("health", level, line) for line in lines] or [ok("health", "the server is ready")]


def _ask_ready(host: str, port: int) -> tuple[int, str]:
    connection = http.client.HTTPConnection(host, port, timeout=PROBE.answer)
    try:
        connection.request("GET", "/health/ready")
        answer = connection.getresponse()
        return answer.status, answer.read().decode("utf-8", "replace")
    finally:
        connection.close()


async def _routers(config_dir: Path, config: Config) -> AsyncIterator[Finding]:
    if config.STORE.database == "sqlite" and not setup.database_path(config).exists():
        return
    try:
        store = make_store(config_dir, config, read_only=True)
        await store.open()
    except SchemaOld as error:
        yield warning("routers", f"none was asked: {error}")
        return
    except (ConfigError, StoreError) as error:
        yield problem("store", error)
        return
    try:
        stored = await store.servers()
    finally:
        await store.close()
    if not stored:
        yield ok("routers", "none is in use yet")
        return
    dialer, places = make_dialer(config.SUBSCRIBER, SystemClock()), asyncio.Semaphore(ROUTERS_AT_A_TIME)
    hosts = frozenset(map(canonical_host, config.SUBSCRIBER.own_hosts))
    # Clients may name our hosts with any port and key: a router is ours if it has answered there.
    own = {router.server for router in stored if router.was_there and is_at(router.server, hosts)}
    servers = sorted((router.server for router in stored), key=lambda server: server not in own)
    asked = servers[:MOST_ASKED]
    answers = await asyncio.gather(*(_shake_hands(server, dialer, places) for server in asked))
    failed = [(server, why) for server, why in zip(asked, answers, strict=True) if why is not None]
    for server, why in failed:
        level = Level.PROBLEM if server in own else Level.WARNING
        yield Finding("routers", level, f"{server.host_port}: {why}")
    more = f"; {len(servers) - len(asked)} more were not asked" if len(servers) > len(asked) else ""
    says = f"{len(asked) - len(failed)} of {len(asked)} in use answered{more}"
    if len(failed) < len(asked):
        yield ok("routers", says)
    else:
        yield problem("routers", f"{says}: look at the network and DNS of this machine")


async def _shake_hands(server: SmpServer, dialer: Dialer, places: asyncio.Semaphore) -> str | None:
    """What went wrong."""
    async with places:
        try:
            async with await connect_smp(server, dialer, config=PROBE):
                return None
        except ClientError as error:
            return str(error) or type(error).__name__


async def _providers(config: Config, data_dir: Path) -> AsyncIterator[Finding]:
    try:
        providers = make_providers(config, data_dir, SystemClock().now)
    except (ConfigError, KeyFileError) as error:
        yield problem("push", error)
        return
    try:
        for tag, token in NOBODY.items():
            if tag.tag in providers.set_up:
                yield await _authenticate(tag, providers.by_tag[tag], token)
        for tag, without in UNUSED.items():
            if tag.tag not in providers.set_up:
                yield ok("push", f"{tag.name} is not set up: {without}")
        if Provider.WEB_PUSH in providers.by_tag:
            yield ok("push", "Web Push is on: its services know this server by its key alone")
        if not providers.set_up:
            yield problem("push", "no provider is set up: nobody can be notified")
    finally:
        await providers.close()


async def _authenticate(tag: Provider, provider: PushProvider, token: DeviceToken) -> Finding:
    try:
        await provider.deliver(token, CheckMessages(), str(uuid.uuid4()))
    except ProviderRefusesUs as error:
        return problem("push", f"{tag.name} refuses this server: {error.reason}")
    except (ProviderDown, RetryLater) as error:
        return problem("push", f"{tag.name} cannot be reached: {error.reason}")
    except PushError:
        pass  # it knows us, and says that it does not know this device
    return ok("push", f"{tag.name} knows this server")
