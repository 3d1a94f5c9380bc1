"""What the handshakes of both protocols share: a machine that is given contents of blocks, one by one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from construct import Construct, ConstructError, Int16ub, Struct

from protocol.blocks import BlockChain
from protocol.errors import TE_PARSE, TE_VERSION, HandshakeError
from protocol.hiding import hides_bytes
from protocol.session_params import SessionParams
from protocol.versions import VersionRange

VersionRangeFormat = Struct("min" / Int16ub, "max" / Int16ub)


@dataclass(frozen=True, slots=True)
class Agreed:
    """The handshake is over: the session, and in an encrypted one the chains of this side."""

    params: SessionParams
    sending: BlockChain | None = field(default=None, repr=False)
    receiving: BlockChain | None = field(default=None, repr=False)


@hides_bytes
@dataclass(frozen=True, slots=True)
class Step:
    """What to send now (the content of a block), and the result once there is one."""

    reply: bytes | None = None
    agreed: Agreed | None = None


class HandshakeRefused(HandshakeError):
    """A failure that the peer is told of before the connection closes."""

    def __init__(self, error: HandshakeError, reply: bytes) -> None:
        super().__init__(error.error)
        self.reply = reply


class Handshake(Protocol):
    """One side of one handshake."""

    block_size: int

    def start(self) -> bytes | None:
        """The content of the first block, if this side speaks first."""

    def receive(self, content: bytes) -> Step:
        """Raises HandshakeError."""


def parse_hello(format: Construct, content: bytes) -> Any:
    """Formats of hellos ignore trailing bytes: later versions may add fields."""
    try:
        return format.parse(content)
    except ConstructError:
        raise HandshakeError(TE_PARSE) from None


def offered_range(hello: Any) -> VersionRange:
    offered = VersionRange(hello.versions.min, hello.versions.max)
    if offered.min > offered.max:
        raise HandshakeError(TE_PARSE)
    return offered


def agree_version(ours: VersionRange, offered: VersionRange) -> int:
    version = ours.common(offered)
    if version is None:
        raise HandshakeError(TE_VERSION)
    return version
