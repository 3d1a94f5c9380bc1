"""`ntf-server.ini`: every key declared once, with its default and its documentation.

The sample file, the parser, the checks and `--help` texts all come from these declarations.
"""

from __future__ import annotations

import configparser
import dataclasses
import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ntf_server.config_kinds import (
    FILE,
    HEADER,
    HOST,
    HOSTS,
    HTTPS,
    LISTEN,
    PORT,
    PROXY,
    SHORT,
    SWITCH,
    TEXT,
    WEBSOCKET,
    ValueKind,
    choice,
    seconds,
    whole,
)
from protocol.addresses import NTF_PORT
from smp_client.requests import SESSION_DEFAULTS
from store.leases import LEASE_SECONDS
from store.policy import BUSY_TIMEOUT, DEFAULT_CAPS, POOL_SIZE, STATEMENT_TIMEOUT, Durability
from store.statement_records import DEFAULT_GATEWAY_CAPS, PushLimits
from transport.server import HANDSHAKE_TIMEOUT

CONFIG_FILE = "ntf-server.ini"
LOCALHOST = "127.0.0.1"
ENV_PREFIX = "NTF_"
OTHER_VARIABLES = frozenset({"NTF_SERVER_CFG_PATH", "NTF_SERVER_LOG_PATH", "NTF_AGENT_PATH", "NTF_AGENT_KEY"})
"Of the command line, and of ntf-agent."


class ConfigError(Exception):
    """The configuration cannot be used; the message names file, line, key and what is allowed."""


def key(default: Any, kind: ValueKind, doc: str, *, secret: bool = False) -> Any:
    return field(default=default, metadata={"kind": kind, "doc": doc, "secret": secret}, repr=not secret)


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """Where tokens, subscriptions and last notifications are kept."""

    database: str = key("sqlite", choice("sqlite", "postgres"), "The kind of database.")
    url: str = key("", TEXT, "With postgres: postgresql://user:password@host:port/database.", secret=True)
    url_file: Path | None = key(None, FILE, "A file that holds it, instead.")
    pool_size: int = key(POOL_SIZE, whole(2, 1000), "Connections to PostgreSQL, beside three of its own.")
    statement_timeout: float = key(
        STATEMENT_TIMEOUT, seconds(1, 3600), "A statement of PostgreSQL that takes longer is given up."
    )
    daemon: str = key("", TEXT, "Name of this daemon among those that share the database; empty: host:port.")
    lease_seconds: float = key(
        LEASE_SECONDS,
        seconds(2, 300),
        "With postgres: a daemon that is silent for so long loses its routers to the others.",
    )
    durability: str = key(
        Durability.PROCESS.value,
        choice(*(d.value for d in Durability)),
        "Whose end received notifications survive: a crash of the server (process), or also a power failure"
        " (machine): then each waits for the disk before it is pushed.",
    )
    data_dir: Path | None = key(None, FILE, "Folder of the database, journal and keys. Made by init.")
    busy_timeout: float = key(
        BUSY_TIMEOUT, seconds(0.01, 600), "Patience when another program holds the database."
    )
    unverified_token_days: int = key(
        7, whole(1, 3650), "Tokens never verified are removed, with their subscriptions, after so many days."
    )
    invalid_token_days: int = key(
        30, whole(1, 3650), "Tokens called invalid, or replaced and not verified again: likewise."
    )
    subscriptions_per_token: int = key(
        DEFAULT_CAPS.subscriptions_per_token,
        whole(0, 100_000_000),
        "Beyond them SNEW is refused; 0: no limit.",
    )
    routers_per_token: int = key(
        DEFAULT_CAPS.routers_per_token,
        whole(0, 1_000_000),
        "Different ones in the life of a token; likewise.",
    )


@dataclass(frozen=True, kw_only=True)
class AuthConfig:
    """Passwords of the control port. Empty: that role cannot log in."""

    control_port_admin_password: str = key("", TEXT, "Role admin: may also resubscribe.", secret=True)
    control_port_user_password: str = key("", TEXT, "Role user: may look.", secret=True)


