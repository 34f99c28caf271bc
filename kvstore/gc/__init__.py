"""Recency, retention and eviction: decides what goes; the native store deletes it."""

from kvstore.gc.evictor import Evictor
from kvstore.gc.policy import EvictionPolicy
from kvstore.gc.replacement import class_of

__all__ = ["EvictionPolicy", "Evictor", "class_of"]
