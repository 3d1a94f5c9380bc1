"""The page of mistakes: each is made, and what it is answered with is written down."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from tests.ntf_server.test_cli import init
from tests.ntf_server.test_mistakes import MISTAKES, Place, copy_of, line_of

HEAD = """# Mistakes

What operators get wrong, and the line that `ntf-server` answers each of these mistakes with. The exit code
is 2. `ntf-server doctor` finds what is wrong with configuration, files and ports before a start. A test makes
all of these mistakes and compares this page with the answers.

| mistake | answer |
|---|---|
"""


def page() -> str:
    with tempfile.TemporaryDirectory() as folder:
        made, rows = Path(folder, "made"), []
        assert init(made).returncode == 0
        for number, mistake in enumerate(MISTAKES):
            with copy_of(made, Path(folder, str(number))) as place:
                line = _for_everybody(line_of(place, mistake), place)
                rows.append(f"| {mistake.what} | `` {line} `` |\n")
    return HEAD + "".join(rows)


def _for_everybody(line: str, place: Place) -> str:
    """Without what differs from run to run: folders, free ports, lines of the file."""
    line = line.replace(str(place.config_dir), "/etc/ntf-server").replace(
        str(place.data_dir), "/var/lib/ntf-server"
    )
    line = line.replace(str(place.folder), "/somewhere")
    line = re.sub(r"port \d+ is in use", "port 443 is in use", line)
    line = re.sub(r"(\.ini:|in line )\d+", r"\g<1>42", line)
    line = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", "2030-01-01 00:00 UTC", line)
    line = re.sub(r" \(choose from .*\)", "", line)  # Python's own, and each Python's another
    return line.replace("|", "\\|")
