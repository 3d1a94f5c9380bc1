"""Metrics file, journal and log that cannot be written any more: the operator's loss, nobody else's."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import pytest

from tests.drills.misfortunes import needs_root, small_disk
from tests.drills.world import World, world

SECONDS = 3.0
OFTEN = "1"
"Seconds between two writings of the metrics: the fewest that may be set."
SMALLEST_PIPE = 4096
BROKEN_AFTER = 0.5
TO_FIFO = ("sh", "-c", 'fifo=$1; shift; exec "$@" 2>"$fifo"', "sh")


def metrics_to(file: Path) -> dict[str, str]:
    return {"NTF_METRICS_FILE": str(file), "NTF_METRICS_FILE_INTERVAL": OFTEN}


JOURNAL = {"NTF_JOURNAL_ENABLED": "on", "NTF_JOURNAL_SEGMENT_SECONDS": "1"}


async def serve_while(
    folder: Path,
    name: str,
    harm: Callable[[World], object],
    env: Mapping[str, str],
    wrapper: Sequence[str] = (),
) -> None:
    async def later() -> None:
        await asyncio.sleep(BROKEN_AFTER)
        harm(drill)

    async with world(folder, seconds=SECONDS, env=env, wrapper=wrapper) as drill:
        service = await drill.measure(SECONDS, beside=later())
    print(service.row(name))
    service.check()


async def test_the_folder_of_the_metrics_file_vanishes(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics" / "ntf.prom"
    metrics.parent.mkdir()
    await serve_while(
        tmp_path, "the metrics' folder is gone", lambda _: shutil.rmtree(metrics.parent), metrics_to(metrics)
    )
    assert not metrics.parent.exists()


async def test_the_journal_vanishes(tmp_path: Path) -> None:
    """Its folder is removed, and then a file is in its place."""
    journal = tmp_path / "d" / "journal"

    def replace(_: World) -> None:
        shutil.rmtree(journal)
        journal.write_text("no folder")

    await serve_while(tmp_path, "the journal's folder is gone", replace, JOURNAL)


@needs_root
async def test_the_disk_of_metrics_and_journal_is_full(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:

        def fill_disk(_: World) -> None:
            with (disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
                while True:
                    file.write(bytes(4096))

        (tmp_path / "d").mkdir()
        (disk / "journal").mkdir()
        (tmp_path / "d" / "journal").symlink_to(disk / "journal")
        env = metrics_to(disk / "ntf.prom") | JOURNAL
        await serve_while(tmp_path, "the disk of metrics and journal is full", fill_disk, env)


@contextmanager
def unread_pipe(fifo: Path) -> Iterator[BinaryIO]:
    os.mkfifo(fifo)
    with os.fdopen(os.open(fifo, os.O_RDONLY | os.O_NONBLOCK), "rb") as reading:
        fcntl.fcntl(reading, fcntl.F_SETPIPE_SZ, SMALLEST_PIPE)
        yield reading


def fill(fifo: Path) -> None:
    writing = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, b" ")
    os.close(writing)


@pytest.mark.parametrize("is_closed", [False, True], ids=["nobody reads it", "its reader is gone"])
async def test_the_log_is_a_pipe(tmp_path: Path, *, is_closed: bool) -> None:
    fifo = tmp_path / "fifo"
    with unread_pipe(fifo) as reading:

        def harm(drill: World) -> None:
            reading.close() if is_closed else fill(fifo)
            drill.router.faults.drop_connections()  # worth a line

        name = "the log's reader is gone" if is_closed else "nobody reads the log"
        await serve_while(tmp_path, name, harm, {}, (*TO_FIFO, str(fifo)))
