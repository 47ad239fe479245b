"""Run schedules on all lanes in turn, and count the results."""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ...chain import sources
from ..instruments.audit import MODES
from .answers import Source
from .driver import Driver
from .faults import quiet_logs
from .interrupts import Interrupter
from .plan import Plan, make_plan
from .results import Failed, Results, SoakError, Tally
from .tiny_answers import Sources

WARM_UP_SCHEDULES = 20  # of a lane, before the first measurement of its memory
MOST_GROWTH_MB = 200.0  # of the process in one run: a leak in every schedule takes far more
HANG_SECONDS = 300.0  # of one schedule, which takes a second, or 20 with one token per step
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_mb() -> float:
    """Return the memory of this process in MB, after a garbage collection."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * PAGE_BYTES / 1e6


@contextmanager
def watched(command: str, seconds: float = HANG_SECONDS) -> Iterator[None]:
    """End the process if the block hangs: print this command, and where each thread is.

    Counting steps cannot detect a call that never returns, for example one that waits for an event.
    """

    def end() -> None:
        sys.stderr.write(
            f"stuck: a schedule has not ended in {seconds:.0f} seconds\n    {command}\n"
        )
        faulthandler.dump_traceback(all_threads=True)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


class Soak:
    """A run with one seed. Schedule K of a milestone with a forward stream has mode K modulo 4."""

    def __init__(
        self,
        seed: int,
        milestones: list[str],
        *,
        interrupts: bool = True,
        failures: bool = True,
    ) -> None:
        self.seed = seed
        self.milestones = milestones
        self.interrupts = interrupts
        self.failures = failures
        self.interrupter = Interrupter()
        self.results = Results()
        self.sources: dict[str, Source] = Sources()

    def run(self, numbers: Iterable[int]) -> Iterator[int]:
        """Run these schedules on each milestone in turn; yield each number when it is done."""
        with self.interrupter.handling(), quiet_logs():
            for number in numbers:
                for milestone in self.milestones:
                    self.run_number(milestone, number)
                if self.interrupter.stop_requested:
                    return
                yield number

    def run_number(self, milestone: str, number: int) -> None:
        """Run this schedule on one milestone."""
        self.run_plan(milestone, self.plan(number, milestone))

    def plan(self, number: int, milestone: str) -> Plan:
        """Make a schedule, without the parts that this run leaves out."""
        plan = make_plan(self.seed, number, self.sources, milestone)
        if not self.interrupts:
            plan.interrupt_chance = 0.0
        if not self.failures:
            plan.remove_failures()
        return plan

    def run_plan(self, milestone: str, plan: Plan, part: str = "") -> str:
        """Run one schedule on one milestone, and count what happened.

        part: the one that fails. Returns what its failure did (`Driver.outcome`), or "wrong".
        """
        outcome = "wrong"
        mode = MODES[plan.number % len(MODES)] if has_stream(milestone) else ""
        tally = self.results.lanes.setdefault(f"{milestone} {mode}".strip(), Tally())
        started, interrupts = time.perf_counter(), self.interrupter.delivered
        failed = Failed(plan.seed, plan.number, milestone, mode, part)
        try:
            with watched(failed.command):
                source = self.sources[plan.model]
                driver = Driver(milestone, mode or MODES[0], plan, source, tally, self.interrupter)
                driver.run()
                outcome = driver.outcome
        except SoakError as problem:
            self._failed(failed, tally, problem)
        except (Exception, KeyboardInterrupt) as error:
            unexpected = SoakError("wrong", f"{type(error).__name__}: {error}")
            self._failed(failed, tally, unexpected)
        tally.schedules += 1
        tally.seconds += time.perf_counter() - started
        tally.interrupts += self.interrupter.delivered - interrupts
        if tally.schedules == WARM_UP_SCHEDULES:
            tally.memory_start_mb = resident_mb()
        return outcome

    def measure_memory(self) -> None:
        """Record the memory at the end of the run, and report too much growth."""
        now = resident_mb()
        for lane, tally in self.results.lanes.items():
            start = tally.memory_start_mb = tally.memory_start_mb or now
            tally.memory_end_mb = now
            if now - start > MOST_GROWTH_MB:
                self.results.leaks.append(
                    f"memory grew from {start:.0f} to {now:.0f} MB after the first schedules of "
                    f"{lane}; the limit is {MOST_GROWTH_MB:.0f} MB more"
                )

    def _failed(self, failed: Failed, tally: Tally, problem: SoakError) -> None:
        setattr(tally, problem.kind, getattr(tally, problem.kind) + 1)
        self.results.failed.append(replace(failed, message=str(problem)))


def has_stream(milestone: str) -> bool:
    """Return whether the milestone runs its forwards on a forward stream."""
    return "stream.py" in sources(milestone)
