"""Finding Java, and saying what to do without it."""

from pathlib import Path

import pytest

from analytics.errors import AnalyticsError
from analytics.java import find_java


def fake_java(folder: Path, script: str) -> Path:
    command = folder / "bin" / "java"
    command.parent.mkdir(parents=True)
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    return command


def test_java_home_comes_first(tmp_path: Path) -> None:
    wanted = fake_java(tmp_path / "home", """echo 'openjdk version "21.0.2" 2024-01-16' >&2""")
    other = fake_java(tmp_path / "path", """echo 'openjdk version "17.0.1"' >&2""")
    assert find_java({"JAVA_HOME": str(tmp_path / "home"), "PATH": str(other.parent)}) == wanted


def test_java_on_the_path(tmp_path: Path) -> None:
    command = fake_java(tmp_path, """echo 'openjdk version "17.0.15" 2025-04-15' >&2""")
    assert find_java({"PATH": str(command.parent)}) == command


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        ("""echo 'java version "1.8.0_402"' >&2""", "is Java 8"),
        ("""echo 'openjdk version "11.0.2"' >&2""", "is Java 11"),
        ("exit 1", "does not work"),
        ("echo nothing", "does not work"),
    ],
)
def test_unusable_java(tmp_path: Path, script: str, complaint: str) -> None:
    command = fake_java(tmp_path, script)
    with pytest.raises(AnalyticsError, match="apt-get install openjdk-17-jre-headless") as caught:
        find_java({"PATH": str(command.parent)})
    assert complaint in str(caught.value)


def test_no_java(tmp_path: Path) -> None:
    with pytest.raises(AnalyticsError, match="apt-get install openjdk-17-jre-headless"):
        find_java({"PATH": str(tmp_path)})
    with pytest.raises(AnalyticsError, match="JAVA_HOME is"):
        find_java({"JAVA_HOME": str(tmp_path)})
