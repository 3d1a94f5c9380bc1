"""What can be wrong with a machine for a given configuration; each problem is a line that says what to do."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

from ntf_server.config import LOCALHOST, Config
from ntf_server.logs import JOURNALD_SOCKET


def remedied(line: str) -> str:
    """With what to do, where the system's own words leave it open."""
    if line.endswith(os.strerror(errno.EACCES)):
        return f"{line}; user {os.getuid()} needs it: change its owner or its mode, or be another user"
    if "a certificate expired" in line:
        return f"{line}; `ntf-server cert` makes a new one"
    if "a certificate is not valid before" in line:
        return f"{line}; put this machine's clock right"
    return line


def setting_problems(config: Config) -> Iterator[str]:
    """Values that are right one by one and make no sense together."""
    if not config.TRANSPORT.host:
        yield "[TRANSPORT] host is not set; it is the name or address that clients connect to"
    apns = config.APNS
    for key in ("key_id", "team_id"):
        if getattr(apns, key) and apns.key_file is None and not apns.allow_test_provider:
            yield f"[APNS] {key} is set and key_file is not; set both, or neither"
    for (host, port, key), (other_host, other_port, other) in combinations(_ports(config), 2):
        if port == other_port and (host == other_host or not (host and other_host)):
            yield f"{key} and {other} are both {port}; choose another for one of them"


def _ports(config: Config) -> list[tuple[str, int, str]]:
    """Address, port and key of all that this server listens on; where any free port will do, none."""
    transport, metrics, statements = config.TRANSPORT, config.METRICS, config.STATEMENTS
    ports = [
        (transport.listen, transport.port, "[TRANSPORT] port"),
        (LOCALHOST, transport.control_port, "[TRANSPORT] control_port"),
        (metrics.host, metrics.port, "[METRICS] port"),
        (statements.listen, statements.port if statements.enabled else 0, "[STATEMENTS] port"),
    ]
    return [each for each in ports if each[1]]


def file_problems(config: Config) -> Iterator[str]:
    """Files and folders that the server will need at some time, perhaps only for its first push."""
    if config.STORE.data_dir is not None:
        yield from _folder_problem(config.STORE.data_dir, "[STORE] data_dir")
    for path, key in (
        (config.APNS.test_ca_file, "[APNS] test_ca_file"),
        (config.FCM.ca_file, "[FCM] ca_file"),
        (config.WEBPUSH.ca_file, "[WEBPUSH] ca_file"),
    ):
        if path is not None:
            yield from _ca_problem(path, key)
    if config.LOG.format == "journald" and not Path(JOURNALD_SOCKET).exists():
        yield f"[LOG] format is journald, and there is none here ({JOURNALD_SOCKET}); choose text or json"


def _folder_problem(folder: Path, key: str) -> Iterator[str]:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        yield f"{key}: {existing} is not a folder"
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f"{key}: {existing} cannot be written to by user {os.getuid()}; change its owner or its mode"


def _ca_problem(path: Path, key: str) -> Iterator[str]:
    try:
        ssl.create_default_context(cafile=path)
    except ssl.SSLError:
        yield f"{key}: {path} holds no certificates; it must be a PEM file"
    except OSError as error:
        yield f"{key}: cannot read {path}: {error.strerror}"


def port_problems(config: Config) -> Iterator[str]:
    """Ports that cannot be listened on now."""
    for host, port, key in _ports(config):
        yield from _port_problem(host, port, key)
    if config.TRANSPORT.listen and not config.TRANSPORT.port:
        yield from _port_problem(config.TRANSPORT.listen, 0, "[TRANSPORT] listen")


def _port_problem(host: str, port: int, key: str) -> Iterator[str]:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, port), family=family):
            return
    except OSError as error:
        match error.errno:
            case errno.EADDRINUSE:
                yield f"{key}: port {port} is in use by another program; `ss -ltnp` shows which"
            case errno.EACCES:
                yield (
                    f"{key}: port {port} needs root or CAP_NET_BIND_SERVICE;"
                    " grant it (AmbientCapabilities= with systemd) or choose a port from 1024 on"
                )
            case errno.EADDRNOTAVAIL:
                yield f"{key}: {host} is no address of this machine; `ip address` shows which are"
            case _:
                yield f"{key}: cannot listen on {host or 'any address'}, port {port}: {error.strerror}"
