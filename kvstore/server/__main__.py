"""`python -m kvstore.server`: one storage daemon, without the rest of the command line."""

from __future__ import annotations

import argparse
import sys

from kvstore.errors import KvstoreError
from kvstore.server.config import add_node_arguments, config_from_args
from kvstore.streams import open_standard_streams


def main() -> int:
    open_standard_streams()
    parser = argparse.ArgumentParser(prog="kvstore node", description="One storage daemon on one disk.", allow_abbrev=False)
    add_node_arguments(parser)
    args = parser.parse_args()
    try:
        config = config_from_args(args)
        from kvstore.server.node import run_node  # after the arguments: --help needs no native core

        return run_node(config)
    except KvstoreError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
