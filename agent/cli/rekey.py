"""Another key for a device's file, or none."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from pathlib import Path

from agent.cli.running import key_of, output, state_file
from agent.duplex.database_file import change_key, user_key


def add_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    command = add("rekey", _rekey, "encrypts the state with another key, or with none")
    command.add_argument("--new-key-file", type=Path, metavar="FILE", help="none: not encrypted any more")


async def _rekey(args: argparse.Namespace) -> None:
    new = user_key(args.new_key_file, {})
    await asyncio.to_thread(change_key, state_file(args), key_of(args), new)
    output(args).say({"encrypted": new is not None}, "Encrypted" if new else "Not encrypted any more")
