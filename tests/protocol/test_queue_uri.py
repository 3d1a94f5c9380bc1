"""Where queues are, as text and in binary; what others may write differently, and what is no queue at all."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.encoding import EntityId, Reader, Writer, b64
from protocol.errors import DecodeError
from protocol.queue_uri import (
    QueueInfo,
    QueueUri,
    parse_queue_uri,
    pull_queue_info,
    pull_queue_uri,
    push_queue_info,
    push_queue_uri,
)
from protocol.smp_messages import QueueMode
from protocol.versions import VersionRange
from tests.builders import smp_server, x25519
from tests.protocol import strategies as some

KEY = x25519().public
DH = quote(b64(KEY.der).decode(), safe="")
SENDER = EntityId(b"sender id")
SENDER_TEXT = b64(SENDER).decode()
MODES = st.none() | st.sampled_from(QueueMode)
uris = st.builds(
    QueueUri,
    st.sampled_from([VersionRange(a, b) for a in range(1, 5) for b in range(a, 5)]),
    some.smp_servers,
    some.entity_ids.filter(bool),
    some.x25519_keys,
    MODES,
)


def text(query: str, separator: str = "#/?") -> str:
    return f"{smp_server()}/{SENDER_TEXT}{separator}{query}"


@given(uris)
def test_text(queue: QueueUri) -> None:
    assert parse_queue_uri(queue.text()) == queue


@given(uris)
def test_binary(queue: QueueUri) -> None:
    w = Writer()
    push_queue_uri(w, queue)
    r = Reader(w.value() + b"tail")
    read = pull_queue_uri(r)
    assert (read.server, read.sender_id, read.dh_key) == (queue.server, queue.sender_id, queue.dh_key)
    assert read.sender_can_secure is (queue.sender_can_secure and queue.versions.max >= 3)
    assert r.pull_tail() == b"tail"


@given(uris, st.integers(1, 4))
def test_binary_in_one_version(queue: QueueUri, version: int) -> None:
    info = QueueInfo(version, queue.server, queue.sender_id, queue.dh_key, queue.mode)
    w = Writer()
    push_queue_info(w, info)
    read = pull_queue_info(Reader(w.value()))
    assert read.server.hosts == (queue.server.hosts if version >= 2 else queue.server.hosts[:1])
    assert (read.sender_id, read.dh_key, read.version) == (queue.sender_id, queue.dh_key, version)
    assert read.mode is (queue.mode if version >= 4 else QueueMode.MESSAGING if read.mode else None)


@pytest.mark.parametrize(
    ("query", "mode"),
    [
        ("", None),
        ("&k=s", QueueMode.MESSAGING),
        ("&k=m", QueueMode.MESSAGING),
        ("&k=c", QueueMode.CONTACT),
        ("&k=later", None),
        ("&q=m", QueueMode.MESSAGING),
        ("&q=c&k=s", QueueMode.CONTACT),
        ("&q=later&k=s", QueueMode.MESSAGING),
        ("&unknown=1&x&k=s", QueueMode.MESSAGING),
    ],
)
def test_modes(query: str, mode: QueueMode | None) -> None:
    expected = QueueUri(VersionRange(1, 4), smp_server(), SENDER, KEY, mode)
    assert parse_queue_uri(text(f"v=1-4&dh={DH}{query}")) == expected
    assert parse_queue_uri(text(f"v=1-4&dh={DH}{query}", "/#?")) == expected
    assert expected.sender_can_secure is (mode is QueueMode.MESSAGING)


@pytest.mark.parametrize(
    "query",
    [
        "",
        f"v=1-4&dh={DH[:-9]}",
        f"v=4-1&dh={DH}",
        f"v=1-65536&dh={DH}",
        f"v=&dh={DH}",
        f"v=1-&dh={DH}",
        f"v=%C2%B2&dh={DH}",
        f"v=123456&dh={DH}",
        f"v=1&dh={DH}&srv=bad%20host",
        "v=1-4",
        "&".join(["v=1-4", f"dh={DH}", *["x=1"] * 40]),
    ],
)
def test_no_queue(query: str) -> None:
    with pytest.raises(DecodeError):
        parse_queue_uri(text(query))


@pytest.mark.parametrize("other", ["", "smp://x", str(smp_server()), f"{smp_server()}#/?v=1&dh={DH}"])
def test_no_address(other: str) -> None:
    with pytest.raises(DecodeError):
        parse_queue_uri(other)
