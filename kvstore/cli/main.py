"""Entry of the command `kvstore`: global flags, dispatch, and the one place where errors become lines and exit codes.

Exit codes: 0 done; 1 it ran and the answer is bad; 2 usage, configuration or input file; 3 not reachable in --timeout; 4 refused for
safety; 70 a bug of ours, crash file named; 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import errno
import importlib
import importlib.util
import os
import signal
import sys
import textwrap
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NoReturn

from kvstore.cli.output import Output
from kvstore.cli.signals import interrupt
from kvstore.config import load_settings, xdg
from kvstore.errors import KvstoreError, UsageError
from kvstore.streams import open_standard_streams
from kvstore.tomlfile import suggestion
from kvstore.version import described, revision, version

COMMANDS: Final = (
    "up",
    "node",
    "directory",
    "agent",
    "lookup-service",
    "status",
    "stats",
    "top",
    "dashboard",
    "mute",
    "unmute",
    "put",
    "get",
    "replay",
    "plan",
    "report",
    "demo",
    "bench",
    "engine",
    "fsck",
    "explain",
    "doctor",
)

HELP_COLUMNS: Final = 100
_DESCRIPTION: Final = "An open KV prompt cache: erasure-coded SSD block store for LLM inference hosts."
_EXAMPLES: Final = """\
start here:
  kvstore demo                       a minute: a cluster, a trace, two nodes lost, every byte checked; an engine, cold and warm
  kvstore engine serve               a model, a cluster as its cache, a chat page: see the second turn get faster
  kvstore up                         12 nodes on this machine; Ctrl-C stops them, data is kept
  kvstore status                     is it well, and if not, what to do
  kvstore top                        the same live
  kvstore put FILE && kvstore get FILE -o COPY
  kvstore replay trace.jsonl         what hit rate would your own traffic have?
  kvstore plan trace.jsonl           how many nodes, for which hit rate and retention?
  kvstore explain NODE_DOWN          what a health or error code means
  kvstore doctor                     what this host offers: RDMA, GPU, memory limits, disk, clock

exit codes: 0 done, 1 the answer is bad, 2 usage or input, 3 not reachable, 4 refused for safety, 70 a bug of ours, 130 Ctrl-C
settings: flag, then KVSTORE_* variable, then $XDG_CONFIG_HOME/kvstore/config.toml, then default
"""


class CommandParser(argparse.ArgumentParser):
    """A parser whose complaints are our errors, and which takes the global flags at any place on the line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        if kwargs.get("help") and "description" not in kwargs:
            kwargs["description"] = str(kwargs["help"])
        if kwargs.get("description"):
            kwargs["description"] = textwrap.fill(str(kwargs["description"]), HELP_COLUMNS)  # examples are left as they are
        super().__init__(*args, **kwargs)
        group = self.add_argument_group("global flags")
        unset: Any = argparse.SUPPRESS  # so that the command's own parser does not undo a flag given before its name
        group.add_argument("--map", metavar="FILE", default=unset, help="the cluster map (default: the cluster that `kvstore up` started)")
        group.add_argument("--config", metavar="FILE", default=unset, help="a configuration file")
        group.add_argument("--timeout", metavar="TIME", default=unset, help="how long to wait for an answer (default 5s)")
        group.add_argument("--json", action="store_true", default=unset, help="one JSON object on stdout, also on failure")
        group.add_argument("--color", metavar="WHEN", default=unset, help="auto, always or never")
        group.add_argument("-q", "--quiet", action="store_true", default=unset, help="no hints, no progress")
        group.add_argument("-v", "--verbose", action="store_true", default=unset, help="more about what is done")
        group.add_argument("--debug", action="store_true", default=unset, help="show the trace of an error")

    def error(self, message: str) -> NoReturn:
        what, fix = message, f"{self.prog} --help"
        if message.startswith("argument COMMAND: invalid choice: '"):
            word = message.split("'")[1]
            what, fix = f'no command "{word}"', suggestion(word, COMMANDS)
        raise UsageError("E140", what.replace("'", '"'), fix=fix)


