"""A model, a client of a cluster, an agent, an engine and an HTTP server, started and ended together."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any, Final

import uvicorn
from prometheus_client import CollectorRegistry, generate_latest

from kvstore.client import Client, ClientConfig
from kvstore.client.metrics import client_registry
from kvstore.clustermap import ClusterMap
from kvstore.engine_integration.engine import Engine, EngineConfig
from kvstore.engine_integration.model.model import Model
from kvstore.engine_integration.server.app import Service, app_of
from kvstore.engine_integration.server.metrics import Answers
from kvstore.engine_integration.server.template import Template
from kvstore.metrics import SERVER, TableCollector

CONTEXT_TOKENS: Final = 32_768
CONNECTIONS_MAX: Final = 256
END_SECONDS: Final = 5.0  # for answers on their way when the server is told to end
START_SECONDS: Final = 30.0


@contextlib.contextmanager
def running_engine(model: Model, cluster_map: ClusterMap, config: EngineConfig | None = None) -> Iterator[tuple[Engine, Client]]:
    """An engine whose cache is the cluster, while the block runs."""
    client_config = ClientConfig(block_tokens=model.config.block, model_name=model.config.name)
    with Client(cluster_map, layout=model.layout, config=client_config) as client, Engine(model, client, config) as engine:
        yield engine, client


@contextlib.contextmanager
def serving(model: Model, weights: str, cluster_map: ClusterMap, listening: socket.socket, queue_max: int, **facts: Any) -> Iterator[str]:
    """Answers on `listening`, a bound socket, while the block runs; gives the address. More than `queue_max` waiting requests are
    refused. `facts` go to the page."""
    host, port = listening.getsockname()[:2]
    draining = threading.Event()
    with running_engine(model, cluster_map, EngineConfig(queue_max=queue_max)) as (engine, client):
        answers = Answers()
        service = Service(
            engine=engine,
            template=Template(model.config),
            model=model.config.name,
            host=host,
            context_tokens=CONTEXT_TOKENS,
            classes=frozenset(cluster_map.classes),
            facts={"weights": weights, **facts},
            answers=answers,
            metrics=_metrics(client, answers),
            draining=draining.is_set,
        )
        config = uvicorn.Config(
            app_of(service), lifespan="off", log_level="warning", access_log=False, server_header=False,
            limit_concurrency=CONNECTIONS_MAX, timeout_graceful_shutdown=int(END_SECONDS),
        )  # fmt: skip
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listening],), name="kvstore-http", daemon=True)
        thread.start()  # not on the main thread, or it would take the signals, too
        try:
            yield f"http://{'[' + host + ']' if ':' in host else host}:{port}"
        finally:
            draining.set()
            server.should_exit = True
            thread.join(2 * END_SECONDS)


def _metrics(client: Client, answers: Answers) -> Any:
    registry: CollectorRegistry = client_registry(client)
    registry.register(TableCollector(SERVER, answers.read))
    return lambda: generate_latest(registry)
