"""What is known about a journal since the last run, so that only changes cost anything."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any

from analytics.segments import Segment

VERSION = 2
"Rollups of another version are rebuilt."
MANIFEST_NAME = "manifest.json"
UNKNOWN_DAY = ""


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

    def unchecked(self, found: Iterable[FoundFile]) -> set[FoundFile]:
        """Return files that were never checked, or have changed since."""
        return {file for file in found if file not in self.segments}

    def keep_only(self, found: Iterable[FoundFile]) -> None:
        """Forget files that are gone."""
        self.segments = {file: self.segments[file] for file in found if file in self.segments}

    def changed(self, found: Iterable[FoundFile]) -> dict[str, list[FoundFile]]:
        """Days whose events are in other files than their rollups were made from; all files are checked."""
        by_day: dict[str, list[FoundFile]] = {}
        for file in found:
            for day in self.segments[file].days:
                by_day.setdefault(day, []).append(file)
        return {day: files for day, files in by_day.items() if self.days.get(day) != fingerprint(files)}

    def note(self, made: Mapping[str, Sequence[FoundFile]]) -> None:
        """These days were made from these files."""
        self.days |= {day: fingerprint(files) for day, files in made.items()}

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


def day_of_folder(path: str) -> str:
    """The day that a segment should be of."""
    name = path.partition("/")[0].removeprefix("date=")
    try:
        return date.fromisoformat(name).isoformat()
    except ValueError:
        return UNKNOWN_DAY


def fingerprint(files: Sequence[FoundFile]) -> str:
    """Changes with any of the files."""
    text = json.dumps(sorted([file.path, file.size, file.modified] for file in files))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
