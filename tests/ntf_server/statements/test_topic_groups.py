"""Topics over subscriptions: all watched, none twice, few made anew."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ntf_server.statements.topic_groups import MAX_GROUP, TopicGroups


def topics(*numbers: int) -> set[bytes]:
    return {number.to_bytes(32, "big") for number in numbers}


def check(groups: TopicGroups, wanted: set[bytes], size: int) -> None:
    assert groups.topics == wanted
    assert len(groups) == len(wanted)  # no topic twice
    assert all(0 < len(group) <= size for group in groups.groups)
    assert sum(len(group) * 2 < size for group in groups.groups) <= 1


def test_ten_thousand_topics() -> None:
    groups = TopicGroups()
    wanted = topics(*range(10_000))
    changes = groups.set(wanted)
    check(groups, wanted, MAX_GROUP)
    assert len(changes.started) == -(-10_000 // MAX_GROUP)
    assert not changes.ended


def test_one_more_topic_changes_one_group() -> None:
    groups = TopicGroups()
    groups.set(topics(*range(10_000)))
    changes = groups.set(topics(*range(10_001)))
    assert len(changes.started) == 1
    assert len(changes.ended) == 1


def test_one_topic_less_changes_one_group() -> None:
    groups = TopicGroups()
    groups.set(topics(*range(10_000)))
    changes = groups.set(topics(*range(1, 10_000)))
    assert (len(changes.started), len(changes.ended)) == (1, 1)


def test_the_same_changes_nothing() -> None:
    groups = TopicGroups()
    groups.set(topics(1, 2, 3))
    changes = groups.set(topics(3, 2, 1))
    assert not changes.started
    assert not changes.ended


def test_nothing_ends_everything() -> None:
    groups = TopicGroups()
    groups.set(topics(1, 2, 3))
    changes = groups.set(())
    assert changes.ended == [frozenset(topics(1, 2, 3))]
    assert not groups.groups


@given(st.lists(st.sets(st.integers(0, 60)), max_size=12))
def test_any_sequence(rounds: list[set[int]]) -> None:
    size = 8
    groups = TopicGroups(size)
    watched: set[frozenset[bytes]] = set()
    for numbers in rounds:
        wanted = topics(*numbers)
        changes = groups.set(wanted)
        watched |= set(changes.started)
        assert wanted <= frozenset().union(*watched)
        watched -= set(changes.ended)
        assert watched == groups.groups
        check(groups, wanted, size)
