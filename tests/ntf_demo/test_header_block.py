"""Header blocks as the library writes them."""

from __future__ import annotations

import pytest
from hpack import Encoder, HPACKError

from ntf_demo.fake_push.header_block import HeaderDecoder

PUSH = [
    (":method", "POST"),
    (":path", "/3/device/00ff"),
    ("apns-topic", "chat"),
    ("authorization", "j" * 300),
]


@pytest.mark.parametrize("huffman", [True, False])
def test_blocks_of_a_connection_refer_to_each_other(huffman: bool) -> None:
    encoder, decoder = Encoder(), HeaderDecoder()
    sizes = []
    for number in range(200):
        own = ("apns-id", f"{number:036d}")
        block = encoder.encode([*PUSH, own, ("secret", "x", True)], huffman=huffman)
        sizes.append(len(block))
        assert decoder.decode(block) == {**dict(PUSH), "apns-id": own[1], "secret": "x"}
    assert sizes[-1] < sizes[0] / 2


def test_a_table_may_shrink() -> None:
    encoder, decoder = Encoder(), HeaderDecoder()
    decoder.decode(encoder.encode(PUSH))
    encoder.header_table_size = 0
    assert decoder.decode(encoder.encode(PUSH)) == dict(PUSH)


@pytest.mark.parametrize(
    "block",
    [b"\x80", b"\xff\x80", b"\x40\x05ab", b"\x3f\xff\xff\x7f", b"\x40\x01\xff\x01a", b"\xfe"],
    ids=[
        "index 0",
        "no end of a number",
        "no end of a string",
        "too large a table",
        "no text",
        "no such entry",
    ],
)
def test_what_is_no_block_is_refused(block: bytes) -> None:
    with pytest.raises((ValueError, IndexError, HPACKError)):
        HeaderDecoder().decode(block)
