"""Which last notifications go into one push. Pure: entries in, bytes and a plan for the rest out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from protocol.addresses import SmpQueueNtf
from protocol.push_messages import PnMessage
from store.records import LastNotification, SubKey

MAX_ENTRIES = 6
"Entries of one push."
_SEPARATOR = b";"


class Composed(NamedTuple):
    """`text` carries `entries`, oldest first; both are empty if there is nothing to push. Do not print."""

    text: bytes
    entries: Sequence[LastNotification]
    unsent: Sequence[LastNotification]
    "Those of `entries` that no accepted push carried yet."
    trimmed: int = 0
    "Entries that would have belonged here but did not fit; unsent ones of them go into the next push."
    refused: Sequence[LastNotification] = ()
    "Unsent entries that fit in no push at all."
    more: bool = False
    "Unsent entries are left for another push."


def compose(entries: Sequence[LastNotification], room: int, *, repeat_sent: bool = False) -> Composed:
    """The next push of a token, from its entries in the order they came, in at most `room` bytes.

    Unsent entries first, the oldest of them first; the newest ones already sent fill up what is left.
    Without unsent entries there is nothing to push, unless `repeat_sent`.
    """
    texts: dict[SubKey, bytes] = {}
    waiting = [entry for entry in entries if not entry.sent]
    wanted, refused = _first_fitting(waiting, MAX_ENTRIES, room, texts)
    if not wanted and not repeat_sent:
        return Composed(b"", (), (), refused=refused)
    filled = False
    if len(wanted) < MAX_ENTRIES and len(waiting) < len(entries):
        newest_sent = [entry for entry in reversed(entries) if entry.sent]
        wanted += _first_fitting(newest_sent, MAX_ENTRIES - len(wanted), room, texts)[0]
        filled = True
    chosen = _fit(wanted, room, texts)
    unsent = chosen
    if filled:
        unsent = [entry for entry in chosen if not entry.sent]
        chosen.sort(key=_seq)
    return Composed(
        _SEPARATOR.join([texts[entry.sub_key] for entry in chosen]),
        chosen,
        unsent,
        len(wanted) - len(chosen),
        refused,
        len(unsent) + len(refused) < len(waiting),
    )


def _first_fitting(
    entries: Sequence[LastNotification], limit: int, room: int, texts: dict[SubKey, bytes]
) -> tuple[list[LastNotification], list[LastNotification]]:
    """The first entries that fit into a push, up to `limit`, and those before them that do not."""
    fitting: list[LastNotification] = []
    refused: list[LastNotification] = []
    for entry in entries:
        if len(fitting) == limit:
            break
        text = texts[entry.sub_key] = _encode(entry)
        (fitting if len(text) <= room else refused).append(entry)
    return fitting, refused


def _fit(by_worth: list[LastNotification], room: int, texts: dict[SubKey, bytes]) -> list[LastNotification]:
    """As many as fit together, the worthiest first."""
    left = room + len(_SEPARATOR)
    for number, entry in enumerate(by_worth):
        left -= len(texts[entry.sub_key]) + len(_SEPARATOR)
        if left < 0:
            return by_worth[:number]
    return by_worth[:]


def _encode(entry: LastNotification) -> bytes:
    queue = SmpQueueNtf(entry.server, entry.notifier_id)
    return PnMessage(queue, entry.received_at, entry.nonce, entry.meta).encode()


def _seq(entry: LastNotification) -> int:
    return entry.seq
