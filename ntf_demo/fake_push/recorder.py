"""What the fake push service was asked to push."""

from __future__ import annotations

import json
from collections import Counter, deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO


@dataclass(frozen=True, slots=True)
class RecordedPush:
    """One request that was processed, with the answer it got (or would have got)."""

    api: str
    token: str
    push_id: str
    status: int
    headers: dict[str, str]
    body: str
    "JSON text; for Web Push the encrypted body in base64url."
    connection: int
    received: float


class Recorder:
    """Keeps the newest pushes in memory and, if a file is given, all of them as JSON lines."""

    def __init__(self, limit: int, path: Path | None) -> None:
        self.pushes: deque[RecordedPush] = deque(maxlen=limit)
        self.statuses: Counter[tuple[str, int]] = Counter()
        self.wants_bodies = limit > 0 or path is not None
        "Whether records are kept at all, or only counted."
        self._file: TextIO | None = None if path is None else path.open("a", buffering=1)

    def count(self, api: str, status: int) -> None:
        """Note that a push was processed."""
        self.statuses[api, status] += 1

    def add(self, push: RecordedPush) -> None:
        """Keep a push."""
        self.pushes.append(push)
        if self._file is not None:
            self._file.write(json.dumps(asdict(push)) + "\n")

    @property
    def accepted(self) -> int:
        """Pushes answered (or meant to be answered) with a 2xx status."""
        return sum(n for (_, status), n in self.statuses.items() if 200 <= status < 300)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
