"""The server, replicas and the router, load, tensor parallelism."""
