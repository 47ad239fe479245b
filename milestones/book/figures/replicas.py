"""Scale: the router's own policies, on simulated replicas in virtual time."""

from __future__ import annotations

from ...drawing import svg
from ...serving.scale.policy import make_policy
from ...serving.scale.simulation import Fleet, Outcome, simulate
from ...serving.scale.steps import StepModel
from ...serving.scale.traffic import Traffic
from ..figure import Control, Figure, Shown
from ..picture import frame, legend

LEFT, TOP, ROW, WIDTH, GAP = 66, 46, 18, 420, 34  # pixels
POLICIES = {"round-robin": "round robin", "prefix": "prefix affinity"}
REQUESTS = 200
RATE = 0.2  # conversations that begin in a second, for each replica
STEPS = StepModel("virtual time", ((1, 0.005), (16, 0.010)), ((1, 0.005), (1024, 0.2)))


def run(policy: str, replicas: int, prompts: int, pages: int) -> Outcome:
    """Send the same conversations to a fleet. Each begins with one of some system prompts."""
    traffic = Traffic(rate=RATE * replicas, num_systems=prompts)
    fleet = Fleet(replicas, STEPS, pages)
    return simulate(fleet, make_policy(policy, seed=1), traffic.sessions(REQUESTS, seed=1))


def draw(replicas: int, prompts: int, pages: int) -> Shown:
    """Draw the requests of each replica, and the part of the prompt tokens that a cache has."""
    done = {policy: run(policy, replicas, prompts, pages) for policy in POLICIES}
    most = max(max(outcome.sent.values()) for outcome in done.values())
    parts = legend(LEFT, 18, {"request0": "requests of a replica", "held": "found in a cache"})
    y = float(TOP)
    for policy, outcome in done.items():
        parts.append(svg.text(8, y - 4, POLICIES[policy], "t"))
        for number, sent in enumerate(outcome.sent.values(), start=1):
            parts.append(svg.text(LEFT - 8, y + 12, f"{number}", anchor="end"))
            parts.append(svg.rect(LEFT, y, WIDTH * sent / most, ROW - 4, "request0", rx=2))
            y += ROW
        parts.append(svg.text(LEFT - 8, y + 14, "cache", anchor="end"))
        parts.append(svg.rect(LEFT, y + 2, WIDTH, ROW - 4, "slot"))
        parts.append(svg.rect(LEFT, y + 2, WIDTH * outcome.hit_rate, ROW - 4, "held"))
        parts.append(svg.text(LEFT + WIDTH + 8, y + 14, f"{outcome.hit_rate:.0%}"))
        y += ROW + GAP
    rates = [done[policy].hit_rate for policy in POLICIES]
    words = (
        f"Round robin: a cache has {rates[0]:.0%} of the prompt tokens. Prefix affinity: "
        f"{rates[1]:.0%}, and its busiest replica gets {done['prefix'].spread:.2f} times the "
        "requests of the average."
    )
    return Shown(frame(parts, LEFT + WIDTH + 60, y - 10, words), words, round(100 * rates[1]))


FIGURE = Figure(
    name="replicas",
    title="Which replica gets the request?",
    question=(
        "Conversations begin with one of 16 system prompts, and have five turns. Each replica has "
        "room for 400 pages. With eight replicas, how many percent of the prompt tokens does a "
        "cache have if the router prefers the replica with the longest prefix?"
    ),
    controls=(
        Control("replicas", "replicas", 2, 1, 8),
        Control("prompts", "system prompts", 16, 1, 64),
        Control("pages", "pages of a replica", 400, 150, 1200),
    ),
    draw=draw,
    asked={"replicas": 8},
)
