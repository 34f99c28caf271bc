"""What kvstore promises, measured: `make bench`, or `python -m benchmarks --only ID`. docs/PERFORMANCE.md says how and what was found."""
