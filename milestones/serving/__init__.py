"""Engines behind HTTP: one server, replicas behind a router, and a client that loads them.

`serve.py` is the command above `server/` and `scale/`, and chooses between them. The replicas of
`scale/` use parts of `server/`, which knows nothing of replicas.
"""

from common.interrupts import show_as_one_line

show_as_one_line()  # here, because the modules of a command take seconds to import
