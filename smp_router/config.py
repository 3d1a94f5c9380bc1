"""How a router behaves; every field has a default that suits development."""

from __future__ import annotations

import configparser
import hmac
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from protocol.versions import SMP_VERSIONS, VersionRange
from transport.hosts import check_host
from transport.server import HANDSHAKE_TIMEOUT

CONFIG_FILE = "smp-router.ini"
OTHER_FILES = 300
"Attempts to reach other routers, the database, listening sockets, the control socket, pages."
FEWEST_CONNECTIONS = 10
SECTION = "router"
INFORMATION = "information"
INTERVAL = "interval"
"The one time that may be 0."


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    versions: VersionRange = SMP_VERSIONS
    "What is offered to clients: a lower maximum plays an older router."
    interval: float = 0.0
    "Seconds between rounds of NMSG delivery; 0 delivers at once."
    quota: int = 128
    "Messages a queue holds before senders are told QUOTA."
    max_pending: int = 128
    "NMSGs stored per queue while nobody takes them; the oldest are dropped."
    password: bytes | None = field(default=None, repr=False)
    "What NEW must bring (basic auth); None lets everybody create queues."
    new_queues: bool = True
    "Off: NEW is answered AUTH, whatever the password; existing queues are served."
    proxy: bool = True
    "Off: PRXY is answered PROXY BASIC_AUTH, so that nothing is forwarded to other routers."
    handshake_timeout: float = HANDSHAKE_TIMEOUT
    "Seconds for TLS, and again for the SMP handshake."
    send_timeout: float = 30.0
    "Seconds in which a client must take what is being sent; then it is disconnected."
    idle_timeout: float = 6 * 3600.0
    "Seconds of silence after which a client without subscriptions is disconnected."
    max_unsent: int = 8 * 1024 * 1024
    "Bytes that may wait for one client; a client that reaches it is disconnected."
    max_connections: int = 10_000
    "Open at a time; more are closed before TLS."
    max_connections_per_address: int = 1000
    "Of one address, or one /64 of IPv6."
    commands_per_second: int = 10_000
    "Of one connection in the long run; what comes faster is read later."
    commands_burst: int = 100_000
    address_commands_per_second: int = 20_000
    "Of all connections of one address."
    address_commands_burst: int = 200_000
    address_cpu_percent: int = 50
    "Of one core, for the commands and handshakes of one address in the long run; 100 is no limit."
    address_failures_burst: int = 1000
    "Failed authorisations of one address, at once; beyond it, connections that fail again are closed."
    max_handshakes: int = 500
    "TLS handshakes that have begun and not ended; half of them of one address."
    address_queues_per_hour: int = 100_000
    "NEW of one address; more are answered QUOTA."
    address_relays_per_minute: int = 60
    "Attempts to reach other routers (PRXY) of one address; more are answered PROXY BROKER TIMEOUT."
    private_relays: bool = False
    "Also forward to routers in private networks: for development, as clients choose the addresses."
    max_forwarded: int = 64
    "Commands of one client that may be under way to other routers; more are answered PROXY BROKER TIMEOUT."
    max_forwarded_per_relay: int = 1000
    "Commands of all clients under way to one router."
    max_relays: int = 500
    "Routers that commands are forwarded to; each address may cause its share of them."
    relay_timeout: float = 30.0
    "Seconds for connecting to another router, and for its answers."
    relay_idle: float = 600.0
    "Seconds after which a session with another router that nobody uses is closed."
    message_ttl: float = 21 * 86400.0
    "Seconds until a message that nobody took is forgotten."
    expire_on_send: bool = True
    "Remove the queue's expired messages before each SEND, too."
    restore_messages: bool = True
    "Off: messages and NMSGs in the database are deleted at start; queues and services are kept."
    suspended_ttl: float = 21 * 86400.0
    "Seconds until a suspended queue is removed."
    expiry_interval: float = 3600.0
    "Seconds between looks for what has expired."
    max_queues: int = 1_000_000
    "In all; NEW is answered QUOTA beyond it."
    max_message_bytes: int = 2 * 1024**3
    "Of stored messages, 300 for each beside its body. Beyond it, a queue still takes a few messages."
    address_share_percent: int = 25
    "Of all limits of what is stored: the most that one address may create, or receive in queues it created."
    unused_ttl: float = 7 * 86400.0
    "Seconds until a queue is removed that got no command since it was created, or since its recipient left."
    max_links: int = 100_000
    "Queues with link data, up to 16 kB each; NEW and LSET are answered QUOTA beyond it."
    max_nmsgs: int = 1_000_000
    "Stored in all, about 200 bytes each; beyond it a queue keeps no more than it has, or the last one."
    max_recipient_keys: int = 1_000_000
    "Of all queues, beyond the first of each, about 200 bytes each; RKEY is answered QUOTA beyond it."
    max_services: int = 10_000
    "Certificates in roles that are remembered; those without queues make room for new ones."
    max_service_queues: int = 1_000_000
    "Of one service, in one role; what would associate more with it is answered QUOTA."

    def admits(self, password: bytes | None) -> bool:
        return self.password is None or hmac.compare_digest(self.password, password or b"")


