"""Reading and writing what follows `ERR `."""

from __future__ import annotations

from protocol.encoding import Reader
from protocol.errors import AUTH, CMD_NO_ENTITY, HANDSHAKE_ERRORS, DecodeError, ErrorType
from protocol.versions import SMP_BLOCKED_ERROR, SMP_CLIENT_NOTICES

_PLAIN = frozenset(
    b"BLOCK SESSION AUTH SERVICE NO_SERVICE CRYPTO QUOTA EXPIRED NO_MSG LARGE_MSG INTERNAL DUPLICATE_".split()
)
_CMD = frozenset(b"UNKNOWN SYNTAX PROHIBITED NO_AUTH HAS_AUTH NO_ENTITY".split())
_BROKER_PLAIN = frozenset(b"NETWORK TIMEOUT HOST NO_SERVICE".split())
_NETWORK_PLAIN = frozenset(b"UNKNOWNCA FAILED TIMEOUT".split())
_NETWORK_TEXT = frozenset(b"CONNECT TLS SUBSCRIBE".split())
_BLOCKED = (b"reason=spam", b"reason=content")
MAX_PROXY_DEPTH = 4
"PROXY PROTOCOL nests an error in an error; real ones nest once."


_NO_QUEUE = b"CMD NO_QUEUE"
"How old routers say CMD NO_ENTITY."
_NETWORK = b"PROXY BROKER NETWORK"


def decode_error(text: bytes) -> ErrorType:
    """The error in its one present form: old names are replaced, the cause of a network error is dropped."""
    if text == _NO_QUEUE:
        return CMD_NO_ENTITY
    _check_error(text, MAX_PROXY_DEPTH)
    return ErrorType(_NETWORK if text.startswith(_NETWORK) else text)


def encode_smp_error(error: ErrorType, version: int) -> bytes:
    """BLOCKED is AUTH to peers that do not know it, and has no notice for those that do not know that."""
    if not error.text.startswith(b"BLOCKED"):
        return error.text
    if version < SMP_BLOCKED_ERROR:
        return AUTH.text
    return error.text if version >= SMP_CLIENT_NOTICES else error.text.partition(b",")[0]


def _check_error(text: bytes, depth: int) -> None:
    word, space, rest = text.partition(b" ")
    if not space:
        valid = word in _PLAIN
    elif word == b"CMD":
        valid = rest in _CMD
    elif word == b"STORE":
        valid = True
    elif word == b"BLOCKED":
        reason, comma, notice = rest.partition(b",")
        valid = reason in _BLOCKED and (not comma or notice.startswith(b"notice="))
    elif word == b"NAME":
        valid = rest in (b"NO_RESOLVER", b"NOT_FOUND") or rest.startswith(b"RESOLVER ")
    else:
        valid = word == b"PROXY" and _valid_proxy(rest, depth)
    if not valid:
        raise DecodeError


def _valid_proxy(text: bytes, depth: int) -> bool:
    word, _, rest = text.partition(b" ")
    if word == b"PROTOCOL" and depth:
        _check_error(rest, depth - 1)
        return True
    return text in (b"BASIC_AUTH", b"NO_SESSION") or (word == b"BROKER" and _valid_broker(rest))


def _valid_broker(text: bytes) -> bool:
    word, _, rest = text.partition(b" ")
    if word in (b"RESPONSE", b"UNEXPECTED"):
        return _is_short(rest)
    if word == b"TRANSPORT":
        return rest in HANDSHAKE_ERRORS
    if word == b"NETWORK" and rest:
        kind, _, detail = rest.partition(b" ")
        return rest in _NETWORK_PLAIN or (kind in _NETWORK_TEXT and _is_short(detail))
    return text in _BROKER_PLAIN


def _is_short(data: bytes) -> bool:
    r = Reader(data)
    r.pull_short()
    return r.at_end
