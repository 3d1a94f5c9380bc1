"""Finding a Java that Spark can run on."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from analytics.errors import AnalyticsError

OLDEST_JAVA = 17
ADVICE = (
    "Spark needs Java 17 or newer. On Debian or Ubuntu: apt-get install openjdk-17-jre-headless "
    "(or set JAVA_HOME to an installed one)."
)
VERSION_TIMEOUT = 30.0


def find_java(environment: Mapping[str, str] = os.environ) -> Path:
    """The java command: of JAVA_HOME if set, else of the PATH; its version is checked."""
    home = environment.get("JAVA_HOME")
    command = str(Path(home) / "bin" / "java") if home else shutil.which("java", path=environment.get("PATH"))
    if command is None:
        raise AnalyticsError(f"No java command was found. {ADVICE}")
    version = java_version(command)
    if version is None:
        where = f"JAVA_HOME is {home}, but" if home else "The java command at"
        raise AnalyticsError(f"{where} {command} does not work. {ADVICE}")
    if version < OLDEST_JAVA:
        raise AnalyticsError(f"{command} is Java {version}. {ADVICE}")
    return Path(command)


def java_version(command: str) -> int | None:
    """The major version that a java command tells, or None if it cannot be run."""
    try:
        run = subprocess.run(
            [command, "-version"], capture_output=True, text=True, timeout=VERSION_TIMEOUT, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', run.stderr + run.stdout)
    return int(found[1]) if found else None
