"""`python -m tests.opened_files LOG MODULE ARGUMENTS…` runs a program and notes the files that it opens.

Files that it creates are left out. Python does not see the files that SQLite opens, only the name and mode of
the database: they are noted.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

SQLITE = b"sqlite: "


def main() -> None:
    log, module, *arguments = sys.argv[1:]
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(event: str, details: tuple[Any, ...]) -> None:
        if event == "open" and not isinstance(details[0], int) and not details[2] & os.O_EXCL:
            os.write(descriptor, os.path.abspath(os.fsencode(details[0])) + b"\n")
        elif event == "sqlite3.connect":
            os.write(descriptor, SQLITE + os.fsencode(details[0]) + b"\n")

    sys.addaudithook(note)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
