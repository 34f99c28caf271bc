"""Lookup, load and store: what an inference host links. docs/CLIENT.md tells how it behaves."""

from kvstore.client.aio import AsyncClient
from kvstore.client.client import Client
from kvstore.client.clock import Clock
from kvstore.client.config import ClientConfig
from kvstore.client.load import Load
from kvstore.client.metrics import client_collector, client_registry
from kvstore.client.store import StoreFuture
from kvstore.client.ticket import Ticket
from kvstore.client.values import Accept, Fidelity, LoadOutcome, LoadResult, PlaneReady, StoreOutcome, StoreResult

__all__ = [
    "Accept",
    "AsyncClient",
    "Client",
    "ClientConfig",
    "Clock",
    "Fidelity",
    "Load",
    "LoadOutcome",
    "LoadResult",
    "PlaneReady",
    "StoreFuture",
    "StoreOutcome",
    "StoreResult",
    "Ticket",
    "client_collector",
    "client_registry",
]
