"""Version ranges and what each version brought; nobody else compares version numbers."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.encoding import Reader, Writer
from protocol.errors import DecodeError

NTF_BATCHING = 2
"Batches, implied session id, X25519 authenticators."
NTF_INVALID_REASON = 3

SMP_SESSION_KEYS = 7
"Router sends certificate chain and session key; the session id is implied."
SMP_PROXY = 8
"Senders' commands may come through a proxy; blocks have room for its encryption."
SMP_SENDER_SECURES = 9
SMP_DELD = 10
SMP_BLOCK_ENCRYPTION = 11
SMP_BLOCKED_ERROR = 12
SMP_PROXY_FLAG = 14
SMP_SHORT_LINKS = 15
SMP_SERVICE_CERTS = 16
SMP_NEW_NOTIFIER = 17
"NEW may carry notifier credentials."
SMP_CLIENT_NOTICES = 18
SMP_RCV_SERVICE = 19
"Counts and hashes in service subscriptions; messaging services."


@dataclass(frozen=True, slots=True)
class VersionRange:
    min: int
    max: int

    def __contains__(self, version: int) -> bool:
        return self.min <= version <= self.max

    def common(self, other: VersionRange) -> int | None:
        """The highest version in both, if any."""
        highest = min(self.max, other.max)
        return highest if highest >= max(self.min, other.min) else None


def pull_version_range(r: Reader) -> VersionRange:
    lowest, highest = r.pull_word16(), r.pull_word16()
    if lowest > highest:
        raise DecodeError
    return VersionRange(lowest, highest)


def push_version_range(w: Writer, versions: VersionRange) -> None:
    w.push_word16(versions.min)
    w.push_word16(versions.max)


NTF_VERSIONS = VersionRange(1, 3)
NTF_LEGACY = VersionRange(1, 1)
SMP_VERSIONS = VersionRange(6, 20)
SMP_LEGACY = VersionRange(6, 6)

NTF_ALPN = b"ntf/1"
SMP_ALPN = b"smp/1"
NTF_BLOCK_SIZE = 512
SMP_BLOCK_SIZE = 16384
