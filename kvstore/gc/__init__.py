"""Recency, retention and eviction: decides what goes; the native store deletes it."""

from kvstore.gc.evictor import Evictor
from kvstore.gc.policy import EvictionPolicy

__all__ = ["EvictionPolicy", "Evictor"]
