"""Files that are there whole or not at all: written beside their name, then renamed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def whole_file(path: Path, named: str | Path | None = None) -> Iterator[IO[bytes]]:
    """What the block writes takes the name `path` once it ends; where it raises, nothing stays. An OSError of it names `named`, or
    `path`: nobody asked for the draft."""
    draft = path.with_name(f".{os.getpid()}.part" if len(path.name) > 200 else f"{path.name}.part-{os.getpid()}")
    try:
        with draft.open("wb") as file:
            yield file
        draft.replace(path)
    except OSError as error:
        if error.filename in (None, str(draft)):
            error.filename, error.filename2 = str(named or path), None
        raise
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


def write_whole(path: Path, text: str) -> None:
    with whole_file(path) as file:
        file.write(text.encode())
