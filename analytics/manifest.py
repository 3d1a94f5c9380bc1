"""What is known about a journal since the last run, so that only changes cost anything."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from analytics.segments import Segment

VERSION = 1
"Rollups of another version are made anew."
MANIFEST_NAME = "manifest.json"


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A segment as a file system lists it; a change of its content changes one of these."""

    path: str
    size: int
    modified: int


@dataclass
class Manifest:
    """Checked segments by file, and which files each day's rollup was made from."""

    segments: dict[FoundFile, Segment] = field(default_factory=dict)
    days: dict[str, str] = field(default_factory=dict)

    def unchecked(self, found: Iterable[FoundFile]) -> list[FoundFile]:
        """Files that were never looked at, or have changed since."""
        return [file for file in found if file not in self.segments]

    def keep_only(self, found: Iterable[FoundFile]) -> None:
        """Forget files that are gone."""
        self.segments = {file: self.segments[file] for file in found}

    def fingerprints(self) -> dict[str, str]:
        """For each day that has a readable segment: what its rollup would be made from."""
        by_day: dict[str, list[FoundFile]] = {}
        for file, segment in self.segments.items():
            for day in segment.days:
                by_day.setdefault(day, []).append(file)
        return {day: fingerprint(files) for day, files in by_day.items()}

    def to_json(self) -> str:
        segments = [
            [file.path, file.size, file.modified, *segment.to_list()]
            for file, segment in self.segments.items()
        ]
        return json.dumps({"version": VERSION, "days": self.days, "segments": segments})

    @classmethod
    def from_json(cls, text: str | None) -> "Manifest":
        """An unreadable manifest is as good as none: everything is looked at again."""
        try:
            content: dict[str, Any] = json.loads(text or "{}")
            if content.get("version") != VERSION:
                return cls()
            segments = {
                FoundFile(path, size, modified): Segment.from_list(path, known)
                for path, size, modified, *known in content["segments"]
            }
            return cls(segments, dict(content["days"]))
        except (ValueError, KeyError, TypeError, AttributeError):
            return cls()


def fingerprint(files: Sequence[FoundFile]) -> str:
    """Changes with any of the files."""
    text = json.dumps(sorted([file.path, file.size, file.modified] for file in files))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
