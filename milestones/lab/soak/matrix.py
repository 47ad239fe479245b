"""The matrix of failures: each part of a step fails, on each engine that has the part.

A failure hits one request, once or as long as the request lives. The answers of all others must not
change, and nothing may be left behind. Afterwards, 30 ordinary requests must get their answers, or
the engine must say that it is dead.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from .parts import KINDS, MAY_DIE, PARTS, PartFault, parts_of
from .plan import Arrival, Plan, make_plan, make_request
from .runner import Soak

NUM_AFTERWARDS = 30
LEAST_BUDGET = 8  # tokens of a step: fewer take too long for that many requests
LONGEST_AFTERWARDS = 24  # tokens of a prompt: every engine admits it


class FaultMatrix(Soak):
    """A run that fills the matrix. Each schedule has a turn with each part, and each kind."""

    def __init__(
        self, seed: int, milestones: list[str], parts: Sequence[str] = (), most: int | None = None
    ) -> None:
        """parts: those to try; none: all. most: failures in each cell. None: as time allows."""
        super().__init__(seed, milestones, interrupts=False)
        self.parts = parts or list(PARTS)
        self.most = most

    def run_number(self, milestone: str, number: int) -> None:
        for part in [part for part in parts_of(milestone) if part in self.parts]:
            for kind in KINDS:
                cell = self.results.cells.setdefault(f"{milestone} {part} {kind}", Counter())
                if self.most is not None and cell.total() >= self.most:
                    continue
                plan = self.plan_of(number, milestone, part, lasts=kind == "lasting")
                if plan is not None and (outcome := self.run_plan(milestone, plan, part)):
                    cell[outcome] += 1

    def plan_of(self, number: int, milestone: str, part: str, lasts: bool) -> Plan | None:
        """Return a plan in which a part fails. None if no request of it can be the victim.

        Everything else that attacks an engine is left out, except retractions.
        """
        plan = make_plan(self.seed, number, self.sources, milestone)
        chance = random.Random(f"{self.seed}/{number}/{part}")
        plan.remove_failures()
        plan.interrupt_chance, plan.reset_every, plan.stranger_at = 0.0, None, None
        whole = -(-plan.config["max_model_len"] // plan.config["page_size"])
        plan.config["num_pages"] = chance.choice([whole, whole + 1])  # so that pages are evicted
        budget = max(LEAST_BUDGET, plan.config["max_num_batched_tokens"])
        plan.config["max_num_batched_tokens"] = budget
        requests = [request for arrival in plan.arrivals for request in arrival.requests]
        plan.arrivals = [Arrival(a.tick, "add", [r]) for a in plan.arrivals for r in a.requests]
        for request in requests:
            request.abort_after = None
        victims = [
            request
            for request in requests
            if request.params.n == 1 and (part != "compile" or request.params.structured_outputs)
        ]
        if not victims:
            return None
        victim = chance.choice(victims)
        grammar = victim.params.structured_outputs
        skip = chance.choice([0, 0, 0, 1, 2, 5])
        is_late = chance.random() < 0.5
        fault = PartFault(part, 0, skip, is_late, victim.name, grammar, lasts)
        plan.part_faults, plan.may_die = [fault], part in MAY_DIE
        plan.may_fail = {victim.name}
        if part == "compile":  # requests with the same grammar share its compilation
            plan.may_fail |= {r.name for r in requests if r.params.structured_outputs == grammar}
        source = self.sources[plan.model]
        while len(plan.afterwards) < NUM_AFTERWARDS:
            name, tick = f"after {len(plan.afterwards)}", len(plan.afterwards) // 3
            request = make_request(chance, source, plan.model, name, milestone)
            request.abort_after = None
            if len(request.prompt) <= LONGEST_AFTERWARDS:
                plan.afterwards.append(Arrival(tick, "add", [request]))
        return plan