@dataclass(frozen=True, kw_only=True)
class TransportConfig:
    """Where clients connect."""

    host: str = key("", HOST, "Name or address in the server's address. Made by init.")
    listen: str = key("", LISTEN, "Address to listen on; empty: all.")
    port: int = key(NTF_PORT, PORT, "0: any free port.")
    reuse_port: bool = key(False, SWITCH, "Let other daemons on this machine share the port (--workers).")
    control_port: int = key(0, PORT, "Control port on localhost; 0: none.")


@dataclass(frozen=True, kw_only=True)
class SubscriberConfig:
    """How SMP routers are watched."""

    use_service_credentials: bool = key(
        True, SWITCH, "Subscribe all queues of a router at once, with a certificate made for that router."
    )
    socks_proxy: str = key("", PROXY, "SOCKS5 proxy as host:port; empty: none.", secret=True)
    socks_mode: str = key("onion", choice("onion", "always"), "Which routers are reached through the proxy.")
    host_mode: str = key("public", choice("public", "onion"), "Which of a router's hosts to prefer.")
    own_hosts: tuple[str, ...] = key(
        (),
        HOSTS,
        "Hosts of your own routers, separated by commas: all hosts of a router, to count it by itself.",
    )
    allow_private_routers: bool = key(
        False, SWITCH, "Also connect to loopback and private networks. Clients choose the router: keep off."
    )
    routers_per_address: int = key(
        1000, whole(1, 1_000_000), "New routers that clients of one address may bring."
    )
    connect_timeout: float = key(
        SESSION_DEFAULTS.connect, seconds(1, 600), "Connecting, TLS and SMP handshake together."
    )
    command_timeout: float = key(SESSION_DEFAULTS.answer, seconds(1, 600), "An answer of a router.")
    ping_interval: float = key(
        SESSION_DEFAULTS.ping_after, seconds(0.1, 3600), "Silence before a router is asked for a PONG."
    )
    ping_timeout: float = key(
        SESSION_DEFAULTS.ping_limit, seconds(0.1, 600), "A router that does not answer it is reconnected."
    )


@dataclass(frozen=True, kw_only=True)
class PushConfig:
    """How notifications are pushed, whatever the provider."""

    coalesce: bool = key(True, SWITCH, "Join notifications of a device that is already being pushed to.")
    interval: float = key(
        0.4,
        seconds(0, 60),
        "Between pushes of one device, while notifications gather; the first never waits.",
    )
    padding: int = key(3072, whole(1024, 3072), "Size to which the encrypted part of every push is padded.")
    concurrency: int = key(1000, whole(1, 10_000), "Pushes under way per provider.")
    queue_size: int = key(
        32768, whole(100, 10_000_000), "Devices in memory per provider; the store keeps others."
    )
    host_concurrency: int = key(100, whole(1, 10_000), "Pushes under way per Web Push host.")
    host_rate: int = key(500, whole(0, 1_000_000), "Pushes per second and Web Push host; 0: no limit.")
    max_age: float = key(3600.0, seconds(1, 86_400), "A notification older than this is not retried.")
    response_timeout: float = key(10.0, seconds(0.1, 120), "An answer of a provider.")


@dataclass(frozen=True, kw_only=True)
class ApnsConfig:
    """Apple's push service. Without a key, pushes to Apple devices are refused with a log line."""

    key_file: Path | None = key(None, FILE, "The .p8 signing key. Also from env APNS_KEY_FILE.")
    key_id: str = key("", TEXT, "Also from env APNS_KEY_ID.")
    team_id: str = key("", TEXT, "Apple's id of the app's developer.")
    topic: str = key("chat.simplex.app", TEXT, "The app's bundle id.")
    client: str = key("curl", choice("curl", "aioapns"), "The HTTP/2 client.")
    port: int = key(443, PORT, "443 or 2197.")
    allow_test_provider: bool = key(False, SWITCH, "Accept tokens of the test provider (AT).")
    test_host: str = key(LOCALHOST, TEXT, "Where tokens of the test provider are pushed.")
    test_port: int = key(5443, PORT, "")
    test_ca_file: Path | None = key(None, FILE, "Certificates trusted for the test host.")


