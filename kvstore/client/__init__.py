"""Lookup, load and store: what an inference host links."""
