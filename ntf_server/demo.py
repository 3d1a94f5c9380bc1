"""`ntf-server demo`: the whole path of one notification, on this machine, in a few seconds."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the demonstration."""
    parser.add_argument("--keep", action="store_true", help="leave everything running until Ctrl-C")


def run(args: argparse.Namespace) -> int:
    """Run the demonstration; return the exit code of the process."""
    raise SystemExit("the demonstration is not available in this build")
