"""Which entries go into a push."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntf_server.push.composing import MAX_ENTRIES, compose
from protocol.addresses import SmpServer
from protocol.encoding import EntityId
from protocol.push_messages import PUSH_PADDING, decode_pn_messages
from store.records import LastNotification, SubKey

ROOM = PUSH_PADDING - 2


def entry(number: int, *, sent: bool = False, host_size: int = 10) -> LastNotification:
    names = "h" * host_size
    hosts = tuple(names[i : i + 200] for i in range(0, host_size, 200))
    server = SmpServer(hosts, "", b"k" * 32)
    notifier_id = EntityId(number.to_bytes(24, "big"))
    return LastNotification(SubKey(number), number, server, notifier_id, 1_700_000_000, b"n" * 24, b"m", sent)


def numbers(entries: Sequence[LastNotification]) -> list[int]:
    return [item.seq for item in entries]


def test_single_unsent_entry() -> None:
    composed = compose([entry(1)], ROOM)
    assert numbers(composed.entries) == numbers(composed.unsent) == [1]
    assert not composed.more
    assert composed.trimmed == 0


def test_oldest_unsent_first_and_the_rest_later() -> None:
    composed = compose([entry(number) for number in range(9)], ROOM)
    assert numbers(composed.entries) == [0, 1, 2, 3, 4, 5]
    assert composed.more


def test_filled_up_with_the_newest_sent_ones_in_order() -> None:
    entries = [entry(number, sent=number not in (2, 8)) for number in range(10)]
    composed = compose(entries, ROOM)
    assert numbers(composed.entries) == [2, 5, 6, 7, 8, 9]
    assert numbers(composed.unsent) == [2, 8]
    assert not composed.more


def test_nothing_unsent_is_no_push_unless_repeating() -> None:
    entries = [entry(1, sent=True), entry(2, sent=True)]
    assert compose(entries, ROOM).entries == ()
    repeated = compose(entries, ROOM, repeat_sent=True)
    assert numbers(repeated.entries) == [1, 2]
    assert repeated.unsent == []
    assert not repeated.more


def test_sent_ones_are_left_out_first() -> None:
    entries = [entry(number, sent=number < 3, host_size=900) for number in range(6)]
    composed = compose(entries, ROOM)
    assert numbers(composed.entries) == [3, 4]
    assert composed.trimmed == 4
    assert composed.more
    assert numbers(compose([*entries[:3], entries[5]], ROOM).entries) == [2, 5]


def test_an_entry_that_fits_nowhere_is_refused_and_blocks_nothing() -> None:
    composed = compose([entry(1, host_size=4000), entry(2)], ROOM)
    assert numbers(composed.refused) == [1]
    assert numbers(composed.entries) == [2]
    assert not composed.more


def test_only_entries_that_fit_nowhere() -> None:
    composed = compose([entry(1, host_size=4000)], ROOM)
    assert numbers(composed.refused) == [1]
    assert composed.entries == ()
    assert not composed.more


@pytest.mark.parametrize("spare", [0, -1])
def test_fits_to_the_byte(spare: int) -> None:
    size = len(compose([entry(1), entry(2)], ROOM).text)
    composed = compose([entry(1), entry(2)], size + spare)
    assert len(composed.entries) == (2 if spare == 0 else 1)
    assert composed.more is (spare < 0)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 4000)), max_size=20))
def test_every_unsent_entry_is_carried_refused_or_left_for_more(shape: list[tuple[bool, int]]) -> None:
    entries = [entry(number, sent=sent, host_size=size) for number, (sent, size) in enumerate(shape)]
    carried: list[int] = []
    for _ in range(len(entries) + 1):
        composed = compose(entries, ROOM)
        assert len(composed.text) <= ROOM
        assert len(composed.entries) <= MAX_ENTRIES
        assert numbers(composed.entries) == sorted(numbers(composed.entries))
        if composed.entries:
            assert len(decode_pn_messages(composed.text)) == len(composed.entries)
        assert composed.unsent or not composed.more
        done = {item.seq for item in (*composed.unsent, *composed.refused)}
        carried += done
        entries = [item._replace(sent=True) if item.seq in done else item for item in entries]
        if not composed.more:
            break
    assert sorted(carried) == [number for number, (sent, _) in enumerate(shape) if not sent]