@dataclass(frozen=True, kw_only=True)
class FcmConfig:
    """Google's push service (HTTP v1)."""

    service_account_file: Path | None = key(None, FILE, "Service account JSON; empty: FCM is off.")
    endpoint: str = key("https://fcm.googleapis.com", HTTPS, "")
    token_uri: str = key("", HTTPS, "Empty: as the service account says.")
    ca_file: Path | None = key(None, FILE, "Certificates trusted instead of the system's.")


@dataclass(frozen=True, kw_only=True)
class WebPushConfig:
    """Web Push, also for UnifiedPush."""

    enabled: bool = key(True, SWITCH, "")
    vapid_key_file: Path | None = key(None, FILE, "P-256 key of this server. Made by init.")
    subject: str = key(
        "", TEXT, "Contact for push services: a mailto: or https: URL; empty: the server's host."
    )
    allow_private_addresses: bool = key(
        False, SWITCH, "Also push to loopback and private networks. Clients choose the address: keep off."
    )
    ca_file: Path | None = key(None, FILE, "Certificates trusted instead of the system's.")


@dataclass(frozen=True, kw_only=True)
class StatementsConfig:
    """The statement gateway: pushes for signed statements of a statement store."""

    enabled: bool = key(False, SWITCH, "")
    node: str = key("", WEBSOCKET, "The statement store's node.", secret=True)
    listen: str = key(LOCALHOST, LISTEN, "Address of the HTTP API; empty: all.")
    port: int = key(8443, PORT, "0: any free port.")
    hosts: tuple[str, ...] = key(
        (),
        HOSTS,
        "Host names and IP addresses by which clients reach the HTTP API; requests for any other host are"
        " refused. Empty: `localhost` and the IP address that the connection came to.",
    )
    cert_file: Path | None = key(None, FILE, "Certificates of the HTTP API, PEM; empty: no TLS.")
    key_file: Path | None = key(None, FILE, "Their key.")
    client_header: str = key(
        "", HEADER, "A header with the client's key, set by a proxy; empty: clients sign their requests."
    )
    title: str = key("Notification", SHORT, "What alerts show.")
    apns: str = key(
        "production",
        choice("production", "development", "test"),
        "APNs environment of the device tokens of Apple devices.",
    )
    watched_topics: int = key(20_000, whole(1, 1_000_000), "If rules name more, all statements are watched.")
    subscriptions_per_client: int = key(DEFAULT_GATEWAY_CAPS.subscriptions_per_client, whole(1, 100_000), "")
    rules_per_subscription: int = key(DEFAULT_GATEWAY_CAPS.rules_per_subscription, whole(1, 20_000), "")
    requests_per_minute: int = key(120, whole(1, 1_000_000), "Of one client.")
    topics_per_day: int = key(
        1000,
        whole(0, 1_000_000),
        "Topics that one client may add in a day and no rule named before. 0: no limit.",
    )
    device_pushes_per_minute: int = key(
        120, whole(1, 1_000_000), "Pushes to one device token in a minute, of all senders together."
    )
    call_max_age: float = key(30.0, seconds(1, 3600), "A call that is older is not sent.")
    verify_devices: bool = key(
        False, SWITCH, "A device token is active after its owner has shown a code that is pushed to it."
    )
    subscription_days: int = key(
        180,
        whole(0, 36_500),
        "Days after which a subscription is deleted unless its client renews it. 0: never.",
    )

    @property
    def push_limits(self) -> PushLimits:
        return PushLimits(self.device_pushes_per_minute, self.call_max_age)


@dataclass(frozen=True, kw_only=True)
class InactiveClientsConfig:
    """Idle client connections."""

    disconnect: bool = key(True, SWITCH, "")
    ttl: float = key(43_200.0, seconds(1, 10_000_000), "Silence after which a client is disconnected.")
    check_interval: float = key(3600.0, seconds(0.1, 86_400), "")


