"""Padding, batches and the block encryption of SMP sessions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from protocol.crypto import KEY_SIZE, TAG_SIZE, box, hkdf_sha512, hkdf_sha512_pair, open_box
from protocol.encoding import NONCE_SIZE, large
from protocol.errors import DecodeError, TooLarge

PAD_LENGTH_SIZE = 2
BATCH_RESERVE = PAD_LENGTH_SIZE + 1 + TAG_SIZE
"Pad length, count, tag of block encryption; reserved even when blocks are not encrypted."
MAX_BATCH = 255


def pad(message: bytes, size: int) -> bytes:
    room = size - PAD_LENGTH_SIZE - len(message)
    if room < 0:
        raise TooLarge
    return b"".join((len(message).to_bytes(PAD_LENGTH_SIZE, "big"), message, b"#" * room))


def unpad(padded: bytes) -> bytes:
    end = int.from_bytes(padded[:PAD_LENGTH_SIZE], "big") + PAD_LENGTH_SIZE
    if end > len(padded):
        raise DecodeError
    return padded[PAD_LENGTH_SIZE:end]


def pack_batches(transmissions: Iterable[bytes], block_size: int) -> list[bytes]:
    """Contents of as few blocks as keep the order. One transmission may fill a block to the brim."""
    room = block_size - BATCH_RESERVE
    contents: list[bytes] = []
    batch: list[bytes] = []
    used = 0
    for transmission in transmissions:
        item = large(transmission)
        if len(item) + 1 > block_size - PAD_LENGTH_SIZE:
            raise TooLarge
        if batch and (used + len(item) > room or len(batch) == MAX_BATCH):
            contents.append(_join(batch))
            batch, used = [], 0
        batch.append(item)
        used += len(item)
    if batch:
        contents.append(_join(batch))
    return contents


def _join(batch: Sequence[bytes]) -> bytes:
    return bytes((len(batch),)) + b"".join(batch)


def split_batch(content: bytes) -> list[bytes]:
    """The transmissions of a block; a count that does not match the bytes is an error of the whole block."""
    if not content or not content[0]:
        raise DecodeError
    items: list[bytes] = []
    start = 1
    for _ in range(content[0]):
        item = start + 2
        start = item + int.from_bytes(content[start:item], "big")
        items.append(content[item:start])
    if start != len(content):  # also if an item ends beyond it: those that follow begin there
        raise DecodeError
    return items


class BlockChain:
    """One direction of an encrypted session: each block has its own key, derived from the last."""

    __slots__ = ("_chain_key",)

    def __init__(self, chain_key: bytes) -> None:
        self._chain_key = chain_key

    def _next(self) -> tuple[bytes, bytes]:
        keys, more = hkdf_sha512_pair(self._chain_key, b"SimpleXSbChain")
        self._chain_key = keys[:KEY_SIZE]
        return keys[KEY_SIZE:], more[:NONCE_SIZE]

    def encrypt(self, content: bytes, block_size: int) -> bytes:
        padded = pad(content, block_size - TAG_SIZE)
        key, nonce = self._next()
        return box(key, nonce, padded)

    def decrypt(self, block: bytes) -> bytes:
        key, nonce = self._next()
        return unpad(open_box(key, nonce, block))


def session_chains(session_id: bytes, shared: bytes) -> tuple[BlockChain, BlockChain]:
    """(router's sending chain, client's sending chain)."""
    keys = hkdf_sha512(session_id, shared, b"SimpleXSbChainInit", 64)
    return BlockChain(keys[:KEY_SIZE]), BlockChain(keys[KEY_SIZE:])
