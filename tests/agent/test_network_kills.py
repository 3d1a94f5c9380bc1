"""Some of `python -m tests.agent.network_kills`: other records with another NTF_KILL_SEED."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.agent.network_kills import STORIES, VICTIMS, tell

RECORDS = 50
"About as many as a story takes. A kill after its end is none."
SEED = os.environ.get("NTF_KILL_SEED", "1")
KILLS = [
    (name, victim, records)
    for name in STORIES
    for victim in VICTIMS
    for records in random.Random(f"{SEED} {name} {victim}").sample(range(1, RECORDS), 2)
]

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"python-socks leaves a socket to the garbage collector when it is cancelled while it connects."


ONCE_FATAL = [
    ("slow handshake", "alice", 40),  # the confirmation had come through, and was reported as failed
    ("short link", "bob", 35),  # the link had done its work, and was asked for again
    ("address", "bob", 21),  # the owner was asked twice, and accepted twice
]


@pytest.mark.parametrize(("name", "victim", "records"), ONCE_FATAL + KILLS)
async def test_killed_after_a_record(tmp_path: Path, name: str, victim: str, records: int) -> None:
    await tell(STORIES[name], victim, records, tmp_path)
