"""Recency, retention and eviction: decides what goes; the native store deletes it."""
