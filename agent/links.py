"""Queue links: what a recipient gives to a sender, over a channel both trust."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from protocol.addresses import SmpServer, parse_smp_server
from protocol.crypto import X25519PrivateKey, X25519PublicKey, decode_x25519_public
from protocol.encoding import EntityId, b64, unb64
from protocol.errors import DecodeError

CLIENT_VERSION = 1
"Of the message format inside queues."

_LINK = re.compile(
    r"(?P<server>smp://[^/]+)/(?P<id>[A-Za-z0-9_=-]+)#/\?v=(?P<min>\d{1,5})(?:-(?P<max>\d{1,5}))?"
    r"&dh=(?P<key>[A-Za-z0-9_=-]+)&k=s"
)

_ANY_KEY = X25519PrivateKey(bytes(32))


@dataclass(frozen=True, slots=True)
class QueueLink:
    """A queue that its sender can secure, and the key for messages in it. Whoever has it first, has it."""

    server: SmpServer
    sender_id: EntityId = field(repr=False)
    dh_key: X25519PublicKey = field(repr=False)

    @property
    def text(self) -> str:
        key, queue = b64(self.dh_key.der).decode(), b64(self.sender_id).decode()
        return f"{self.server}/{queue}#/?v={CLIENT_VERSION}&dh={key}&k=s"


def parse_link(text: str) -> QueueLink:
    """Raises DecodeError for anything else, also for a version this agent does not speak."""
    match = _LINK.fullmatch(text)
    if match is None:
        raise DecodeError
    lowest = int(match["min"])
    if not lowest <= CLIENT_VERSION <= int(match["max"] or lowest):
        raise DecodeError
    sender_id = EntityId(unb64(match["id"].encode()))
    key = decode_x25519_public(unb64(match["key"].encode()))
    _ANY_KEY.exchange(key)  # refuses keys that have no secret with anyone
    return QueueLink(parse_smp_server(match["server"]), sender_id, key)
