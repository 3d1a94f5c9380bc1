"""What is inside an encrypted push, and inside the NMSG it carries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from protocol.addresses import SmpQueueNtf, SmpServer, parse_smp_queue_ntf, queue_text
from protocol.blocks import pad, unpad
from protocol.crypto import box, open_box
from protocol.encoding import Reader, Writer, b64, nonce, unb64
from protocol.errors import DecodeError
from protocol.hiding import hides_bytes

PUSH_PADDING = 3072
NMSG_META_PADDING = 128
MAX_TIMESTAMP = 2**63 - 1


@dataclass(frozen=True, slots=True)
class PnMessage:
    """One queue has news: an entry of a push. `timestamp` is when this server received the NMSG."""

    queue: SmpQueueNtf
    timestamp: int
    nonce: bytes = field(repr=False)
    meta: bytes = field(repr=False)

    def encode(self) -> bytes:
        return encode_pn_message(
            self.queue.server, self.queue.notifier_id, self.timestamp, self.nonce, self.meta
        )


def encode_pn_message(
    server: SmpServer, notifier_id: bytes, timestamp: int, nmsg_nonce: bytes, meta: bytes
) -> bytes:
    """A `PnMessage` without making one: a push has up to six, each used for its text only."""
    return b"%s %d %s %s" % (queue_text(server, notifier_id), timestamp, b64(nmsg_nonce), b64(meta))


def encode_pn_messages(entries: Sequence[PnMessage]) -> bytes:
    return b";".join(entry.encode() for entry in entries)


def decode_pn_messages(data: bytes) -> list[PnMessage]:
    return [_decode_entry(entry) for entry in data.split(b";")]


def _decode_entry(text: bytes) -> PnMessage:
    parts = text.split(b" ")
    if len(parts) != 4 or not parts[1].isdigit() or len(parts[1]) > 19:
        raise DecodeError
    timestamp = int(parts[1])
    if timestamp > MAX_TIMESTAMP:
        raise DecodeError
    return PnMessage(parse_smp_queue_ntf(parts[0]), timestamp, nonce(unb64(parts[2])), unb64(parts[3]))


def seal_push(secret: bytes, random_nonce: bytes, data: bytes, padding: int = PUSH_PADDING) -> bytes:
    """`data` for the device alone; every push has the same size."""
    return box(secret, random_nonce, pad(data, padding))


def open_push(secret: bytes, push_nonce: bytes, boxed: bytes) -> bytes:
    return unpad(open_box(secret, nonce(push_nonce), boxed))


@hides_bytes
@dataclass(frozen=True, slots=True)
class NmsgMeta:
    """Which message arrived and when, as the router tells the recipient."""

    message_id: bytes
    timestamp: int

    def encode(self) -> bytes:
        w = Writer()
        w.push_short(self.message_id)
        w.push_int64(self.timestamp)
        return w.value()


def decode_nmsg_meta(data: bytes) -> NmsgMeta:
    r = Reader(data)
    meta = NmsgMeta(r.pull_short(), r.pull_int64())
    r.pull_tail()  # later versions may add fields
    return meta


def seal_nmsg_meta(secret: bytes, random_nonce: bytes, meta: NmsgMeta) -> bytes:
    return box(secret, random_nonce, pad(meta.encode(), NMSG_META_PADDING))


def open_nmsg_meta(secret: bytes, nmsg_nonce: bytes, boxed: bytes) -> NmsgMeta:
    return decode_nmsg_meta(unpad(open_box(secret, nmsg_nonce, boxed)))
