"""An archive of the classes that Spark loads: a JVM that has one starts in half the time."""

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import pyspark

FOLDER = "ntf-analytics"
WRITTEN_AFTER = 60.0
"Seconds: a JVM that ends writes an archive within a few."


def archive_options(java: Path, environment: Mapping[str, str] = os.environ) -> str:
    """JVM options: to use the archive of this Java and this Spark in the user's cache, or to write it.

    The first JVM writes it when it ends; one that does not fit is ignored. Empty if there is no cache.
    """
    folder = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / FOLDER
    program = java.resolve()
    versions = f"{program} {program.stat().st_mtime_ns} {pyspark.__file__} {pyspark.__version__}"
    path = folder / f"{hashlib.blake2b(versions.encode(), digest_size=8).hexdigest()}.jsa"
    if " " in str(path):  # Spark splits options at spaces
        return ""
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        adopt(path)
        if path.is_file():
            return f" -XX:SharedArchiveFile={path}"
        if os.access(folder, os.W_OK):
            return f" -XX:ArchiveClassesAtExit={path.with_name(f'.{path.name}.{os.getpid()}')}"
    return ""


def adopt(path: Path) -> None:
    """Take what a JVM has written for the archive, and remove what others wrote at the same time."""
    for draft in path.parent.glob(f".{path.name}.*"):
        if datetime.now(UTC).timestamp() - draft.stat().st_mtime < WRITTEN_AFTER:
            continue
        if path.is_file():
            draft.unlink(missing_ok=True)
        else:
            draft.replace(path)
