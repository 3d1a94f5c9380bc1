"""Writes the latest schema into the documentation: `python -m store.schema_doc docs/store.md`."""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from pathlib import Path

from store import migrate

BEGIN = "<!-- schema: begin -->"
END = "<!-- schema: end -->"


def latest_schema() -> str:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        migrate.apply(db, migrate.STEPS.plan(0, migrate.STEPS.latest))
        return migrate.schema_dump(db)


def with_schema(text: str) -> str:
    """`text` with the present schema between its markers."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"no place for the schema: {BEGIN} and {END} are missing")
    version = migrate.STEPS.latest
    return f"{before}{BEGIN}\n\nVersion {version}:\n\n```sql\n{latest_schema()}```\n\n{END}{after}"


def main() -> None:
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(with_schema(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
