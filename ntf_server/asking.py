"""How commands talk to whoever runs them."""

from __future__ import annotations

import time

PROGRESS_INTERVAL = 2.0
"Seconds between two lines about the same work."


def confirmed(question: str) -> bool:
    try:
        return input(f"{question} Type yes: ").strip() == "yes"
    except EOFError:
        return False


class ProgressLines:
    """Says how far long work is, now and then and at its end."""

    def __init__(self) -> None:
        self._what = ""
        self._said_at = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done < total and what == self._what and now - self._said_at < PROGRESS_INTERVAL:
            return
        self._what, self._said_at = what, now
        print(f"{what}: {done} of {total} ({100 * done // max(total, 1)} %)", flush=True)
