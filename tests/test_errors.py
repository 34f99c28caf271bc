"""The error tree: its form on a terminal, exit codes, and that each error survives a process boundary."""

from __future__ import annotations

import copy
import inspect

import pytest

from kvstore import errors

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.KvstoreError)]


def test_an_error_reads_as_one_line_that_says_what_to_do() -> None:
    whole = errors.ConfigError("E102", "config.toml:7", 'capacity "4T8" is not a size', "write 4.8TB")
    assert str(whole) == 'error[E102] config.toml:7: capacity "4T8" is not a size. Fix: write 4.8TB'
    assert str(errors.ConfigError("E102", "config.toml:7")) == "error[E102] config.toml:7"
    odd = errors.ConfigError("E132", 'KVSTORE_TRANSPORT is "rd\nma\x1b[31m é"', fix="write one of auto, tcp, rdma")
    assert str(odd) == 'error[E132] KVSTORE_TRANSPORT is "rd\\nma\\x1b[31m é". Fix: write one of auto, tcp, rdma'


def test_numbers_ride_as_attributes() -> None:
    in_use = errors.DirectoryInUse(4121, "disk0")
    assert in_use.pid == 4121
    assert "4121" in str(in_use)
    full = errors.NoSpace(100, 90, 20)
    assert (full.capacity_bytes, full.allocated_bytes, full.required_bytes) == (100, 90, 20)


def test_exit_codes_are_those_of_the_command_line() -> None:
    codes = {c.__name__: c.exit_code for c in CLASSES}
    assert set(codes.values()) <= {1, 2, 3, 4, 70, 130}
    assert codes["ConfigError"] == codes["DirectoryInUse"] == 2
    assert codes["DeadlineExceeded"] == 3
    assert codes["Refused"] == 4
    assert codes["CodecError"] == 70


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_is_in_the_drawing_and_can_be_copied(kind: type[errors.KvstoreError]) -> None:
    assert errors.__doc__ is not None
    assert kind.__name__ in errors.__doc__
    made: errors.KvstoreError
    if kind is errors.DirectoryInUse:
        made = errors.DirectoryInUse(1, "d")
    elif kind is errors.NoSpace:
        made = errors.NoSpace(3, 2, 1)
    elif kind is errors.Cancelled:
        made = errors.Cancelled("load")
    else:
        made = kind("E999", "what", "cause", "fix")
    again = copy.copy(made)  # the way a process pool carries it: class and args
    assert type(again) is kind
    assert str(again) == str(made)
