"""Server addresses and queue names, in binary and as text."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, Self

from protocol.encoding import EntityId, Reader, Writer, b64, unb64
from protocol.errors import DecodeError

KEY_HASH_SIZE = 32
SMP_PORT = 5223
NTF_PORT = 443
MAX_PORT_DIGITS = 5

_HOST = rb"(?:[A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,253}\])"
"A name or an IPv4 address, or an IPv6 address in brackets: what can stand in an address text."
_IS_HOST = re.compile(_HOST).fullmatch
_PASSWORD = rb"[!-.0-9;-?A-~]{1,255}"
"Printable, without what separates the parts of an address: `:`, `/`, `@`."
_WITH_PASSWORD = re.compile(rb"(smp://[A-Za-z0-9_=-]+):(" + _PASSWORD + rb")(@[^@]+)")
_ADDRESS = re.compile(
    rb"([a-z]+)://([A-Za-z0-9_=-]+)@(" + _HOST + rb"(?:," + _HOST + rb"){0,254})(?::([0-9]{1,5}))?"
)


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server is and who it must be. An empty port is the protocol's default."""

    hosts: tuple[str, ...]
    port: str
    key_hash: bytes
    _hash: int = field(init=False, repr=False, compare=False)
    "Made once: addresses are keys, looked up several times for each command that names one."

    scheme: ClassVar[str]
    default_port: ClassVar[int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.hosts, self.port, self.key_hash)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Self], tuple[tuple[str, ...], str, bytes]]:
        """Another process makes another hash."""
        return type(self), (self.hosts, self.port, self.key_hash)

    def __str__(self) -> str:
        where = ",".join(self.hosts) + (f":{self.port}" if self.port else "")
        return f"{self.scheme}://{b64(self.key_hash).decode()}@{where}"

    @property
    def port_number(self) -> int:
        return int(self.port or self.default_port)

    @property
    def host_port(self) -> str:
        """The name of the server in logs, metrics and the journal: one for all spellings."""
        return f"{canonical_host(self.hosts[0])}:{self.port_number}"

    @property
    def spelling(self) -> str:
        """Hosts and port as they are written here."""
        return f"{','.join(self.hosts)}:{self.port}"

    @property
    def canonical(self) -> Self:
        """The same server in the one spelling that it is known by: two are the same if these are equal."""
        port = "" if self.port_number == self.default_port else str(self.port_number)
        hosts = tuple(dict.fromkeys(map(canonical_host, self.hosts)))
        return self if (hosts, port) == (self.hosts, self.port) else type(self)(hosts, port, self.key_hash)


class SmpServer(ServerAddress):
    """An SMP router."""

    __slots__ = ()
    scheme = "smp"
    default_port = SMP_PORT


class NtfServer(ServerAddress):
    """A notification server."""

    __slots__ = ()
    scheme = "ntf"
    default_port = NTF_PORT


@lru_cache(maxsize=4096)
def canonical_host(host: str) -> str:
    """Lower case, without the dot of the root; an IPv6 address in its short form, one that stands for an IPv4
    address as that."""
    if not host.startswith("["):
        return host.lower().rstrip(".") or host
    try:
        address = ipaddress.IPv6Address(host[1:-1])
    except ValueError:
        return host.lower()
    return str(address.ipv4_mapped or f"[{address}]")


def parse_smp_server(text: str) -> SmpServer:
    return SmpServer(*_parse_address(text, b"smp"))


@dataclass(frozen=True, slots=True)
class SmpServerWithPassword:
    """A router, and the password that it wants for creating queues and for acting as a proxy."""

    server: SmpServer
    password: bytes | None = field(default=None, repr=False)

    @property
    def text(self) -> str:
        """With the password: not for logs, errors or other people."""
        text = str(self.server)
        if self.password is None:
            return text
        identity, _, where = text.partition("@")
        return f"{identity}:{self.password.decode('ascii')}@{where}"


def parse_smp_server_with_password(text: str) -> SmpServerWithPassword:
    """`smp://fingerprint:password@host`, or without the password."""
    match = _WITH_PASSWORD.fullmatch(text.encode("utf-8", "surrogatepass"))
    if match is None:
        return SmpServerWithPassword(parse_smp_server(text))
    return SmpServerWithPassword(parse_smp_server((match[1] + match[3]).decode()), match[2])


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
    return _smp_server(tuple(r.pull_nonempty(Reader.pull_short)), r.pull_short(), r.pull_short())


@lru_cache(maxsize=1024)
def _smp_server(raw_hosts: tuple[bytes, ...], raw_port: bytes, key_hash: bytes) -> SmpServer:
    """Thousands of queues name the same few routers: each is checked once."""
    hosts = tuple(map(_host, raw_hosts))
    try:
        port = raw_port.decode("ascii")
    except UnicodeDecodeError:
        raise DecodeError from None
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
        return queue_text(self.server, self.notifier_id)


def queue_text(server: SmpServer, notifier_id: bytes) -> bytes:
    return _address_text(server) + b"/" + b64(notifier_id)


@lru_cache(maxsize=1024)
def _address_text(server: SmpServer) -> bytes:
    return str(server).encode("ascii")


def pull_smp_queue_ntf(r: Reader) -> SmpQueueNtf:
    return SmpQueueNtf(pull_smp_server(r), EntityId(r.pull_short()))


def push_smp_queue_ntf(w: Writer, queue: SmpQueueNtf) -> None:
    push_smp_server(w, queue.server)
    w.push_short(queue.notifier_id)


def parse_smp_queue_ntf(text: bytes) -> SmpQueueNtf:
    address, _, notifier_id = text.rpartition(b"/")
    server = parse_smp_server(address.decode("ascii", "replace"))
    return SmpQueueNtf(server, EntityId(unb64(notifier_id)))