@dataclass(frozen=True, kw_only=True)
class LimitsConfig:
    """What one client, or one address (IPv6: one /64), may use. 0 is no limit."""

    handshake_timeout: float = key(HANDSHAKE_TIMEOUT, seconds(0.1, 600), "TLS and NTF handshake, each.")
    connections: int = key(50_000, whole(0, 10_000_000), "In all; no more than open files allow.")
    connections_per_address: int = key(5000, whole(0, 10_000_000), "Phones share addresses: keep it large.")
    commands_per_second: int = key(500, whole(0, 1_000_000), "Per connection, in the long run.")
    commands_burst: int = key(5000, whole(1, 10_000_000), "Per connection, at once.")
    address_commands_per_second: int = key(5000, whole(0, 1_000_000), "Per address, in the long run.")
    address_commands_burst: int = key(50_000, whole(1, 10_000_000), "Per address, at once.")
    address_cpu_percent: int = key(
        50, whole(0, 100), "Of one core, for the commands and handshakes of one address in the long run."
    )
    address_failures_burst: int = key(
        500,
        whole(1, 10_000_000),
        "Failed authorisations per address, at once; beyond it, connections that fail again are closed.",
    )
    send_timeout: float = key(
        60.0, seconds(0.1, 3600), "A client that takes no answers for so long is dropped."
    )
    tokens_per_connection: int = key(1000, whole(0, 1_000_000), "TNEW and TRPL on one connection.")
    address_tokens_per_day: int = key(
        10_000, whole(0, 100_000_000), "TNEW, and subscriptions at the statement gateway, from one address."
    )
    address_rules_per_day: int = key(
        1_000_000, whole(0, 1_000_000_000), "Rules that one address may send to the statement gateway."
    )
    address_topics_per_day: int = key(
        2000,
        whole(0, 100_000_000),
        "Topics that no rule named before, in rules that one address sends to the statement gateway.",
    )
    address_verifications_per_hour: int = key(
        2000, whole(0, 100_000_000), "TNEW and TRPL from one address: each makes a push to a device."
    )
    device_verifications_per_hour: int = key(30, whole(0, 1_000_000), "TNEW and TRPL with one device token.")
    host_verifications_per_hour: int = key(
        10_000, whole(0, 100_000_000), "TNEW and TRPL with one Web Push host."
    )


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """Prometheus and health checks over local HTTP: /metrics, /health/live, /health/ready."""

    host: str = key(LOCALHOST, LISTEN, "")
    port: int = key(0, PORT, "0: off.")
    hosts: tuple[str, ...] = key(
        (), HOSTS, "Host names that requests may use; `localhost` and IP addresses are always accepted."
    )
    file: Path | None = key(None, FILE, "Also write the metrics to this file.")
    file_interval: float = key(60.0, seconds(1, 86_400), "")
    ready_own_percent: int = key(
        50, whole(0, 100), "Queues of own routers that must be subscribed for /health/ready to say so."
    )


