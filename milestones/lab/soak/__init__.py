"""Attack all engines with random schedules, and check every answer.

Requests arrive at random steps. They share prefixes, use sampling, stop strings and streams, and
some are aborted or refused.
Pools are barely large enough. Forwards, logits and texts fail. Ctrl-C and timers interrupt calls.
Every answer must be the expected one, no request may be lost or stuck, and no memory may be left
behind. The command prints each schedule that fails, with the command that runs it again.
milestones/docs/SOAK.md explains the figures.

Exit status: 0 all answers and invariants were right; 1 a problem was found; 2 wrong usage.
"""

from .command import EXAMPLE, add_arguments, main

__all__ = ["EXAMPLE", "add_arguments", "main"]
