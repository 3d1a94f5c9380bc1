"""Log lines for journald, with fields to look for: `journalctl -u ntf-server LOGGER=ntf_server.router`."""

from __future__ import annotations

import logging
import socket

SOCKET = "/run/systemd/journal/socket"
PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
BETWEEN = "\0"
"Between the fields of a line, from the formatter to the stream."


class JournaldFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        fields = {
            "MESSAGE": message.replace(BETWEEN, "?"),
            "PRIORITY": PRIORITIES.get(record.levelno, 5),
            "SYSLOG_IDENTIFIER": "ntf-server",
            "LOGGER": record.name,
            "CODE_FILE": record.pathname,
            "CODE_LINE": record.lineno,
        }
        return BETWEEN.join(f"{key}={value}" for key, value in fields.items())


class JournaldStream:
    """journald's own protocol: a datagram for each line. Whoever writes counts what is lost."""

    def write(self, text: str) -> None:
        fields = text.removesuffix("\n").split(BETWEEN)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"".join(map(_encoded, fields)), SOCKET)

    def flush(self) -> None:
        """Datagrams do not wait."""


def _encoded(field: str) -> bytes:
    key, _, value = field.partition("=")
    data = value.encode("utf-8", "replace")
    if b"\n" not in data:
        return f"{key}=".encode() + data + b"\n"
    return f"{key}\n".encode() + len(data).to_bytes(8, "little") + data + b"\n"
