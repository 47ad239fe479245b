"""Run base and change on the same workloads: once in virtual time, or in turns on this machine."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from common.clock import StepCosts
from common.displays.workload import Workload, WorkloadResult

from ...lab.bench.engines import BenchEngine, of_tree

IN_TREE = "milestones.course.project.in_tree"
COUNTERS = ("num_steps", "padding_tokens", "prefill_tokens", "num_retractions")
Say = Callable[[str], None]
Ratios = dict[str, list[float]]


@dataclass(frozen=True)
class Counted:
    """The results of both trees in virtual time."""

    base: WorkloadResult
    change: WorkloadResult

    @property
    def differs(self) -> bool:
        """Whether any counter differs, or the virtual time."""
        return self.counts(self.base) != self.counts(self.change) or self.ratio != 1

    @property
    def ratio(self) -> float:
        return self.base.seconds / self.change.seconds

    @staticmethod
    def counts(result: WorkloadResult) -> list[int]:
        """Return the counters in the order of `COUNTERS`."""
        return [result.stats[name] for name in COUNTERS]


@contextmanager
def tree_of(base: str, root: Path) -> Iterator[Path]:
    """Yield the folder of a base: a folder itself, or the files of a git commit of `root`.

    Raises `ValueError` if it is neither.
    """
    if Path(base).is_dir():
        yield Path(base).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="ladder-base-") as folder:
        archive = Path(folder) / "base.tar"
        command = ["git", "archive", "--output", str(archive), base]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
        if done.returncode != 0:
            raise ValueError(f"{base} is neither a folder nor a commit: {done.stderr.strip()}")
        subprocess.run(["tar", "-xf", str(archive), "-C", folder], check=True)
        archive.unlink()
        yield Path(folder)


def engine_in(folder: Path, engine: str) -> BenchEngine:
    """Return an engine of a tree. The bench runs each measurement in a new process."""
    made = of_tree(engine)
    return replace(made, command=(IN_TREE, str(folder), *made.command))


def count(
    works: Mapping[str, Workload], base: BenchEngine, change: BenchEngine, say: Say
) -> dict[str, Counted]:
    """Run each workload once on both, in virtual time."""
    found = {}
    for name, work in works.items():
        say(f"{name}, in virtual time")
        work = replace(work, costs=asdict(StepCosts()))
        found[name] = Counted(base.run(work), change.run(work))
    return found


def pairs(
    works: Mapping[str, Workload], base: BenchEngine, change: BenchEngine, rounds: int, say: Say
) -> Ratios:
    """Return the ratios of each workload: the time of the base, divided by that of the change.

    Both run directly after each other, and take turns in being first.
    """
    found: Ratios = {name: [] for name in works}
    for number in range(rounds):
        for name, work in works.items():
            say(f"pair {number + 1} of {rounds}: {name}")
            order = (base, change) if number % 2 == 0 else (change, base)
            seconds = {engine.name: engine.run(work).seconds for engine in order}
            found[name].append(seconds[base.name] / seconds[change.name])
    return found
