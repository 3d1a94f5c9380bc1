"""Keys, crypto_box, hashes and key derivation. Randomness is always an argument."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from struct import Struct

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ed448
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from nacl import _sodium
from nacl import bindings as sodium
from nacl.exceptions import CryptoError

from protocol.encoding import Reader, Writer
from protocol.errors import DecodeError
from protocol.hiding import hides_bytes

_NULL = _sodium.ffi.NULL

TAG_SIZE = 16
KEY_SIZE = 32
ED25519_SIGNATURE_SIZE = 64
ED448_SIGNATURE_SIZE = 114

_ED25519_SPKI = bytes.fromhex("302a300506032b6570032100")
_ED448_SPKI = bytes.fromhex("3043300506032b6571033a00")
_X25519_SPKI = bytes.fromhex("302a300506032b656e032100")
_ED25519_PKCS8 = bytes.fromhex("302e020100300506032b657004220420")
_ED448_PKCS8 = bytes.fromhex("3047020100300506032b6571043b0439")
_X25519_PKCS8 = bytes.fromhex("302e020100300506032b656e04220420")


class BoxError(DecodeError):
    """A box does not open: wrong key, wrong nonce or changed bytes."""


@hides_bytes
@dataclass(frozen=True)
class Ed25519PublicKey:
    raw: bytes

    @property
    def der(self) -> bytes:
        return _ED25519_SPKI + self.raw

    def verify(self, signature: bytes, message: bytes) -> bool:
        # PyNaCl's own function makes three buffers for a copy of the message, which nobody needs.
        signed = signature + message
        return not _sodium.lib.crypto_sign_open(_NULL, _NULL, signed, len(signed), self.raw)


@dataclass(frozen=True)
class Ed25519PrivateKey:
    seed: bytes = field(repr=False)

    @property
    def der(self) -> bytes:
        return _ED25519_PKCS8 + self.seed

    @cached_property
    def _pair(self) -> tuple[bytes, bytes]:
        public, secret = sodium.crypto_sign_seed_keypair(self.seed)
        return public, secret

    @property
    def public(self) -> Ed25519PublicKey:
        return Ed25519PublicKey(self._pair[0])

    def sign(self, message: bytes) -> bytes:
        return sodium.crypto_sign(message, self._pair[1])[:ED25519_SIGNATURE_SIZE]


@hides_bytes
@dataclass(frozen=True)
class Ed448PublicKey:
    raw: bytes

    @property
    def der(self) -> bytes:
        return _ED448_SPKI + self.raw

    @cached_property
    def _key(self) -> ed448.Ed448PublicKey:
        return ed448.Ed448PublicKey.from_public_bytes(self.raw)

    def verify(self, signature: bytes, message: bytes) -> bool:
        try:
            self._key.verify(signature, message)
        except InvalidSignature:
            return False
        return not is_weak(self)  # libsodium refuses such Ed25519 keys by itself, OpenSSL does not


@dataclass(frozen=True)
class Ed448PrivateKey:
    seed: bytes = field(repr=False)

    @property
    def der(self) -> bytes:
        return _ED448_PKCS8 + self.seed

    @cached_property
    def _key(self) -> ed448.Ed448PrivateKey:
        return ed448.Ed448PrivateKey.from_private_bytes(self.seed)

    @property
    def public(self) -> Ed448PublicKey:
        return Ed448PublicKey(self._key.public_key().public_bytes_raw())

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)


@hides_bytes
@dataclass(frozen=True)
class X25519PublicKey:
    raw: bytes

    @property
    def der(self) -> bytes:
        return _X25519_SPKI + self.raw


@dataclass(frozen=True)
class X25519PrivateKey:
    raw: bytes = field(repr=False)

    @property
    def der(self) -> bytes:
        return _X25519_PKCS8 + self.raw

    @property
    def public(self) -> X25519PublicKey:
        return X25519PublicKey(sodium.crypto_scalarmult_base(self.raw))

    def exchange(self, peer: X25519PublicKey) -> bytes:
        """The raw shared secret; a peer key that would make it all zeros is refused."""
        try:
            return sodium.crypto_scalarmult(self.raw, peer.raw)
        except CryptoError:
            raise DecodeError from None


SigningKey = Ed25519PrivateKey | Ed448PrivateKey
VerifyKey = Ed25519PublicKey | Ed448PublicKey
AuthPublicKey = Ed25519PublicKey | Ed448PublicKey | X25519PublicKey
AuthPrivateKey = Ed25519PrivateKey | Ed448PrivateKey | X25519PrivateKey

_PUBLIC_KINDS: Mapping[tuple[bytes, int], type[AuthPublicKey]] = {
    (_ED25519_SPKI, 32): Ed25519PublicKey,
    (_X25519_SPKI, 32): X25519PublicKey,
    (_ED448_SPKI, 57): Ed448PublicKey,
}
_PRIVATE_KINDS: Mapping[tuple[bytes, int], type[AuthPrivateKey]] = {
    (_ED25519_PKCS8, 32): Ed25519PrivateKey,
    (_X25519_PKCS8, 32): X25519PrivateKey,
    (_ED448_PKCS8, 57): Ed448PrivateKey,
}
_SPKI_SIZE, _PKCS8_SIZE = len(_ED25519_SPKI), len(_ED25519_PKCS8)
"What stands before a key, of all kinds."


# Points of small order: signatures and secrets of such a key can be made up by anyone. These are their
# coordinates as numbers; the bit behind a coordinate is a sign, or ignored.
_P25519, _P448 = 2**255 - 19, 2**448 - 2**224 - 1
_ED25519_ORDER_8 = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
_X25519_ORDER_8 = (
    0x00B8495F16056286FDB1329CEB8D09DA6AC49FF1FAE35616AEB8413B7C7AEBE0,
    0x57119FD0DD4E22D8868E1C58C45C44045BEF839C55B1D0B1248C50A3BC959C5F,
)
_WEAK: Mapping[type[AuthPublicKey], tuple[int, frozenset[int]]] = {
    Ed25519PublicKey: (
        255,
        frozenset({0, 1, _P25519 - 1, _P25519, _P25519 + 1, _ED25519_ORDER_8, _P25519 - _ED25519_ORDER_8}),
    ),
    X25519PublicKey: (255, frozenset({0, 1, _P25519 - 1, _P25519, _P25519 + 1, *_X25519_ORDER_8})),
    Ed448PublicKey: (448, frozenset({0, 1, _P448 - 1, _P448, _P448 + 1})),
}


def is_weak(key: AuthPublicKey) -> bool:
    """Whether the key is a point of small order, which nobody made honestly."""
    bits, weak = _WEAK[type(key)]
    return int.from_bytes(key.raw, "little") & ((1 << bits) - 1) in weak


def decode_public_key(der: bytes) -> AuthPublicKey:
    prefix, raw = der[:_SPKI_SIZE], der[_SPKI_SIZE:]
    kind = _PUBLIC_KINDS.get((prefix, len(raw)))
    if kind is None:
        raise DecodeError
    return kind(raw)


def decode_private_key(der: bytes) -> AuthPrivateKey:
    prefix, raw = der[:_PKCS8_SIZE], der[_PKCS8_SIZE:]
    kind = _PRIVATE_KINDS.get((prefix, len(raw)))
    if kind is None:
        raise DecodeError
    return kind(raw)


def decode_x25519_public(der: bytes) -> X25519PublicKey:
    key = decode_public_key(der)
    if not isinstance(key, X25519PublicKey):
        raise DecodeError
    return key


def pull_public_key(r: Reader) -> AuthPublicKey:
    """A peer's key; one of small order is refused here, so that it is never stored."""
    key = decode_public_key(r.pull_short())
    if is_weak(key):
        raise DecodeError
    return key


