"""The gRPC face of a daemon: grpc.health.v1 and reflection; of a node also kvstore.v1.Node (proto/node.proto). Off the data path."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvstore.errors import KvstoreError
from kvstore.server.ports import check_port
from kvstore.server.proto import node_pb2, node_pb2_grpc

if TYPE_CHECKING:
    from kvstore.server.node import Node

SERVICE: Final = "kvstore.v1.Node"
WORKERS: Final = 4
REQUEST_BYTES_MAX: Final = 1 << 20


class HealthServer:
    """Serves from `start` on; health says NOT_SERVING until `set_ready(True)`, for "" and for `service`."""

    def __init__(
        self, host: str, port: int, service: str, add: Callable[[grpc.Server], None] | None = None, *,
        workers: int = WORKERS, request_bytes_max: int = REQUEST_BYTES_MAX,
    ) -> None:  # fmt: skip
        """`add` puts the service itself into the server, where it has calls. Raises OSError where the port cannot be had."""
        self._service = service
        self._server = grpc.server(
            ThreadPoolExecutor(workers, "kvstore-grpc"),
            options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", request_bytes_max)],
            maximum_concurrent_rpcs=64,
        )
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if add is not None:
            add(self._server)
        names = (service, health.SERVICE_NAME) if add is not None else (health.SERVICE_NAME,)
        reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), self._server)
        self.set_ready(False)
        check_port(host, port)  # gRPC would write its own lines on stderr
        bracketed = f"[{host}]" if ":" in host else host
        try:
            self.port = self._server.add_insecure_port(f"{bracketed}:{port}")
        except RuntimeError as error:
            raise OSError(str(error)) from None
        if not self.port:
            raise OSError(f"cannot listen on {host}:{port}")

    def start(self) -> None:
        self._server.start()

    def set_ready(self, ready: bool) -> None:
        answer = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", self._service):
            self._health.set(service, answer)

    def close(self, grace_seconds: float = 0.5) -> None:
        self._server.stop(grace_seconds).wait()


class ControlServer(HealthServer):
    """Of a node: its own calls, too."""

    def __init__(self, node: Node, host: str, port: int) -> None:
        def add(server: grpc.Server) -> None:
            node_pb2_grpc.add_NodeServicer_to_server(_NodeService(node), server)  # type: ignore[no-untyped-call]  # generated code

        super().__init__(host, port, SERVICE, add)


class _NodeService(node_pb2_grpc.NodeServicer):
    def __init__(self, node: Node) -> None:
        self._node = node

    def Status(self, request: node_pb2.StatusRequest, context: Any) -> node_pb2.StatusReply:
        return self._node.status()

    def Stats(self, request: node_pb2.StatsRequest, context: Any) -> node_pb2.StatsReply:
        return node_pb2.StatsReply(values=self._node.values())

    def ListQueues(self, request: node_pb2.ListQueuesRequest, context: Any) -> node_pb2.ListQueuesReply:
        return self._node.queues()

    def Drain(self, request: node_pb2.DrainRequest, context: Any) -> node_pb2.DrainReply:
        return node_pb2.DrainReply(finished=self._node.drain(request.timeout_seconds))

    def ReloadMap(self, request: node_pb2.ReloadMapRequest, context: Any) -> node_pb2.ReloadMapReply:
        try:
            return node_pb2.ReloadMapReply(epoch=self._node.reload_map())
        except KvstoreError as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            raise  # abort raises itself
