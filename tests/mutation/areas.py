"""Where checks are that keep attackers out, and which tests are close to them.

Left out are modules that read nothing of a peer and limit nobody: how a program starts, reads its own
configuration, stores its records and shows its state.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Area:
    packages: tuple[str, ...]
    patterns: tuple[str, ...]
    "Modules that are changed."
    tests: tuple[str, ...]
    without: tuple[str, ...] = ()
    "Of these modules."

    def modules(self, root: Path) -> list[Path]:
        found = {path for pattern in self.patterns for path in root.glob(pattern)}
        return sorted(found - {root / name for name in self.without})


AREAS = {
    "protocol": Area(("protocol",), ("protocol/**/*.py",), ("tests/protocol",)),
    "transport": Area(
        ("transport",),
        ("transport/*.py",),
        (
            "tests/transport",
            "tests/smp_client",
            "tests/ntf_server/test_limits.py",
            "tests/ntf_server/test_side_outputs.py",
        ),
        without=("transport/cancellation.py", "transport/open_files.py", "transport/shared_attempts.py"),
    ),
    "smp_client": Area(
        ("smp_client",),
        ("smp_client/*.py",),
        ("tests/smp_client", "tests/smp_router/test_proxy.py", "tests/ntf_server/subscriber"),
    ),
    "smp_router": Area(
        ("smp_router",),
        ("smp_router/*.py",),
        ("tests/smp_router", "tests/agent/duplex/test_links.py"),
        without=(
            "smp_router/__main__.py",
            "smp_router/config.py",
            "smp_router/faults.py",
            "smp_router/information.py",
            "smp_router/load.py",
            "smp_router/sqlite_records.py",
        ),
    ),
    "ntf_server": Area(
        ("ntf_server",),
        (
            "ntf_server/authentication.py",
            "ntf_server/client_session.py",
            "ntf_server/commands.py",
            "ntf_server/control.py",
            "ntf_server/listener.py",
            "ntf_server/own_routers.py",
            "ntf_server/router_session.py",
            "ntf_server/secret_files.py",
            "ntf_server/service_credentials.py",
            "ntf_server/subscriber.py",
            "ntf_server/push/verification_limits.py",
            "ntf_server/statements/api.py",
            "ntf_server/statements/bodies.py",
            "ntf_server/statements/signed_requests.py",
        ),
        (
            "tests/ntf_server/test_commands.py",
            "tests/ntf_server/test_control.py",
            "tests/ntf_server/test_sessions.py",
            "tests/ntf_server/test_limits.py",
            "tests/ntf_server/test_named_routers.py",
            "tests/ntf_server/test_races.py",
            "tests/ntf_server/test_side_outputs.py",
            "tests/ntf_server/subscriber",
            "tests/ntf_server/statements",
            "tests/ntf_server/push",
        ),
    ),
}
