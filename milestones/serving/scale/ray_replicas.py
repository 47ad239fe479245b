"""Replicas as a deployment of Ray Serve: start them, call them, end them.

`serve.prepare` must have been called before this module is imported.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray import serve
from ray.exceptions import ActorUnavailableError, RayActorError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from common import EngineConfig

from ..server.settings import ServerSettings
from .policy import Policy
from .ray_router import BalancedRouter
from .replica import Replica
from .routing import ROUTINGS, Routing
from .settings import ScaleSettings
from .wire import Description, ForwardedCall, Head, Item, ReplicaDiedError

APP = "ladder"
LOCAL = "127.0.0.1"
ROUTER: Any = f"{BalancedRouter.__module__}:{BalancedRouter.__name__}"
HEALTH_PERIOD = 2.0  # seconds


class EngineDeployment(Replica):
    """A replica in a process of Ray."""

    def __init__(
        self, milestone: str, config: EngineConfig, settings: ServerSettings, scale: ScaleSettings
    ) -> None:
        if scale.address is None:
            listen_on_this_machine_only()
        name = serve.get_replica_context().replica_id.unique_id
        super().__init__(name, milestone, config, settings, scale)

    async def check_health(self) -> None:
        """Ray calls this every few seconds, and replaces a replica for which it raises."""
        if not self.is_alive:
            raise RuntimeError("the engine of this replica has failed")
        self.poll()

    async def __del__(self) -> None:
        """Ray calls this after the last answer, when it removes the replica."""
        await self.stop()


class RayReplicas:
    """The replicas of one application, called through a handle."""

    def __init__(self, handle: DeploymentHandle, routing: Routing) -> None:
        self._handle = handle
        self._routing = routing
        self.balancer = routing.balancer

    @property
    def control_address(self) -> str:
        """Return host and port of Ray's control process, the GCS."""
        return str(ray.get_runtime_context().gcs_address)

    async def answer(self, call: ForwardedCall) -> AsyncGenerator[Item, None]:
        """Yield the answer of one replica. Raises `ReplicaDiedError`."""
        self._routing.open(call.number)
        response: Any = self._handle.options(stream=True).answer.remote(call)
        replica: str | None = None
        try:
            async for item in response:
                if isinstance(item, Head):
                    replica = item.replica
                yield item
        except RayActorError as error:
            replica = replica or self._routing.close(call.number)
            if isinstance(error, ActorUnavailableError):  # the network may be at fault
                self._routing.unreachable(replica)
            else:
                self._routing.died(replica)
            raise ReplicaDiedError(replica) from error
        finally:
            response.cancel()
            self._routing.close(call.number)

    async def learn(self) -> Description:
        """Learn the size of the replicas' caches, before the first call. Return a description."""
        found = await self.descriptions()
        self._routing.set_size(found[0].num_pages)
        return found[0]

    async def descriptions(self) -> Sequence[Description]:
        """Return those of all replicas that run."""
        return await self._each("description")

    async def reset(self, policy: Policy) -> None:
        """Empty all caches, and begin again with a policy. No call may be open."""
        await self._each("reset")
        self.balancer.reset(policy)

    async def metrics(self) -> Sequence[tuple[str, str]]:
        """Return the name and the page for Prometheus of all replicas that run."""
        return await self._each("metrics")

    async def _each(self, method: str) -> list[Any]:
        found = await self._handle.broadcast(method).results_async(
            timeout_s=10.0, return_exceptions=True
        )
        return [result for result in found if not isinstance(result, BaseException)]


@contextmanager
def started_replicas(
    milestone: str, config: EngineConfig, settings: ServerSettings, scale: ScaleSettings
) -> Iterator[RayReplicas]:
    """Start replicas, and end them and everything that was started for them.

    Without `scale.address`, a Ray of its own runs on this machine. It listens on 127.0.0.1 only.
    """
    connect(scale)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
        kwargs = {"policy": scale.policy, "most_open": settings.max_open_requests}
        ROUTINGS[APP] = Routing(scale.policy, settings.max_open_requests)
        options: dict[str, Any] = {"num_replicas": scale.num_replicas}
        if scale.max_replicas is not None:
            options = {
                "autoscaling_config": AutoscalingConfig(
                    min_replicas=scale.num_replicas,
                    max_replicas=scale.max_replicas,
                    target_ongoing_requests=scale.target_open_requests,
                )
            }
        deployment: Any = serve.deployment(
            EngineDeployment,
            name="engine",
            max_ongoing_requests=2 * settings.max_open_requests,
            health_check_period_s=HEALTH_PERIOD,
            graceful_shutdown_timeout_s=settings.drain_timeout,
            ray_actor_options={"num_cpus": scale.replica_cpus, "num_gpus": scale.replica_gpus},
            request_router_config=RequestRouterConfig(
                request_router_class=ROUTER, request_router_kwargs=kwargs
            ),
            **options,
        )
        application = deployment.bind(milestone, config, settings, scale)
        handle = serve.run(application, name=APP, route_prefix=None)
        yield RayReplicas(handle, ROUTINGS[APP])
    finally:
        serve.shutdown()
        ray.shutdown()


def connect(scale: ScaleSettings) -> None:
    """Join the cluster at `scale.address`, or start a Ray on this machine.

    Raises `RuntimeError` for a cluster that cannot be joined.
    """
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if scale.address is not None:
        try:
            ray.init(address=scale.address, namespace=APP, **quiet)
        except ConnectionError as error:
            raise RuntimeError(
                f"no cluster of Ray at {scale.address} can be joined ({error}). A cluster that "
                "`ray start` began asks for a token: set RAY_AUTH_MODE=token, with the token of "
                "its first machine (~/.ray/auth_token)"
            ) from error
        return
    ray.init(
        address="local",
        namespace=APP,
        include_dashboard=scale.dashboard,
        dashboard_host=LOCAL,
        num_cpus=max(1, math.ceil(scale.replica_cpus * (scale.max_replicas or scale.num_replicas))),
        object_store_memory=80 << 20,
        **quiet,
    )


def listen_on_this_machine_only() -> None:
    """Let the process of a replica listen on 127.0.0.1, before Ray Serve opens its port there.

    Ray Serve 2.60 opens a port for calls between deployments on all interfaces of the machine. No
    option changes this, and no call of this project uses the port.
    """
    from ray.serve._private import replica

    original = replica.add_port_to_grpc_server

    def add_port(server: Any, address: str) -> Any:
        return original(server, address.replace("[::]", "127.0.0.1"))

    replica.add_port_to_grpc_server = add_port
