"""What is left after a side has died, and another one has taken its place.

In one process no side dies by itself. These functions leave exactly what the death of a process
would leave: the other side, its messages, and what the clients know.
"""

from __future__ import annotations

from .decode import DecodeScheduler
from .engine import EngineCore, PrefillCore
from .receiver import Receiver
from .transport import layout_of


def restart_prefill(core: EngineCore) -> None:
    """Replace the prefill side by a new one. The decode side notices it by its next answer."""
    dead = core.prefill
    dead.undo_steps_in_flight()
    dead.runner.end_sends()
    core.transport.lose("prefill")
    core.prefill = PrefillCore(core.config, dead.runner, core.transport)
    core.prefill.now = dead.now


def restart_decode(core: EngineCore) -> None:
    """Lose the memory of the decode side. Its requests begin again, with their tokens.

    Tokens that clients have got are part of a request, so each answer goes on exactly there. The
    prefill side keeps the old attempts until their leases expire.
    """
    core.undo_steps_in_flight()
    dead, old = core.scheduler, core.receiver
    for attempt in old.requests:
        core.transport.windows.close(attempt)
    core.transport.lose("decode")
    core.scheduler = DecodeScheduler(core.config, core.runner.kv_pool.num_pages)
    core.scheduler.counters = dead.counters
    core.receiver = Receiver(core.scheduler, core.transport, layout_of(core.config))
    core.receiver.numbers = old.numbers
    for request in [*dead.with_rows, *dead.waiting]:
        request.row, request.num_computed_tokens = None, 0
        core.scheduler.add_request(request)
