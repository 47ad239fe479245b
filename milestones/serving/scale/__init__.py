"""Several replicas of an engine behind a router that knows their prefix caches.

The router's policy, which needs no extra:

    prefix_index.py   keys of pages, which replica holds which, and what a replica reports
    policy.py         round robin, least load, prefix affinity
    balancer.py       loads, index and policy together: the choice for a request

Real replicas, under Ray Serve:

    serve.py          `serve --replicas`; its options are in settings.py
    front.py          the server that clients see: forwards calls, drains
    answer.py         the answer of a replica, passed on; a call is sent again if its replica dies
    replica.py        the server of one engine, called without a socket; wire.py: the messages
    ray_replicas.py   the deployment and its start, on this machine only
    ray_router.py     the router as Ray calls it; routing.py: what it shares with the front

Simulated replicas, in virtual time:

    simulation.py     the same router, with the replicas of simulated.py; replicas, skew and reports
                      varied
    steps.py          how long a step takes; traffic.py: conversations

`python -m milestones scale` is in command.py; real.py and measure.py use real replicas, ranks.py
uses ranks, and page.py writes the tables of SCALING.md.
"""
