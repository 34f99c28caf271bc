"""The bundled engine: many requests at once on one model, resumed from and stored to the cache. See docs/ENGINE.md."""

from kvstore.engine_integration.engine.engine import Engine
from kvstore.engine_integration.engine.host import HostCache, agent_config, host_of
from kvstore.engine_integration.engine.options import EngineConfig, RequestOptions, ResumeMode
from kvstore.engine_integration.engine.request import FinishReason, Piece, Request, Response

__all__ = [
    "Engine",
    "EngineConfig",
    "FinishReason",
    "HostCache",
    "Piece",
    "Request",
    "RequestOptions",
    "Response",
    "ResumeMode",
    "agent_config",
    "host_of",
]
