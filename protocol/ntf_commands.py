"""NTF commands and responses, one class per wire word, and the table that reads and writes them."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.addresses import SmpQueueNtf, pull_smp_queue_ntf, push_smp_queue_ntf
from protocol.commands import Codec, CredentialRule, Spec
from protocol.crypto import (
    AuthPrivateKey,
    AuthPublicKey,
    X25519PublicKey,
    pull_private_key,
    pull_public_key,
    pull_x25519_public,
    push_key,
)
from protocol.device_token import DeviceToken, pull_device_token, push_device_token
from protocol.encoding import EntityId, Reader, Writer
from protocol.error_codec import decode_error
from protocol.errors import DecodeError, ErrorType
from protocol.statuses import (
    SubStatus,
    TokenStatus,
    pull_sub_status,
    pull_token_status,
    token_status_text,
)
from protocol.versions import NTF_INVALID_REASON


@dataclass(frozen=True, slots=True)
class Tnew:
    device_token: DeviceToken
    auth_key: AuthPublicKey
    dh_key: X25519PublicKey


@dataclass(frozen=True, slots=True)
class Tvfy:
    code: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Tchk:
    pass


@dataclass(frozen=True, slots=True)
class Trpl:
    device_token: DeviceToken


@dataclass(frozen=True, slots=True)
class Tdel:
    pass


MIN_CRON_MINUTES = 20
"Of TCRN: a server refuses less, but for 0, which means never."


@dataclass(frozen=True, slots=True)
class Tcrn:
    minutes: int


@dataclass(frozen=True, slots=True)
class Snew:
    token_id: EntityId = field(repr=False)
    queue: SmpQueueNtf
    notifier_key: AuthPrivateKey = field(repr=False)


@dataclass(frozen=True, slots=True)
class Schk:
    pass


@dataclass(frozen=True, slots=True)
class Sdel:
    pass


@dataclass(frozen=True, slots=True)
class Ping:
    pass


NtfCommand = Tnew | Tvfy | Tchk | Trpl | Tdel | Tcrn | Snew | Schk | Sdel | Ping


@dataclass(frozen=True, slots=True)
class IdTkn:
    token_id: EntityId = field(repr=False)
    dh_key: X25519PublicKey


@dataclass(frozen=True, slots=True)
class IdSub:
    subscription_id: EntityId = field(repr=False)


@dataclass(frozen=True, slots=True)
class Ok:
    pass


@dataclass(frozen=True, slots=True)
class Err:
    error: ErrorType


@dataclass(frozen=True, slots=True)
class Tkn:
    status: TokenStatus


@dataclass(frozen=True, slots=True)
class Sub:
    status: SubStatus


@dataclass(frozen=True, slots=True)
class Pong:
    pass


NtfResponse = IdTkn | IdSub | Ok | Err | Tkn | Sub | Pong


def pull_tnew(r: Reader, version: int) -> Tnew:
    if r.pull_bytes(1) != b"T":
        raise DecodeError
    return Tnew(pull_device_token(r), pull_public_key(r), pull_x25519_public(r))


def push_tnew(w: Writer, command: Tnew, version: int) -> None:
    w.push_bytes(b"T")
    push_device_token(w, command.device_token)
    push_key(w, command.auth_key)
    push_key(w, command.dh_key)


def pull_snew(r: Reader, version: int) -> Snew:
    if r.pull_bytes(1) != b"S":
        raise DecodeError
    return Snew(EntityId(r.pull_short()), pull_smp_queue_ntf(r), pull_private_key(r))


def push_snew(w: Writer, command: Snew, version: int) -> None:
    w.push_bytes(b"S")
    w.push_short(command.token_id)
    push_smp_queue_ntf(w, command.queue)
    push_key(w, command.notifier_key)


def pull_id_tkn(r: Reader, version: int) -> IdTkn:
    return IdTkn(EntityId(r.pull_short()), pull_x25519_public(r))


def push_id_tkn(w: Writer, response: IdTkn, version: int) -> None:
    w.push_short(response.token_id)
    push_key(w, response.dh_key)


def _tkn_text(response: Tkn, version: int) -> bytes:
    return token_status_text(response.status, version >= NTF_INVALID_REASON)


NTF_COMMANDS: Codec[NtfCommand] = Codec(
    {
        b"TNEW": Spec(Tnew, pull_tnew, push_tnew, CredentialRule.KEY),
        b"TVFY": Spec(Tvfy, lambda r, v: Tvfy(r.pull_short()), lambda w, c, v: w.push_short(c.code)),
        b"TCHK": Spec(Tchk),
        b"TRPL": Spec(
            Trpl,
            lambda r, v: Trpl(pull_device_token(r)),
            lambda w, c, v: push_device_token(w, c.device_token),
        ),
        b"TDEL": Spec(Tdel),
        b"TCRN": Spec(Tcrn, lambda r, v: Tcrn(r.pull_word16()), lambda w, c, v: w.push_word16(c.minutes)),
        b"SNEW": Spec(Snew, pull_snew, push_snew, CredentialRule.KEY),
        b"SCHK": Spec(Schk),
        b"SDEL": Spec(Sdel),
        b"PING": Spec(Ping, credentials=CredentialRule.NOTHING),
    }
)

NTF_RESPONSES: Codec[NtfResponse] = Codec(
    {
        b"IDTKN": Spec(IdTkn, pull_id_tkn, push_id_tkn),
        b"IDSUB": Spec(
            IdSub,
            lambda r, v: IdSub(EntityId(r.pull_short())),
            lambda w, m, v: w.push_short(m.subscription_id),
        ),
        b"OK": Spec(Ok),
        b"ERR": Spec(Err, lambda r, v: Err(decode_error(r.pull_tail())), text=lambda m, v: m.error.text),
        b"TKN": Spec(Tkn, lambda r, v: Tkn(pull_token_status(r)), text=_tkn_text),
        b"SUB": Spec(
            Sub, lambda r, v: Sub(pull_sub_status(r)), text=lambda m, v: m.status.text.encode("utf-8")
        ),
        b"PONG": Spec(Pong),
    }
)
