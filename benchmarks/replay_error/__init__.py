"""How far bounded replay moves the answer of the bundled model: `python -m benchmarks.replay_error` writes docs/REPLAY_ERROR.md.

texts         what is read: held-out code, and prose
probe         a text with all its blocks and window entries; runs that resume on it; how two runs' answers differ
tally         what is kept of a measurement: counts of sizes, and one line a sample; saved as JSON, and added to by the next run
experiments   what is compared with what; a sample each
costs         seconds of each way to resume, and what a window entry in RAM is worth
report        tables, plots and the document, from the JSON alone
"""
