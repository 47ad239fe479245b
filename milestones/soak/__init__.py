"""Attack all engines with random schedules, and check every answer.

Requests arrive at random, share prefixes, sample, stop, stream, are aborted and refused. Pools are
barely large enough. Forwards, logits and texts fail. Ctrl-C and timers interrupt calls. Every
answer must be the expected one, no request may be lost or stuck, and nothing may be left behind. A
schedule that fails is printed with the command that runs it again. milestones/SOAK.md explains the
figures.

Exit status: 0 nothing is wrong; 1 something is; 2 the command line is wrong.
"""

from .command import EXAMPLE, add_arguments, main

__all__ = ["EXAMPLE", "add_arguments", "main"]
