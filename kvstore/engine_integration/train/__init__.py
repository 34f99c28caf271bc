"""Training `mini` and `tiny` on the standard library's sources: `python -m kvstore.engine_integration.train`. docs/ENGINE.md tells how."""