@dataclass(frozen=True, kw_only=True)
class JournalConfig:
    """Events for ntf-analytics, without ids that lead back to anyone."""

    enabled: bool = key(False, SWITCH, "")
    format: str = key("parquet", choice("parquet", "jsonl"), "")
    segment_mb: int = key(64, whole(1, 4096), "A file is closed at this size,")
    segment_seconds: float = key(900.0, seconds(1, 86_400), "or at this age.")


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Where and how much is logged. Device tokens, keys and queue ids never are."""

    level: str = key("info", choice("debug", "info", "warning", "error"), "")
    format: str = key(
        "text", choice("text", "json", "journald"), "journald: straight to it, with fields to look for."
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    STORE: StoreConfig = field(default_factory=StoreConfig)
    AUTH: AuthConfig = field(default_factory=AuthConfig)
    TRANSPORT: TransportConfig = field(default_factory=TransportConfig)
    SUBSCRIBER: SubscriberConfig = field(default_factory=SubscriberConfig)
    PUSH: PushConfig = field(default_factory=PushConfig)
    APNS: ApnsConfig = field(default_factory=ApnsConfig)
    FCM: FcmConfig = field(default_factory=FcmConfig)
    WEBPUSH: WebPushConfig = field(default_factory=WebPushConfig)
    STATEMENTS: StatementsConfig = field(default_factory=StatementsConfig)
    INACTIVE_CLIENTS: InactiveClientsConfig = field(default_factory=InactiveClientsConfig)
    LIMITS: LimitsConfig = field(default_factory=LimitsConfig)
    METRICS: MetricsConfig = field(default_factory=MetricsConfig)
    JOURNAL: JournalConfig = field(default_factory=JournalConfig)
    LOG: LogConfig = field(default_factory=LogConfig)


SECTIONS: Mapping[str, Any] = {f.name: f.default_factory for f in dataclasses.fields(Config)}
OPTIONS = [(name, option.name) for name, kind in SECTIONS.items() for option in dataclasses.fields(kind)]
"Section and key of every value."
_WELL_KNOWN_ENV = {("APNS", "key_file"): "APNS_KEY_FILE", ("APNS", "key_id"): "APNS_KEY_ID"}


RELOADED = frozenset({"LIMITS", "LOG"})
"Sections that count without a restart, but for the keys below."
RESTART_ONLY = frozenset({("LIMITS", "handshake_timeout"), ("LOG", "format")})


def unlike(old: Config, new: Config) -> list[str]:
    """Keys whose new value counts after a restart only."""
    return [
        f"[{section}] {option}"
        for section, option in OPTIONS
        if section not in RELOADED or (section, option) in RESTART_ONLY
        if getattr(getattr(old, section), option) != getattr(getattr(new, section), option)
    ]


def load_config(path: Path, env: Mapping[str, str]) -> Config:
    """The file's values, overridden by the environment; anything unknown or wrong is a ConfigError."""
    try:
        text = path.read_text("utf-8-sig")  # editors of another system begin with a mark
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist; `ntf-server init` makes it, --config-dir says where"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text") from None
    return parse_config(text, str(path), env)


def configured(config_dir: Path) -> Config:
    """What commands go by: the file in the folder, and the environment they run in."""
    return load_config(config_dir / CONFIG_FILE, os.environ)


def parse_config(text: str, name: str, env: Mapping[str, str]) -> Config:
    # Not strict: a section may be continued further down. A key that is set twice is a mistake all the same.
    parser = configparser.ConfigParser(interpolation=None, strict=False, empty_lines_in_values=False)
    try:
        parser.read_string(text, name)
    except configparser.MissingSectionHeaderError as error:
        raise ConfigError(f"{name}:{error.lineno}: there is no [SECTION] before {error.line!r}") from None
    except configparser.ParsingError as error:
        number, _ = error.errors[0]
        line = text.splitlines()[number - 1]
        raise ConfigError(f"{name}:{number}: {line!r} is neither a section nor key = value") from None
    lines = _line_numbers(text, name)
    for section in parser.sections():
        if section not in SECTIONS:
            where = f"{name}:{lines[section, '']}"
            raise ConfigError(f"{where}: unknown section [{section}]; {_meant(section, SECTIONS)}")
    sections = {
        section: _read_section(
            section, kind, dict(parser[section]) if section in parser else {}, name, lines, env
        )
        for section, kind in SECTIONS.items()
    }
    return Config(**sections)


def _read_section(
    section: str,
    kind: Any,
    values: dict[str, str],
    name: str,
    lines: Mapping[tuple[str, str], int],
    env: Mapping[str, str],
) -> Any:
    known = {f.name: f for f in dataclasses.fields(kind)}
    for option in values:
        if option not in known:
            where = f"{name}:{lines[section, option]}"
            raise ConfigError(f"{where}: unknown key {option} in [{section}]; {_meant(option, known)}")
    result = {}
    for option, declared in known.items():
        names = (_variable(section, option), _WELL_KNOWN_ENV.get((section, option), ""))
        variable = next((each for each in names if each in env), None)
        if variable is not None:
            result[option] = _value(declared, env[variable], f"environment {variable}")
        elif option in values:
            where = f"{name}:{lines[section, option]}: [{section}] {option}"
            _check_bare(declared, values[option], where)
            result[option] = _value(declared, values[option], where)
    return kind(**result)