def pull_x25519_public(r: Reader) -> X25519PublicKey:
    key = decode_x25519_public(r.pull_short())
    if is_weak(key):
        raise DecodeError
    return key


def pull_private_key(r: Reader) -> AuthPrivateKey:
    return decode_private_key(r.pull_short())


def push_key(w: Writer, key: AuthPublicKey | AuthPrivateKey) -> None:
    w.push_short(key.der)


# PyNaCl contains HSalsa20 and does not offer it. Calling it in PyNaCl's own library costs an eighth of taking
# it from a Salsa20 keystream, which stays for builds of PyNaCl that hide it.


def _hsalsa20_in(library: str) -> Callable[[bytes], bytes] | None:
    """HSalsa20 with a zero input from a shared library, if it exports it."""
    try:
        core = ctypes.PyDLL(library).crypto_core_hsalsa20
    except (OSError, AttributeError):
        return None
    core.argtypes = [ctypes.c_char_p] * 4
    output_type, zero_input = ctypes.c_char * KEY_SIZE, bytes(16)

    def hsalsa20(key: bytes) -> bytes:
        if len(key) != KEY_SIZE:
            raise ValueError("HSalsa20 takes keys of 32 bytes")
        output = output_type()
        core(output, zero_input, key, None)
        return output.raw

    return hsalsa20


