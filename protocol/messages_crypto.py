"""The body of MSG: what a sender's message becomes on its way from the router to the recipient."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.blocks import pad, unpad
from protocol.crypto import box, open_box
from protocol.encoding import Reader, Writer, nonce
from protocol.versions import SMP_BLOCK_ENCRYPTION, SMP_PROXY

MAX_MESSAGE_ENCRYPTED_BLOCKS = 16048
MAX_MESSAGE_PROXY = 16064
MAX_MESSAGE_FIRST = 16088
RECEIVED_HEADER = 16
"In front of the sent body: 8 bytes of timestamp, and 8 for flags and the space (one flag exists so far)."
PADDED_SIZE = 2 + MAX_MESSAGE_FIRST + RECEIVED_HEADER
"One size for all versions: the sender's may be older than the recipient's, and sizes must tell nothing."

_QUOTA = b"QUOTA "


def max_message_length(version: int) -> int:
    """The longest body that SEND may have in a session of this version."""
    if version >= SMP_BLOCK_ENCRYPTION:
        return MAX_MESSAGE_ENCRYPTED_BLOCKS
    return MAX_MESSAGE_PROXY if version >= SMP_PROXY else MAX_MESSAGE_FIRST


@dataclass(frozen=True, slots=True)
class RcvMessage:
    """A message as its recipient gets it. `timestamp` is when the router received it."""

    timestamp: int
    notification: bool
    body: bytes = field(repr=False)

    def encode(self) -> bytes:
        w = Writer()
        w.push_int64(self.timestamp)
        w.push_bytes(b"T " if self.notification else b"F ")
        w.push_bytes(self.body)
        return w.value()


@dataclass(frozen=True, slots=True)
class QuotaExceeded:
    """Comes after the last message of a queue that was full: the sender may go on once it is acknowledged."""

    timestamp: int

    def encode(self) -> bytes:
        w = Writer(_QUOTA)
        w.push_int64(self.timestamp)
        return w.value()


def decode_message(data: bytes) -> RcvMessage | QuotaExceeded:
    r = Reader(data)
    if data.startswith(_QUOTA):
        r.pull_bytes(len(_QUOTA))
        marker = QuotaExceeded(r.pull_int64())
        r.check_end()
        return marker
    timestamp, notification = r.pull_int64(), r.pull_bool()
    r.pull_word()  # later versions may add flags before the space
    return RcvMessage(timestamp, notification, r.pull_tail())


def seal_message(secret: bytes, message_id: bytes, message: RcvMessage | QuotaExceeded) -> bytes:
    """The body of MSG: the message id is also the nonce."""
    return box(secret, nonce(message_id), pad(message.encode(), PADDED_SIZE))


def open_message(secret: bytes, message_id: bytes, boxed: bytes) -> RcvMessage | QuotaExceeded:
    """Its twin for recipients. Any padded size is accepted; DecodeError for what does not open or parse."""
    return decode_message(unpad(open_box(secret, nonce(message_id), boxed)))
