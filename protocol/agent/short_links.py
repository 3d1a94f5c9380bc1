"""Short links: where a router keeps the data of a connection request, and the key that opens it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from urllib.parse import quote

from protocol.addresses import KEY_HASH_SIZE, SmpServer, parse_smp_server, push_smp_server
from protocol.agent.forms import SHORT, Form, nonempty, text
from protocol.encoding import EntityId, Reader, Writer, b64
from protocol.errors import DecodeError
from protocol.link_crypto import LINK_ID_SIZE, LINK_KEY_SIZE
from protocol.query import parse_bytes, split_query


class LinkKind(Enum):
    """What a link is to; all but the first are addresses."""

    INVITATION = "i"
    CONTACT = "a"
    CHANNEL = "c"
    GROUP = "g"
    RELAY = "r"


class LinkScheme(Enum):
    SIMPLEX = "simplex"
    HTTPS = "https"
    "The first host is the authority: a web page there can tell what to do with the link."


@dataclass(frozen=True, slots=True)
class ShortLink:
    kind: LinkKind
    server: SmpServer
    "Without port and key hash if the reader is to know them of the first host."
    link_key: bytes = field(repr=False)
    link_id: EntityId | None = field(default=None, repr=False)
    "Of an invitation; an address has the id that its key gives."
    scheme: LinkScheme = LinkScheme.SIMPLEX

    def text(self) -> str:
        """For whom it is meant: whoever has it can use the link."""
        hosts, where = self.server.hosts, "simplex:"
        if self.scheme is LinkScheme.HTTPS:
            hosts, where = hosts[1:], f"https://{hosts[0]}"
        keys = [self.link_key] if self.link_id is None else [self.link_id, self.link_key]
        values = {"h": ",".join(hosts), "p": self.server.port, "c": _bare(self.server.key_hash)}
        query = "&".join(f"{name}={quote(value, safe='')}" for name, value in values.items() if value)
        return f"{where}/{self.kind.value}#{'/'.join(map(_bare, keys))}{'?' if query else ''}{query}"


_ADDRESS_KINDS = [kind for kind in LinkKind if kind is not LinkKind.INVITATION]
_KINDS: dict[str, LinkKind] = {kind.value: kind for kind in LinkKind} | {
    kind.value.upper(): kind for kind in _ADDRESS_KINDS
}
_LINK = re.compile(
    r"(?:simplex:|https://([^\s/?#:]+|\[[0-9A-Fa-f:.]+\]))/([A-Za-z])/?#"
    r"/?(?:([A-Za-z0-9_=-]+)/)?([A-Za-z0-9_=-]+)/?(?:\?([!-~]*))?",
    re.ASCII,
)


def parse_short_link(text: str) -> ShortLink:
    match = _LINK.fullmatch(text)
    if match is None:
        raise DecodeError
    host, kind, link_id, link_key, query = match.groups()
    return _checked(
        ShortLink(
            _kind(kind),
            _server(host, split_query(query or "")),
            parse_bytes(link_key),
            None if link_id is None else EntityId(parse_bytes(link_id)),
            LinkScheme.HTTPS if host else LinkScheme.SIMPLEX,
        )
    )


def _kind(char: str) -> LinkKind:
    """Addresses are also written in upper case."""
    kind = _KINDS.get(char)
    if kind is None:
        raise DecodeError
    return kind


def _server(authority: str | None, fields: dict[str, str]) -> SmpServer:
    others = fields.get("h", "")
    hosts = [authority] if authority else []
    hosts += others.split(",") if others else []
    key_hash = parse_bytes(fields.get("c", ""))
    return _checked_server(SmpServer(tuple(hosts), fields.get("p", ""), key_hash))


def _checked_server(server: SmpServer) -> SmpServer:
    """As any address, but the key hash may be missing."""
    key_hash = server.key_hash or bytes(KEY_HASH_SIZE)
    parse_smp_server(str(SmpServer(server.hosts, server.port, key_hash)))
    return server


def _checked(link: ShortLink) -> ShortLink:
    invitation = link.kind is LinkKind.INVITATION
    if len(link.link_key) != LINK_KEY_SIZE or invitation != (link.link_id is not None):
        raise DecodeError
    if link.link_id is not None and len(link.link_id) != LINK_ID_SIZE:
        raise DecodeError
    return link


def _pull(r: Reader) -> ShortLink:
    tag = r.pull_bytes(1)
    if tag == b"I":
        server, link_id = _SERVER.pull(r), EntityId(r.pull_short())
        return _checked(ShortLink(LinkKind.INVITATION, server, r.pull_short(), link_id))
    if tag == b"C":
        kind = _kind(chr(r.pull_byte()))
        return _checked(ShortLink(kind, _SERVER.pull(r), r.pull_short()))
    raise DecodeError


def _push(w: Writer, link: ShortLink) -> None:
    if link.link_id is not None:
        w.push_bytes(b"I")
        _SERVER.push(w, link.server)
        w.push_short(link.link_id)
    else:
        w.push_bytes(b"C" + link.kind.value.upper().encode("ascii"))
        _SERVER.push(w, link.server)
    w.push_short(link.link_key)


SHORT_LINK = Form(_pull, _push)


_HOST = text(SHORT, "ascii")
_HOSTS = nonempty(_HOST)
_SERVER = Form(
    lambda r: _checked_server(SmpServer(_HOSTS.pull(r), _HOST.pull(r), r.pull_short())), push_smp_server
)


def _bare(data: bytes) -> str:
    return b64(data).rstrip(b"=").decode("ascii")
