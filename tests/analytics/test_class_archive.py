"""The archive of Spark's classes: written by the first JVM, used by the next, never half of it."""

import os
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from analytics.class_archive import WRITTEN_AFTER, archive_options

USE, WRITE = " -XX:SharedArchiveFile=", " -XX:ArchiveClassesAtExit="


@pytest.fixture
def java(tmp_path: Path) -> Path:
    program = tmp_path / "java"
    program.touch()
    return program


def options(java: Path, cache: Path) -> tuple[str, Path]:
    """What is done, and with which file."""
    what, _, path = archive_options(java, {"XDG_CACHE_HOME": str(cache)}).partition("=")
    return f"{what}=", Path(path)


def written(draft: Path, content: str, *, seconds_ago: float) -> None:
    draft.write_text(content)
    at = draft.stat().st_mtime - seconds_ago
    os.utime(draft, (at, at))


def test_the_first_writes_and_the_next_use_what_is_complete(java: Path, tmp_path: Path) -> None:
    what, draft = options(java, tmp_path)
    assert what == WRITE
    written(draft, "half", seconds_ago=0)
    assert options(java, tmp_path)[0] == WRITE  # it may still be written
    written(draft, "whole", seconds_ago=2 * WRITTEN_AFTER)
    what, archive = options(java, tmp_path)
    assert (what, archive.read_text()) == (USE, "whole")
    assert not draft.exists()
    other = draft.with_name(f"{draft.name}0")
    written(other, "by another process", seconds_ago=2 * WRITTEN_AFTER)
    assert options(java, tmp_path) == (USE, archive)
    assert not other.exists()
    assert archive.read_text() == "whole"


def test_another_java_has_another_archive(java: Path, tmp_path: Path) -> None:
    before = options(java, tmp_path)[1]
    os.utime(java, (1, 1))
    assert options(java, tmp_path)[1] != before


def test_without_a_place_there_is_none(java: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert archive_options(java, {"XDG_CACHE_HOME": str(tmp_path / "file")}) == ""
    assert archive_options(java, {"XDG_CACHE_HOME": str(tmp_path / "a space")}) == ""


def test_the_session_of_the_tests_writes_none(spark: SparkSession) -> None:
    assert "Archive" not in str(spark.conf.get("spark.driver.extraJavaOptions"))
