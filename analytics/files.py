"""Folders of journals, rollups and results: on this machine, or on any file system that Hadoop knows."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Protocol
from urllib.parse import unquote, urlparse

from analytics.errors import JournalNotFoundError
from analytics.manifest import FoundFile

ROLLUPS_FOLDER = "_rollups"
"Within a journal, whose readers pass over names with an underscore."
SEGMENT_SUFFIXES = (".parquet", ".jsonl")
OWNER_ONLY = 0o600
LOCK_NAME = ".lock"


class Folder(Protocol):
    """One folder and what is in it; names are relative to it, `url` is the address for Spark."""

    path: str
    url: str

    def segments(self) -> list[FoundFile]:
        """Closed segments below; names that begin with a dot or an underscore are no part of a journal."""

    def names(self, name: str) -> list[str]:
        """What is directly in a folder, if that is there; without hidden names."""

    def read_text(self, name: str) -> str | None:
        """A file's content; None if there is none."""

    def write(self, name: str, content: str | bytes) -> None:
        """Replace a file as a whole."""

    def remove(self, name: str) -> None:
        """Remove a file or a folder, if it is there."""

    def remove_left(self, beginning: str) -> None:
        """Remove folders whose names begin so: killed processes left them. Nothing where others may write."""

    def rename(self, name: str, to: str) -> None:
        """Move a file within the folder, in the place of another."""

    def reserved(self) -> contextlib.AbstractContextManager[None]:
        """For one process at a time, where the file system can do that; others wait."""


def is_local(path: str) -> bool:
    """Whether a path needs no Hadoop."""
    return urlparse(path).scheme in ("", "file")


def local_path(path: str) -> Path:
    """A local path, given plainly or as a file URL."""
    return Path(unquote(urlparse(path).path)) if path.startswith("file:") else Path(path)


def bytes_of(journal: str, rollups: str | None) -> int | None:
    """The size of a journal's segments and rollups; None if they are not on this machine."""
    if not is_local(journal) or not is_local(rollups or ""):
        return None
    folders = [local_path(path) for path in (journal, rollups) if path]
    return sum(
        path.stat().st_size
        for folder in folders
        for path in folder.rglob("*")
        if path.suffix in SEGMENT_SUFFIXES
    )


def is_within(path: str, journal: str) -> bool:
    """Whether readers of a journal would take what is written to a folder for segments."""
    if is_local(path) is not is_local(journal):
        return False
    plain = is_local(path)
    inner, outer = (local_path(each).resolve() if plain else PurePosixPath(each) for each in (path, journal))
    return inner.is_relative_to(outer) and not is_hidden(inner.relative_to(outer).parts)


class LocalFolder:
    """A folder of this machine."""

    def __init__(self, path: str) -> None:
        self._root = local_path(path).absolute()
        self.path = str(self._root)
        self.url = f"file:{self.path}"

    def segments(self) -> list[FoundFile]:
        if not self._root.is_dir():
            raise JournalNotFoundError(f"no such folder: {self._root}")
        return sorted(self._found(), key=lambda file: file.path)

    def _found(self) -> Iterator[FoundFile]:
        for path in self._root.rglob("*"):
            relative = path.relative_to(self._root)
            if path.suffix in SEGMENT_SUFFIXES and not is_hidden(relative.parts):
                with contextlib.suppress(FileNotFoundError):  # retention may run at the same time
                    state = path.stat()
                    yield FoundFile(relative.as_posix(), state.st_size, state.st_mtime_ns)

    def names(self, name: str) -> list[str]:
        folder = self._root / name
        found = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        return sorted(name for name in found if not is_hidden((name,)))

    def read_text(self, name: str) -> str | None:
        try:
            return (self._root / name).read_text("utf-8")
        except FileNotFoundError:
            return None

    def write(self, name: str, content: str | bytes) -> None:
        target = self._root / name
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.draft")
        draft.touch(OWNER_ONLY)
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        draft.rename(target)

    def remove(self, name: str) -> None:
        path = self._root / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def remove_left(self, beginning: str) -> None:
        for path in self._root.glob(f"{beginning}*"):
            shutil.rmtree(path)

    def rename(self, name: str, to: str) -> None:
        (self._root / name).replace(self._root / to)

    @contextlib.contextmanager
    def reserved(self) -> Iterator[None]:
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self._root / LOCK_NAME, os.O_RDONLY | os.O_CREAT, OWNER_ONLY)
        except OSError:  # whoever may only read disturbs nobody; whoever must write will be told
            yield
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


class HadoopFolder:
    """A folder of any file system that Spark's Hadoop libraries can reach."""

    def __init__(self, context: Any, path: str) -> None:
        self.path = self.url = path.rstrip("/")
        self._jvm = context._jvm
        self._conf = context._jsc.hadoopConfiguration()
        self._files = self._at("").getFileSystem(self._conf)

    def _at(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(f"{self.path}/{name}" if name else self.path)

    def segments(self) -> list[FoundFile]:
        root = self._at("")
        if not self._files.exists(root):
            raise JournalNotFoundError(f"no such folder: {self.path}")
        prefix = self._files.makeQualified(root).toUri().getPath().rstrip("/") + "/"
        found = []
        listing = self._files.listFiles(root, True)
        while listing.hasNext():
            status = listing.next()
            relative = status.getPath().toUri().getPath().removeprefix(prefix)
            if relative.endswith(SEGMENT_SUFFIXES) and not is_hidden(tuple(relative.split("/"))):
                found.append(FoundFile(relative, status.getLen(), status.getModificationTime()))
        return sorted(found, key=lambda file: file.path)

    def read_text(self, name: str) -> str | None:
        if not self._files.exists(self._at(name)):
            return None
        stream = self._files.open(self._at(name))
        try:
            return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream)).decode("utf-8")
        finally:
            stream.close()

    def write(self, name: str, content: str | bytes) -> None:
        with tempfile.NamedTemporaryFile(prefix="ntf-analytics-") as draft:
            draft.write(content.encode() if isinstance(content, str) else content)
            draft.flush()
            local = self._jvm.org.apache.hadoop.fs.Path(f"file:{draft.name}")
            self._files.copyFromLocalFile(False, True, local, self._at(name))

    def names(self, name: str) -> list[str]:
        folder = self._at(name)
        found = self._files.listStatus(folder) if self._files.exists(folder) else []
        names = [status.getPath().getName() for status in found]
        return sorted(name for name in names if not is_hidden((name,)))

    def remove(self, name: str) -> None:
        self._files.delete(self._at(name), True)

    def remove_left(self, beginning: str) -> None:
        """Processes do not take turns here: see `reserved`."""

    def rename(self, name: str, to: str) -> None:
        self.remove(to)
        self._files.rename(self._at(name), self._at(to))

    def reserved(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def is_hidden(parts: tuple[str, ...]) -> bool:
    """Names that readers of a journal pass over: open segments, drafts, rollups."""
    return any(part.startswith((".", "_")) for part in parts)