# HSalsa20 is one Salsa20 core without its final addition: subtract from a keystream block (key, zero nonce,
# counter 0) the input words that it had added.
_SIGMA = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)
_CORE = Struct("<16I")
_OUT = Struct("<8I")
_MASK = 0xFFFFFFFF


def _hsalsa20_from_keystream(key: bytes) -> bytes:
    from Crypto.Cipher import Salsa20  # it takes as long to import as the rest of this module

    w = _CORE.unpack(Salsa20.new(key, bytes(8)).encrypt(bytes(64)))
    diagonal = (w[0], w[5], w[10], w[15])
    head = [(word - sigma) & _MASK for word, sigma in zip(diagonal, _SIGMA, strict=True)]
    # Words 6..9 are nonce and counter: zero here, so nothing was added to them.
    return _OUT.pack(*head, w[6], w[7], w[8], w[9])


_hsalsa20 = _hsalsa20_in(_sodium.__file__) or _hsalsa20_from_keystream


def box(secret: bytes, nonce: bytes, message: bytes) -> bytes:
    """NaCl crypto_box after its DH step: HSalsa20 of the secret keys a secretbox; tag first."""
    return sodium.crypto_secretbox_easy(message, nonce, _hsalsa20(secret))


def open_box(secret: bytes, nonce: bytes, boxed: bytes) -> bytes:
    try:
        return sodium.crypto_secretbox_open_easy(boxed, nonce, _hsalsa20(secret))
    except CryptoError:  # also of what is shorter than a tag
        raise BoxError from None


_SHA512 = hashes.SHA512()


def hkdf_sha512(salt: bytes, key: bytes, info: bytes, size: int) -> bytes:
    return HKDF(_SHA512, size, salt, info).derive(key)


_INNER = bytes(byte ^ 0x36 for byte in range(256))
_OUTER = bytes(byte ^ 0x5C for byte in range(256))
_UNSALTED_INNER = hashlib.sha512(_INNER[:1] * 128)
_UNSALTED_OUTER = hashlib.sha512(_OUTER[:1] * 128)


def hkdf_sha512_pair(key: bytes, info: bytes) -> tuple[bytes, bytes]:
    """The first two 64-byte halves of HKDF with an empty salt, for every SMP block: three HMACs spelled
    out over shared hash states take three quarters of the library's time."""
    inner, outer = _UNSALTED_INNER.copy(), _UNSALTED_OUTER.copy()
    inner.update(key)
    outer.update(inner.digest())
    expand_key = outer.digest().ljust(128, b"\0")
    inner = hashlib.sha512(expand_key.translate(_INNER))
    outer = hashlib.sha512(expand_key.translate(_OUTER))
    first_inner, first_outer = inner.copy(), outer.copy()
    first_inner.update(info + b"\1")
    first_outer.update(first_inner.digest())
    first = first_outer.digest()
    inner.update(first + info + b"\2")
    outer.update(inner.digest())
    return first, outer.digest()


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def sha512(data: bytes) -> bytes:
    return hashlib.sha512(data).digest()
