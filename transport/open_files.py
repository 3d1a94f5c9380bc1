"""How many files and connections this process may have open."""

from __future__ import annotations

import contextlib
import resource

UNLIMITED = 1 << 20
"What is shared out if the system sets no limit."


def raise_limit() -> None:
    """Allow as many open files as the system lets us: the soft limit is often 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def open_file_limit() -> int:
    """How many files this process may open now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft
