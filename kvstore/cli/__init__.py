"""The command `kvstore`: one module a command, each with `add_parser(subparsers)` and `run(args) -> exit code`."""
