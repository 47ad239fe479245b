"""Several replicas of an engine behind a router that knows their prefix caches.

The router's policy, which needs no extra:

    keys.py           a number for each page of a prompt
    prefix_index.py   which replica holds which pages
    policy.py         round robin, least load, prefix affinity
    balancer.py       loads, index and policy together: the choice for a request
    cache_log.py      what a replica reports about its cache

Real replicas, under Ray Serve:

    serve.py          `serve --replicas`; its options are in settings.py
    front.py          the server that clients see: forwards calls, drains
    answer.py         the answer of a replica, passed on; a call is sent again if its replica dies
    prompt_keys.py    the keys of a prompt; merge.py: the metrics of all replicas
    replica.py        the server of one engine, called without a socket; wire.py: the messages
    ray_replicas.py   the deployment and its start; environment.py: on this machine only
    ray_router.py     the router as Ray calls it; routing.py: what it shares with the front

Simulated replicas, in virtual time:

    simulation.py     the same router, with the replicas of simulated.py
    steps.py          how long a step takes; traffic.py: conversations
    curves.py         replicas, skew and reports varied; sizing.py: replicas for some users

`python -m milestones scale` is in command.py; real.py, measure.py and kill.py use real replicas,
and page.py writes the tables of SCALING.md.
"""
