"""Where to send to a queue: as text in links, and in the two binary forms that agents exchange.

A queue without a mode says nothing about who secures it: its recipient does, with KEY.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import quote

from protocol.addresses import SmpServer, parse_smp_server, pull_smp_server, push_smp_server
from protocol.crypto import X25519PublicKey, decode_x25519_public, pull_x25519_public, push_key
from protocol.encoding import EntityId, Reader, Writer, short
from protocol.query import bytes_text, parse_bytes, parse_versions, split_query, versions_text
from protocol.smp_messages import QueueMode
from protocol.versions import VersionRange, pull_version_range, push_version_range

SMP_CLIENT_VERSIONS = VersionRange(1, 4)
CLIENT_SEVERAL_HOSTS = 2
CLIENT_SENDER_SECURES = 3
CLIENT_QUEUE_MODES = 4

_MODE_OF_Q = {"m": QueueMode.MESSAGING, "c": QueueMode.CONTACT}
_MODE_OF_K = {"s": QueueMode.MESSAGING, **_MODE_OF_Q}


@dataclass(frozen=True, slots=True)
class QueueUri:
    """A queue, for whoever reads it to choose a version."""

    versions: VersionRange
    server: SmpServer
    sender_id: EntityId = field(repr=False)
    dh_key: X25519PublicKey = field(repr=False)
    mode: QueueMode | None = None

    @property
    def sender_can_secure(self) -> bool:
        """Otherwise the recipient does it, with the key in the confirmation."""
        return self.mode is QueueMode.MESSAGING

    def text(self) -> str:
        """For whom it is meant: whoever has it can use the queue."""
        lowest = self.versions.min
        server, later_hosts = self.server, ""
        if lowest < CLIENT_SEVERAL_HOSTS:
            server = SmpServer(server.hosts[:1], server.port, server.key_hash)
            later_hosts = ",".join(self.server.hosts[1:])
        parameters = {
            "v": versions_text(self.versions),
            "dh": bytes_text(self.dh_key.der),
        }
        if self.mode is not None:
            parameters["q"] = self.mode.value.decode().lower()
        if self.sender_can_secure and lowest < CLIENT_QUEUE_MODES:
            parameters["k"] = "s"
        if later_hosts:
            parameters["srv"] = later_hosts
        query = "&".join(f"{name}={quote(value, safe='')}" for name, value in parameters.items())
        return f"{server}/{bytes_text(self.sender_id)}#/?{query}"


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """A queue in an agreed version."""

    version: int
    server: SmpServer
    sender_id: EntityId = field(repr=False)
    dh_key: X25519PublicKey = field(repr=False)
    mode: QueueMode | None = None


def parse_queue_uri(text: str) -> QueueUri:
    """Unknown parameters are ignored; DecodeError for anything that is no queue."""
    address, _, query = text.partition("#")
    address, _, sender_id = address.removesuffix("/").rpartition("/")
    parameters = split_query(query.removeprefix("/").removeprefix("?"))
    server = parse_smp_server(address)
    if later_hosts := parameters.get("srv"):
        hosts = (*server.hosts, *later_hosts.split(","))
        server = parse_smp_server(str(SmpServer(hosts, server.port, server.key_hash)))
    return QueueUri(
        parse_versions(parameters.get("v", "")),
        server,
        EntityId(parse_bytes(sender_id)),
        decode_x25519_public(parse_bytes(parameters.get("dh", ""))),
        _mode(parameters),
    )


def _mode(parameters: dict[str, str]) -> QueueMode | None:
    """`q` was added later and says more than `k`; values that nobody knows say nothing."""
    mode = _MODE_OF_Q.get(parameters.get("q", ""))
    return mode if mode is not None else _MODE_OF_K.get(parameters.get("k", ""))


def pull_queue_uri(r: Reader) -> QueueUri:
    versions = pull_version_range(r)
    return QueueUri(versions, pull_smp_server(r), *_pull_rest(r))


def push_queue_uri(w: Writer, queue: QueueUri) -> None:
    push_version_range(w, queue.versions)
    push_smp_server(w, queue.server)
    _push_rest(w, queue)
    lowest, messaging = queue.versions.min, queue.sender_can_secure
    if lowest >= CLIENT_QUEUE_MODES:
        w.push_bytes(b"" if queue.mode is None else queue.mode.value)
    elif lowest >= CLIENT_SENDER_SECURES or (queue.versions.max >= CLIENT_SENDER_SECURES and messaging):
        w.push_bool(messaging)


def pull_queue_info(r: Reader) -> QueueInfo:
    version = r.pull_word16()
    server = pull_smp_server(r) if version >= CLIENT_SEVERAL_HOSTS else _pull_one_host(r)
    return QueueInfo(version, server, *_pull_rest(r))


def push_queue_info(w: Writer, queue: QueueInfo) -> None:
    w.push_word16(queue.version)
    if queue.version >= CLIENT_SEVERAL_HOSTS:
        push_smp_server(w, queue.server)
    else:
        w.push_short(queue.server.hosts[0].encode("ascii"))
        w.push_short(queue.server.port.encode("ascii"))
        w.push_short(queue.server.key_hash)
    _push_rest(w, queue)
    if queue.version >= CLIENT_QUEUE_MODES:
        w.push_bytes(b"" if queue.mode is None else queue.mode.value)
    elif queue.version >= CLIENT_SENDER_SECURES and queue.mode is QueueMode.MESSAGING:
        w.push_bool(True)


def _pull_one_host(r: Reader) -> SmpServer:
    """A list of one, as the first version wrote it: without the count."""
    parts = [short(r.pull_short()) for _ in ("host", "port", "key hash")]
    return pull_smp_server(Reader(b"\1" + b"".join(parts)))


def _pull_rest(r: Reader) -> tuple[EntityId, X25519PublicKey, QueueMode | None]:
    return EntityId(r.pull_short()), pull_x25519_public(r), _pull_mode(r)


def _push_rest(w: Writer, queue: QueueUri | QueueInfo) -> None:
    w.push_short(queue.sender_id)
    push_key(w, queue.dh_key)


_MODE_CHARS = {
    b"M": QueueMode.MESSAGING,
    b"T": QueueMode.MESSAGING,
    b"C": QueueMode.CONTACT,
    b"F": QueueMode.CONTACT,
}


def _pull_mode(r: Reader) -> QueueMode | None:
    """One character that may be absent; what else follows belongs to somebody else."""
    mode = _MODE_CHARS.get(r.peek())
    if mode is not None:
        r.pull_bytes(1)
    return mode
