"""`BalancedRouter`: the router's policy behind Ray Serve's own interface for request routers.

Ray asks `choose_replicas` for each request, and tells the router which replicas there are. The
router runs in a thread of Ray, in the process of the front. The two share one `Routing`. Ray copies
this module, with its global variables, so it has none: `routing_of` finds what is shared.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .routing import routing_of


class BalancedRouter(RequestRouter):
    """Ray calls this class. It only translates."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Take the routing of this process. Ray gives the arguments of the deployment."""
        self._routing = routing_of(self.app_name, kwargs["policy"], kwargs["most_open"])

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Ray has a new list of replicas."""
        super().update_replicas(replicas)
        self._routing.update(name_of(replica.replica_id) for replica in replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Ray could not send to a replica, or an answer of it broke off."""
        super().on_replica_actor_died(replica_id)
        self._routing.died(name_of(replica_id))

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return ranks of replicas. Ray takes the first rank with a replica that is not full."""
        by_name = {name_of(replica.replica_id): replica for replica in candidate_replicas}
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # or Ray asks again without a pause
        chosen = self._routing.choose(pending_request.args[0], [*by_name])
        return [] if chosen is None else [[by_name[chosen]]]


def name_of(replica_id: ReplicaID) -> str:
    """Return the name of a replica, which no other replica of the application has."""
    return str(replica_id.unique_id)
