"""Core dumps hold all that is in memory: private keys, device tokens, message contents."""

from __future__ import annotations

import resource


def forbid_core_dumps() -> None:
    """For this process and those that it starts; systemd-coredump heeds the limit, too.

    The process stays "dumpable" in the kernel's words: otherwise its own user could not look into
    /proc/PID any more, as `doctor` and monitoring do.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