def entry() -> None:
    """The console script."""
    open_standard_streams()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else whoever started us wants it ignored
        signal.signal(signal.SIGINT, interrupt)
    sys.exit(main(sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
    """Runs one command and returns its exit code. Never raises but for SystemExit of --help."""
    out = Output(json="--json" in argv)  # until the arguments are understood
    debug = "--debug" in argv
    try:
        try:
            args = _parse(argv)
            out = args.out
            for warning in args.settings.warnings:
                out.warn(warning)
            code = int(args.run(args))
            out.finish(code)
            sys.stdout.flush()
            return code
        except SystemExit:  # --help: written here, or the interpreter complains of a reader that went away
            sys.stdout.flush()
            raise
        except KvstoreError as error:
            if debug:
                traceback.print_exc()
            if error.exit_code == 70:
                return _crashed(error, argv, out)
            out.finish(error.exit_code, error)
            return error.exit_code
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            out.finish(130, KvstoreError("E701", "interrupted", "Ctrl-C"))
            return 130
        except BrokenPipeError:
            raise
        except Exception as error:
            if debug:
                traceback.print_exc()
            if isinstance(error, MemoryError):
                error = OSError(errno.ENOMEM, "cannot allocate memory", "the answer")
            if isinstance(error, OSError) and error.errno in _SURROUNDINGS:
                told = _told(error)
                _give_up_stdout(error)
                out.finish(told.exit_code, told)
                return told.exit_code
            return _crashed(error, argv, out)
    except BrokenPipeError:
        # The reader of our output has seen enough (`kvstore stats | head`).
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(prog="kvstore", description=_DESCRIPTION, epilog=_EXAMPLES)
    parser.add_argument("--version", action="store_true", help="the version and its commit")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=CommandParser)
    for name, module in _modules(argv):
        module.add_parser(subparsers)
        subparsers.choices[name].set_defaults(run=module.run)
    for at, word in enumerate(argv):  # a variable that was not set, as a rule; as a path it would be the current directory
        flag, _, value = word.partition("=")
        if not word or (flag.startswith("--") and flag != word and not value):
            what = flag or (argv[at - 1] if at and argv[at - 1].startswith("-") else f"argument {at + 1}")
            raise UsageError("E140", f"{what} is empty", fix="give a value, or leave it out")
    args, unknown = parser.parse_known_args(argv)
    if unknown:  # parse_args would name the help of the whole
        raise UsageError(
            "E140", f"unrecognized arguments: {' '.join(unknown)}", fix=f"kvstore {args.command or ''} --help".replace("  ", " ")
        )
    for flag in ("json", "quiet", "verbose", "debug"):
        setattr(args, flag, getattr(args, flag, False))
    if args.command is None and not args.version:
        parser.print_help()
        raise SystemExit(0)
    # A command names the settings that are flags of its own; another's `--capacity 25%` is none of our business.
    own = ("map", "timeout", "color", "config", *getattr(args, "settings_flags", ()))
    args.settings = load_settings({name: getattr(args, name, None) for name in own})
    args.out = Output("version" if args.version else args.command, args.json, args.quiet, args.verbose, args.settings["color"])
    if args.version:
        args.run = _tell_version
    return args


def _tell_version(args: argparse.Namespace) -> int:
    args.out.line(described())
    args.out.result({"version": version(), "revision": revision()})
    return 0


def _modules(argv: Sequence[str]) -> list[tuple[str, ModuleType]]:
    """The command on the line alone, so that no command waits for another's imports; all of them where none is named."""
    there = [name for name in COMMANDS if importlib.util.find_spec(_module_of(name))]
    named = next((word for word in argv if word in there), None)
    return [(name, importlib.import_module(_module_of(name))) for name in ([named] if named else there)]


def _module_of(command: str) -> str:
    return f"kvstore.cli.{command.replace('-', '_')}"


# What the machine answers and a person can mend; any other OSError that gets this far is our bug.
_SURROUNDINGS: Final = {
    errno.ENOSPC: ("E143", "free some space, or name another place"),
    errno.EDQUOT: ("E143", "free some space, or name another place"),
    errno.ENOMEM: ("E143", "free some memory"),
    errno.EMFILE: ("E143", "raise the limit of open files: ulimit -n 65536"),
    errno.EACCES: ("E100", "name a place where you have the right to"),
    errno.EPERM: ("E100", "name a place where you have the right to"),
    errno.EROFS: ("E100", "name a place that can be written to"),
    errno.ENOENT: ("E100", "check the path"),
    errno.ENOTDIR: ("E100", "check the path"),
    errno.EISDIR: ("E100", "name a file"),
    errno.ENAMETOOLONG: ("E100", "give a shorter name"),
    errno.EIO: ("E100", "look at the disk: dmesg"),
}


def _told(error: OSError) -> UsageError:
    code, fix = _SURROUNDINGS[error.errno or 0]
    return UsageError(code, str(error.filename or "a write"), (error.strerror or str(error)).lower(), fix)


def _give_up_stdout(error: OSError) -> None:
    """Where it is standard output itself that is full, the interpreter's last flush must not complain a second time."""
    if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _crashed(error: BaseException, argv: Sequence[str], out: Output) -> int:
    """A bug of ours: everything needed to find it goes into a file, one line to the person."""
    now = datetime.datetime.now(datetime.UTC)
    path = xdg("state") / f"crash-{now:%Y%m%dT%H%M%S}-{os.getpid()}.txt"
    lines = [f"{described()}  python {sys.version.split()[0]}  {now.isoformat()}", f"command: {' '.join(argv)}", ""]
    text = "\n".join(lines + traceback.format_exception(error))
    where = "see the trace above"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, errors="backslashreplace")  # an argument may be any bytes
        where = f"report it with {path}"
    except OSError:
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr)
    cause = str(error).splitlines()[0] if str(error) else ""
    what = f"a bug in kvstore ({type(error).__name__})"
    out.finish(70, KvstoreError("E999", what, cause, where))
    return 70


def state_file(*parts: str) -> Path:
    """A path below our state directory; its parents exist."""
    path = xdg("state").joinpath(*parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
