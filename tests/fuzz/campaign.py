"""A long run in parts: several processes, and the next call goes on where this one ended."""

from __future__ import annotations

import json
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

from tests.fuzz.agents import fuzz_agents
from tests.fuzz.parsers import ParserRun, fuzz_inputs

PART = 100_000
"Inputs of a part; parts are done whole or not at all."
AGENT_SHARE = 1000
"One input of so many is a message to an agent."
REPORT_EVERY = 60.0


@dataclass
class Campaign:
    """What has been done of a run; on the disk after each part."""

    path: Path
    seed: int
    inputs: int
    done: dict[int, int] = field(default_factory=dict)
    "Inputs of each part."
    findings: list[str] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path, seed: int, inputs: int) -> Campaign:
        """The one that is there, with its own seed."""
        if not path.exists():
            return cls(path, seed, inputs)
        found = json.loads(path.read_text())
        done = {int(part): count for part, count in found["done"].items()}
        return cls(path, found["seed"], inputs, done, found["findings"])

    @property
    def total(self) -> int:
        return sum(self.done.values())

    def left(self) -> list[int]:
        return [part for part in range(-(-self.inputs // PART)) if part not in self.done]

    def add(self, part: int, run: ParserRun) -> None:
        self.done[part] = run.inputs
        self.findings += map(str, run.findings)
        content = {"seed": self.seed, "done": self.done, "findings": self.findings}
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(content))
        partial.replace(self.path)

    def run(self, processes: int) -> None:
        told = began = time.monotonic()
        before = self.total
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            work = {pool.submit(run_part, self.seed + part): part for part in self.left()}
            for each in as_completed(work):
                self.add(work[each], each.result())
                if time.monotonic() - told > REPORT_EVERY or not self.left():
                    told = time.monotonic()
                    rate = (self.total - before) / (told - began)
                    print(
                        f"{self.total:,} inputs, {rate:,.0f} a second, {len(self.findings)} findings",
                        flush=True,
                    )


def run_part(seed: int) -> ParserRun:
    agents = fuzz_agents(PART // AGENT_SHARE, seed)
    parsers = fuzz_inputs(PART - agents.inputs, seed)
    return ParserRun(agents.inputs + parsers.inputs, agents.findings + parsers.findings)
