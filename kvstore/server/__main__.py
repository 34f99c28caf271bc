"""`python -m kvstore.server [directory]`: one storage daemon, or one window directory, without the rest of the command line."""

from __future__ import annotations

import argparse
import sys

from kvstore.errors import KvstoreError
from kvstore.server.config import add_node_arguments, config_from_args
from kvstore.streams import open_standard_streams


def main() -> int:
    open_standard_streams()
    try:
        return _directory(sys.argv[2:]) if sys.argv[1:2] == ["directory"] else _node(sys.argv[1:])
    except KvstoreError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _node(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="kvstore node", description="One storage daemon on one disk.", allow_abbrev=False)
    add_node_arguments(parser)
    config = config_from_args(parser.parse_args(arguments))
    from kvstore.server.node import run_node  # after the arguments: --help needs no native core

    return run_node(config)


def _directory(arguments: list[str]) -> int:
    from kvstore.server.directory_config import add_directory_arguments, directory_config

    parser = argparse.ArgumentParser(prog="kvstore directory", description="One window directory.", allow_abbrev=False)
    add_directory_arguments(parser)
    config = directory_config(parser.parse_args(arguments))
    from kvstore.server.directory import run_directory

    return run_directory(config)


if __name__ == "__main__":
    sys.exit(main())
