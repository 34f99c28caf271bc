"""Whether a long native call lets the interpreter run on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def runs_beside(call: Callable[[], object]) -> bool:
    """Another thread ran in the middle half of `call`, which is one native call of some milliseconds."""
    span: list[float] = []

    def timed() -> None:
        begin = time.perf_counter()
        call()
        span.extend((begin, time.perf_counter()))

    worker = threading.Thread(target=timed)
    seen: list[float] = []
    worker.start()
    while worker.is_alive():
        seen.append(time.perf_counter())
    worker.join()
    begin, end = span
    quarter = (end - begin) / 4
    return any(begin + quarter < moment < end - quarter for moment in seen)
