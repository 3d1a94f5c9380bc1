"""Log lines as text or JSON, on standard error."""

from __future__ import annotations

import json
import logging
import sys


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up_logging(level: str, format: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if format == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Libraries that log statements or requests would put ids into the log.
    for library in ("aiosqlite", "aioapns", "hpack", "asyncio"):
        logging.getLogger(library).setLevel(logging.WARNING)
