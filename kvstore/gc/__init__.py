"""Recency, retention, eviction and scrub: decides what goes and what is looked at; the native store does it."""

from kvstore.gc.evictor import Evictor
from kvstore.gc.policy import EvictionPolicy
from kvstore.gc.replacement import class_of
from kvstore.gc.scrub import Scrubber

__all__ = ["EvictionPolicy", "Evictor", "Scrubber", "class_of"]
