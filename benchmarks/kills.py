"""Kill a whole run at random times, run it again until it ends, and compare it with a run that was never killed.

    python benchmarks/kills.py --kills 100

The run is scripts/qat_finetune.py on the digits: float training, calibration, fine-tuning, export, ONNX Runtime and,
where tensorrt-rtx is installed, the engine. It is killed with SIGKILL, at a moment drawn evenly from the CPU seconds
that an unbroken run takes (so that other load does not shift it); every --write-every-th kill waits from there for the
next file that is being written. After each kill every file must load and no training step may be lost; after the last
one of a chain weights, numbers and ONNX files must equal the unbroken run's bit for bit. A line a kill is kept beside
the results, a benchmark that was stopped goes on after it; results/kills.json is written at the end, and exit status 1
means that something was lost.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from journal import add_row, read_rows
from kills_attempt import ROOT, SETTINGS, Attempt, stage_of, stage_of_write, unbroken
from kills_check import damaged, differences, files_of, steps_done, temporaries
from qat.files import write_json
from qat.report import environment


class Chains:
    """Kills, one chain of attempts in a folder after the other.

    Attributes:
        rows: a line a kill, and one a chain that ended.
    """

    def __init__(self, work: Path, seed: int, write_every: int, journal: Path) -> None:
        self.work, self.seed, self.write_every, self.journal = work, seed, write_every, journal
        self.folder = work / "chain"
        self.whole, self.seconds = unbroken(work)
        self.rows = read_rows(journal)

    @property
    def kills(self) -> int:
        """Kills so far."""
        return sum("stage" in row for row in self.rows)

    @property
    def ended(self) -> int:
        """Chains that ended so far."""
        return sum("chain" in row for row in self.rows)

    def kill_once(self) -> bool:
        """Start an attempt and kill it; False where it ended before, which ends the chain."""
        number = self.kills
        seconds = random.Random(f"{self.seed} {number} {self.ended}").uniform(0, self.seconds)
        in_a_write = bool(self.write_every) and number % self.write_every == self.write_every - 1
        attempt = Attempt(self.folder, self.work / "attempt.log")
        try:
            killed = attempt.kill_at(seconds, in_a_write)
        finally:
            if attempt.process.poll() is None:
                attempt.kill()
        if not killed:
            self.end(attempt)
            return False
        writing = [str(path.relative_to(self.folder)) for path in temporaries(self.folder)]
        stack = attempt.stack.read_text() if attempt.stack.exists() else ""
        stage = stage_of_write(writing[0]) if in_a_write and writing else stage_of(stack)
        self.add({"kill": number, "cpu_seconds": round(seconds, 3), "stage": stage, "writing": writing, **self.state()})
        return True

    def state(self) -> dict[str, Any]:
        """What is on disk, and what is wrong with it."""
        steps = steps_done(self.folder)
        before = self.rows[-1].get("steps", {}) if self.rows else {}
        lost = [f"{part}: {n} steps were done, {steps.get(part)} are left" for part, n in before.items()
                if steps.get(part, -1) < n]  # fmt: skip
        return {"files": len(files_of(self.folder)), "steps": steps, "problems": damaged(self.folder) + lost}

    def end(self, attempt: Attempt) -> None:
        """Compare what a chain has given; a failed one is kept."""
        code = attempt.process.returncode
        log = (self.work / "attempt.log").read_text()
        problems = [f"exit status {code}: {log[-1500:]}"] if code else differences(self.whole, self.folder)
        self.add({"chain": self.ended, "problems": problems})
        if problems and self.folder.exists():
            self.folder.rename(self.work / f"failed{time.time():.0f}")
        shutil.rmtree(self.folder, ignore_errors=True)
        if code:
            sys.exit(f"a run that goes on after a kill failed:\n{log[-3000:]}")

    def finish(self) -> None:
        """Let the last chain end."""
        if self.rows and "stage" in self.rows[-1]:
            attempt = Attempt(self.folder, self.work / "attempt.log")
            attempt.wait()
            self.end(attempt)

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row."""
        self.rows.append(row)
        add_row(self.journal, row)

    def summary(self) -> dict[str, Any]:
        """Counts, and everything that was lost."""
        killed = [row for row in self.rows if "stage" in row]
        return {
            "kills": len(killed),
            "stages": dict(Counter(row["stage"] for row in killed)),
            "kills_in_a_write": sum(bool(row["writing"]) for row in killed),
            "files_checked": sum(row["files"] for row in killed),
            "runs_that_ended": self.ended,
            "lost": [problem for row in self.rows for problem in row["problems"]],
            "unbroken_cpu_seconds": self.seconds,
        }


def main() -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write-every", type=int, default=4, metavar="N", help="0 for never")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "kills", help="folder for the runs")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "kills.json")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    chains = Chains(options.work.resolve(), options.seed, options.write_every, options.output.with_suffix(".jsonl"))
    with tqdm(total=options.kills, initial=chains.kills, desc="kills") as bar:
        while chains.kills < options.kills:
            bar.update(chains.kill_once())
    chains.finish()
    found = chains.summary()
    command = f"python benchmarks/kills.py --kills {options.kills} --seed {options.seed}"
    command += f" --write-every {options.write_every}"
    write_json(options.output, {"command": command, "run": SETTINGS, "environment": environment(), **found})
    chains.journal.unlink()
    print(json.dumps(found, indent=2))
    return 1 if found["lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