_NAMES = ("host", "port", "listen", "http", "min_version", "max_version", "password")
_INFORMATION = {
    "operator",
    "country",
    "website",
    "admin_contact",
    "complaints_contact",
    "usage_conditions",
    "hosting",
    "source_code",
}
MAX_INFORMATION = 500
"Characters of one entry."


class ConfigError(Exception):
    """The configuration file cannot be used; the message names what is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileConfig:
    """What `smp-router start` reads."""

    hosts: tuple[str, ...]
    "In the address of the router. The first is in its certificate and is listened on unless `listen` is set."
    port: int
    listen: str
    router: RouterConfig
    http: tuple[str, int] | None = None
    "Where the information page and the metrics are served, if anywhere."
    information: Mapping[str, str] = field(default_factory=dict)
    "What the operator says about the router."


def within_open_files(config: RouterConfig, limit: int) -> RouterConfig:
    """The configuration with no more connections than files may be open, after all else.

    Where that is fewer than it says, one address gets half of them at most.
    """
    room = limit - OTHER_FILES - config.max_relays
    if room < FEWEST_CONNECTIONS:
        raise ConfigError(f"only {limit} files may be open: allow more (ulimit -n) or lower max_relays")
    if room >= config.max_connections:
        return config
    of_address = min(config.max_connections_per_address, room // 2)
    return replace(config, max_connections=room, max_connections_per_address=of_address)


def write_config(config_dir: Path, host: str, port: int) -> None:
    """Write the file that `smp-router init` leaves for `start`; it may hold a password later."""
    descriptor = os.open(config_dir / CONFIG_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(f"[{SECTION}]\nhost = {host}\nport = {port}\n")


def load_config(config_dir: Path) -> FileConfig:
    path = config_dir / CONFIG_FILE
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (configparser.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not an INI file") from error
    if SECTION not in parser or not set(parser.sections()) <= {SECTION, INFORMATION}:
        raise ConfigError(f"{path} must have a section [{SECTION}], and may have [{INFORMATION}]")
    section = parser[SECTION]
    information = dict(parser[INFORMATION]) if INFORMATION in parser else {}
    unknown = sorted({*section} - {*_NAMES, *_SETTINGS}) + sorted({*information} - _INFORMATION)
    if unknown:
        raise ConfigError(f"{path}: unknown key {unknown[0]}")
    try:
        return replace(_file_config(section), information=_information(information))
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{path}: {error} is missing or wrong") from error


def _file_config(section: configparser.SectionProxy) -> FileConfig:
    hosts, port = _hosts(section["host"]), _number(section, "port", 0, 65535)
    settings = {key: parse(section, key) for key, parse in _SETTINGS.items() if key in section}
    versions = VersionRange(
        _number(section, "min_version", SMP_VERSIONS.min, SMP_VERSIONS.max, SMP_VERSIONS.min),
        _number(section, "max_version", SMP_VERSIONS.min, SMP_VERSIONS.max, SMP_VERSIONS.max),
    )
    if versions.min > versions.max:
        raise ValueError("max_version")
    password = section.get("password")
    router = RouterConfig(versions=versions, password=password.encode() if password else None, **settings)
    listen = section.get("listen", hosts[0])
    return FileConfig(hosts=hosts, port=port, listen=listen, router=router, http=_http(section.get("http")))


def _hosts(text: str) -> tuple[str, ...]:
    hosts = tuple(dict.fromkeys(host.strip().removeprefix("[").removesuffix("]") for host in text.split(",")))
    try:
        return tuple(check_host(host) for host in hosts)
    except ValueError:
        raise ValueError("host") from None


def _http(text: str | None) -> tuple[str, int] | None:
    """`port` or `host:port`; local unless a host is named."""
    if text is None:
        return None
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not int(port) < 65536:
        raise ValueError("http")
    return host.strip("[]") or "127.0.0.1", int(port)


def _information(entries: Mapping[str, str]) -> Mapping[str, str]:
    for key, value in entries.items():
        if len(value) > MAX_INFORMATION:
            raise ValueError(key)
    return entries


def _flag(section: configparser.SectionProxy, key: str) -> bool:
    try:
        return bool(section.getboolean(key))
    except ValueError:
        raise ValueError(key) from None


def _limit(section: configparser.SectionProxy, key: str) -> int:
    return _number(section, key, 1, 2**40)


def _number(
    section: configparser.SectionProxy, key: str, low: int, high: int, default: int | None = None
) -> int:
    text = section.get(key)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal() or not low <= int(text) <= high:
        raise ValueError(key)
    return int(text)


def _seconds(section: configparser.SectionProxy, key: str) -> float:
    try:
        seconds = float(section[key])
    except ValueError:
        raise ValueError(key) from None
    allowed = 0 < seconds < float("inf") or (seconds == 0 and key == INTERVAL)
    if not allowed:
        raise ValueError(key)
    return seconds


_PARSERS: Mapping[Any, Callable[[configparser.SectionProxy, str], Any]] = {
    "int": _limit,
    "float": _seconds,
    "bool": _flag,
}
_SETTINGS = {each.name: _PARSERS[each.type] for each in fields(RouterConfig) if each.type in _PARSERS}
