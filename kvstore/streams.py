"""Standard input, output and error that are there, whatever we were started with."""

from __future__ import annotations

import io
import os
import sys


def open_standard_streams() -> None:
    """Opens on /dev/null those that were closed: the next file or socket would take their number, and get what is meant for a person."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115, PTH123  for as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error does: the name of a file may be any bytes
