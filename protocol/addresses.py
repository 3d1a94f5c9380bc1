"""Server addresses and queue names, in binary and as text."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from protocol.encoding import EntityId, Reader, Writer, b64, unb64
from protocol.errors import DecodeError

KEY_HASH_SIZE = 32
SMP_PORT = 5223
NTF_PORT = 443
MAX_PORT_DIGITS = 5

_HOST = rb"(?:[A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,253}\])"
"A name or an IPv4 address, or an IPv6 address in brackets: what can stand in an address text."
_IS_HOST = re.compile(_HOST).fullmatch
_ADDRESS = re.compile(
    rb"([a-z]+)://([A-Za-z0-9_=-]+)@(" + _HOST + rb"(?:," + _HOST + rb"){0,254})(?::([0-9]{1,5}))?"
)


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server is and who it must be. An empty port is the protocol's default."""

    hosts: tuple[str, ...]
    port: str
    key_hash: bytes

    def text(self, scheme: str) -> str:
        where = ",".join(self.hosts) + (f":{self.port}" if self.port else "")
        return f"{scheme}://{b64(self.key_hash).decode()}@{where}"


class SmpServer(ServerAddress):
    """An SMP router."""

    __slots__ = ()

    def __str__(self) -> str:
        return self.text("smp")

    @property
    def port_number(self) -> int:
        return int(self.port or SMP_PORT)


class NtfServer(ServerAddress):
    """A notification server."""

    __slots__ = ()

    def __str__(self) -> str:
        return self.text("ntf")

    @property
    def port_number(self) -> int:
        return int(self.port or NTF_PORT)


def parse_smp_server(text: str) -> SmpServer:
    return SmpServer(*_parse_address(text, b"smp"))


def parse_ntf_server(text: str) -> NtfServer:
    return NtfServer(*_parse_address(text, b"ntf"))


def _parse_address(text: str, scheme: bytes) -> tuple[tuple[str, ...], str, bytes]:
    match = _ADDRESS.fullmatch(text.encode("ascii", "replace"))
    if match is None or match[1] != scheme:
        raise DecodeError
    key_hash = unb64(match[2])
    port = (match[4] or b"").decode()
    hosts = tuple(match[3].decode().split(","))
    _check(port, key_hash)
    return hosts, port, key_hash


def pull_smp_server(r: Reader) -> SmpServer:
    hosts = tuple(_host(host) for host in r.pull_nonempty(Reader.pull_short))
    try:
        port = r.pull_short().decode("ascii")
    except UnicodeDecodeError:
        raise DecodeError from None
    key_hash = r.pull_short()
    _check(port, key_hash)
    return SmpServer(hosts, port, key_hash)


def push_smp_server(w: Writer, server: SmpServer) -> None:
    w.push_nonempty(server.hosts, lambda w, host: w.push_short(host.encode("ascii")))
    w.push_short(server.port.encode("ascii"))
    w.push_short(server.key_hash)


def _host(raw: bytes) -> str:
    if not _IS_HOST(raw):
        raise DecodeError
    return raw.decode("ascii")


def _check(port: str, key_hash: bytes) -> None:
    if port and not (port.isdecimal() and len(port) <= MAX_PORT_DIGITS and 0 < int(port) < 65536):
        raise DecodeError
    if len(key_hash) != KEY_HASH_SIZE:
        raise DecodeError


@dataclass(frozen=True, slots=True)
class SmpQueueNtf:
    """A queue as its notifier knows it."""

    server: SmpServer
    notifier_id: EntityId = field(repr=False)

    @property
    def text(self) -> bytes:
        return str(self.server).encode("ascii") + b"/" + b64(self.notifier_id)


def pull_smp_queue_ntf(r: Reader) -> SmpQueueNtf:
    return SmpQueueNtf(pull_smp_server(r), EntityId(r.pull_short()))


def push_smp_queue_ntf(w: Writer, queue: SmpQueueNtf) -> None:
    push_smp_server(w, queue.server)
    w.push_short(queue.notifier_id)


def parse_smp_queue_ntf(text: bytes) -> SmpQueueNtf:
    address, slash, notifier_id = text.rpartition(b"/")
    if not slash:
        raise DecodeError
    server = parse_smp_server(address.decode("ascii", "replace"))
    return SmpQueueNtf(server, EntityId(unb64(notifier_id)))
