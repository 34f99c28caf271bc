"""A model, a client of a cluster, an agent, an engine and an HTTP server, started and ended together."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import uvicorn
from prometheus_client import generate_latest

from kvstore.client import Client, ClientConfig
from kvstore.client.agent.agent import Agent
from kvstore.client.agent.metrics import agent_registry
from kvstore.clustermap import ClusterMap
from kvstore.engine_integration.engine import Engine, EngineConfig
from kvstore.engine_integration.engine.host import agent_config
from kvstore.engine_integration.engine.metrics import read_engine
from kvstore.engine_integration.model.model import Model
from kvstore.engine_integration.server.app import Service, app_of
from kvstore.engine_integration.server.connection import Connection
from kvstore.engine_integration.server.metrics import Answers
from kvstore.engine_integration.server.template import Template
from kvstore.metrics import AUDIT, ENGINE, SERVER, TableCollector

CONTEXT_TOKENS: Final = 32_768
END_SECONDS: Final = 3.0  # for answers on their way when the server is told to end


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    queue_max: int = 64  # requests that wait; more are refused
    directories: tuple[str, ...] = ()  # window directories, ip:port; none: those of the cluster map
    audit_every: int = 0  # of N answers over a bounded replay one is computed again exactly; 0: none
    mover: str = "auto"  # how loaded rows come into the engine's memory
    transport: str = ""  # of reads: auto, tcp or rdma; "": as ClientConfig has it
    fabric: Mapping[str, Any] = field(default_factory=dict)  # rdma_traffic_class, rdma_gid_index; without: as ClientConfig has them
    access_log: Path | None = None  # a folder: one row a lookup, in Parquet files


@contextlib.contextmanager
def serving(model: Model, weights: str, cluster_map: ClusterMap, listening: socket.socket, config: ServeConfig) -> Iterator[str]:
    """Answers on `listening`, a bound socket, while the block runs; gives the address."""
    host, port = listening.getsockname()[:2]
    draining = threading.Event()
    of_client = ClientConfig(
        block_tokens=model.config.block, model_name=model.config.name, access_log=config.access_log, **config.fabric
    )  # fmt: skip
    if config.transport:
        of_client = replace(of_client, transport=config.transport)
    with (
        Client(cluster_map, layout=model.layout, config=of_client) as client,
        Agent(client, config=agent_config(model.config, directories=config.directories, host=host)) as agent,
        Engine(model, agent, EngineConfig(queue_max=config.queue_max, audit_every=config.audit_every, mover=config.mover)) as engine,
    ):
        answers = Answers()
        service = Service(
            engine=engine,
            template=Template(model.config),
            model=model.config.name,
            host=host,
            context_tokens=CONTEXT_TOKENS,
            classes=frozenset(cluster_map.classes),
            facts={"weights": weights},
            answers=answers,
            metrics=_metrics(engine, agent, answers),
            draining=draining.is_set,
        )
        http = uvicorn.Config(
            app_of(service), lifespan="off", log_level="warning", access_log=False, server_header=False,
            http=Connection, ws="none", timeout_graceful_shutdown=int(2 * END_SECONDS),
        )  # fmt: skip
        server = uvicorn.Server(http)
        thread = threading.Thread(target=server.run, args=([listening],), name="kvstore-http", daemon=True)
        thread.start()  # not on the main thread, or it would take the signals, too
        try:
            yield f"http://{'[' + host + ']' if ':' in host else host}:{port}"
        finally:
            draining.set()
            server.should_exit = True
            thread.join(END_SECONDS)
            engine.close()  # answers that still run end now, and their clients are told
            thread.join(END_SECONDS)


def _metrics(engine: Engine, agent: Agent, answers: Answers) -> Callable[[], bytes]:
    registry = agent_registry(agent)
    registry.register(TableCollector(SERVER, answers.read))
    registry.register(TableCollector(AUDIT, engine.audit.read))
    registry.register(TableCollector(ENGINE, lambda values: read_engine(engine, values)))
    return lambda: generate_latest(registry)