def _meant(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"


def unknown_variables(env: Mapping[str, str]) -> Iterator[str]:
    """A line for each variable that looks like one of ours and is none."""
    known = {_variable(section, option) for section, option in OPTIONS}
    for name in sorted(env):
        if name.startswith(ENV_PREFIX) and name not in known and name not in OTHER_VARIABLES:
            close = difflib.get_close_matches(name, known, n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            yield f"unknown variable {name} in the environment{meant}"


def _variable(section: str, option: str) -> str:
    return f"{ENV_PREFIX}{section}_{option}".upper()


def _check_bare(declared: dataclasses.Field[Any], text: str, where: str) -> None:
    """Everything behind the `=` is the value: a comment or quotes were not meant to be part of it."""
    if declared.metadata["secret"]:
        return
    if re.search(r"\s[;#]", text):
        raise ConfigError(f"{where}: a comment needs a line of its own")
    if re.fullmatch(r"""(["']).*\1""", text):
        raise ConfigError(f"{where}: write the value without quotes")


def _value(declared: dataclasses.Field[Any], text: str, where: str) -> Any:
    kind: ValueKind = declared.metadata["kind"]
    try:
        return kind.parse(text)
    except (ValueError, KeyError):
        shown = "" if declared.metadata["secret"] else f", not {text!r}"
        raise ConfigError(f"{where} must be {kind.allowed}{shown}") from None


def _line_numbers(text: str, name: str) -> dict[tuple[str, str], int]:
    """Where sections and keys stand, which configparser does not tell."""
    numbers: dict[tuple[str, str], int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\[(.+?)\]", line):
            section = header[1]
            numbers.setdefault((section, ""), number)
        elif option := re.match(r"([^#;=:\s][^=:]*?)\s*[=:]", line):
            where = section, option[1].lower()
            if where in numbers:
                first = numbers[where]
                raise ConfigError(
                    f"{name}:{number}: {where[1]} of [{section}] was set in line {first} already"
                )
            numbers[where] = number
    return numbers


def with_value(text: str, section: str, option: str, value: str) -> str:
    """The file with one value set; everything else, also comments, stays as it was."""
    lines = text.splitlines()
    numbers = _line_numbers(text, CONFIG_FILE)
    if (section, option) in numbers:
        lines[numbers[section, option] - 1] = f"{option} = {value}"
    elif (section, "") in numbers:
        lines.insert(numbers[section, ""], f"{option} = {value}")
    else:
        lines += ["", f"[{section}]", f"{option} = {value}"]
    return "\n".join(lines) + "\n"


def render_config(config: Config) -> str:
    """The file with every key: what differs from the default is set, the rest is a comment."""
    parts = [
        "# Configuration of ntf-server. Every key is listed with its default;",
        f"# each can also be set in the environment as {ENV_PREFIX}<SECTION>_<KEY>.",
    ]
    for section_name in SECTIONS:
        section = getattr(config, section_name)
        parts += ["", f"[{section_name}]", f"# {section.__doc__}"]
        for declared in dataclasses.fields(section):
            parts += _render_key(declared, getattr(section, declared.name))
    return "\n".join(parts) + "\n"


def _render_key(declared: dataclasses.Field[Any], value: Any) -> list[str]:
    kind: ValueKind = declared.metadata["kind"]
    doc = " ".join(filter(None, (declared.metadata["doc"], f"({kind.allowed})")))
    mark = "# " if value == declared.default else ""
    return [f"# {doc}", f"{mark}{declared.name} = {kind.show(value)}".rstrip()]
