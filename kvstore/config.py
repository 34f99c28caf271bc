"""Settings of this process: flag, then KVSTORE_*, then file, then default. What the whole cluster must agree on is in the cluster map.

The file is `$XDG_CONFIG_HOME/kvstore/config.toml`, else `/etc/kvstore/config.toml`; `--config` or KVSTORE_CONFIG names another.
Unknown keys and bad values are errors, never silently a default. Data, state and runtime files go to their XDG places.

    key         environment         flag         form            default
    map         KVSTORE_MAP         --map        path            the map of the `kvstore up` of this user
    timeout     KVSTORE_TIMEOUT     --timeout    time            5s
    log_level   KVSTORE_LOG_LEVEL   --log-level  info/warn/error  info    (node, directory, agent, lookup-service: read again on SIGHUP)
    color       KVSTORE_COLOR       --color      auto/always/never  auto
    nodes       KVSTORE_NODES       --nodes      1 to 128        12       (up, demo)
    capacity    KVSTORE_CAPACITY    --capacity   size            4GB      (up: of each node)
    io          KVSTORE_IO          --io         auto/buffered/direct  auto
    policy      KVSTORE_POLICY      --policy     lru/s3fifo/sieve  lru    (up, replay: what goes when room is needed)
    admit       KVSTORE_ADMIT       --admit      all/second-touch  all    (up, replay: what is written at all)
    write_budget  KVSTORE_WRITE_BUDGET  --write-budget  size  none     (up, replay: bytes of one node in a day)
    port        KVSTORE_PORT        --port       0 to 65000      7400     (up: the first of its ports)
    mover       KVSTORE_MOVER       --mover      a mover     auto     (engine serve: how blocks come into device memory; docs/RDMA.md)
    transport   KVSTORE_TRANSPORT   --transport  auto/tcp/rdma  auto      (put, get, replay, agent, engine serve: how reads move)
    rdma_traffic_class  KVSTORE_RDMA_TRAFFIC_CLASS  --rdma-traffic-class  0 to 255  0     (node; clients that put, get, ... make)
    rdma_gid_index      KVSTORE_RDMA_GID_INDEX      --rdma-gid-index      auto, 0 to 255  auto  (likewise)
    class       KVSTORE_CLASS       --class      name            chat     (put: retention class)
    [owners.*]                      --owner      tables          none     (node, up: floors and caps, kvstore/owners.py)
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvstore.clustermap import ADMISSIONS, POLICIES
from kvstore.errors import ConfigError
from kvstore.owners import Owner, owner_of_table
from kvstore.tomlfile import TomlFile
from kvstore.units import parse_bytes, parse_seconds

ENVIRONMENT_PREFIX: Final = "KVSTORE_"
LOG_LEVELS: Final = ("info", "warn", "error")


def xdg(kind: str, environ: Mapping[str, str] | None = None) -> Path:
    """Our directory of one XDG kind: "config", "data", "state" or "runtime". Not created here."""
    environ = os.environ if environ is None else environ
    name, default = {
        "config": ("XDG_CONFIG_HOME", ".config"),
        "data": ("XDG_DATA_HOME", ".local/share"),
        "state": ("XDG_STATE_HOME", ".local/state"),
        "runtime": ("XDG_RUNTIME_DIR", ".local/state"),
    }[kind]
    given = environ.get(name, "")
    base = Path(given) if given.startswith("/") else Path(environ.get("HOME") or Path.home()) / default
    return base / "kvstore"


def _integer(low: int, high: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        text = str(value)
        if isinstance(value, bool) or re.fullmatch(r"-?\d{1,9}", text) is None or not low <= int(text) <= high:
            raise ConfigError("E131", f'"{value}"', fix=f"write a whole number from {low} to {high}")
        return int(text)

    return parse


parse_traffic_class: Final = _integer(0, 255)


def parse_gid_index(value: Any) -> int:
    """-1 for "auto": the one that kernels/verbs.cpp ranks first."""
    if value == "auto":
        return -1
    try:
        return _integer(0, 255)(value)
    except ConfigError as error:
        raise ConfigError(error.code, error.what, fix="write auto, or a whole number from 0 to 255") from None


def _one_of(*names: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in names:
            raise ConfigError("E132", f'"{value}"', fix=f"write one of {', '.join(names)}")
        return str(value)

    return parse


def _path(value: Any) -> Path:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ConfigError("E132", f'"{value}"', fix="write a path")
    return Path(value).expanduser()


def _name(value: Any) -> str:
    if not isinstance(value, str) or re.fullmatch(r"[a-z0-9][a-z0-9.-]{0,62}", value) is None:
        raise ConfigError("E106", f'"{value}"', fix="use a-z, 0-9, - and up to 63 characters")
    return value


# Setting -> (how it is read, default).
_SETTINGS: Final[dict[str, tuple[Callable[[Any], Any], Any]]] = {
    "map": (_path, None),
    "timeout": (parse_seconds, 5.0),
    "log_level": (_one_of(*LOG_LEVELS), LOG_LEVELS[0]),
    "color": (_one_of("auto", "always", "never"), "auto"),
    "nodes": (_integer(1, 128), 12),
    "capacity": (parse_bytes, 4_000_000_000),
    "io": (_one_of("auto", "buffered", "direct"), "auto"),
    "policy": (_one_of(*POLICIES), "lru"),
    "admit": (_one_of(*ADMISSIONS), "all"),
    "write_budget": (parse_bytes, 0),
    "port": (_integer(0, 65_000), 7400),
    "mover": (_one_of("auto", "cpu", "cuda", "cuda-kernel", "loopback"), "auto"),
    "transport": (_one_of("auto", "tcp", "rdma"), "auto"),
    "rdma_traffic_class": (parse_traffic_class, 0),
    "rdma_gid_index": (parse_gid_index, -1),
    "class": (_name, "chat"),
}
_OTHER_VARIABLES: Final = frozenset({"KVSTORE_CONFIG", "KVSTORE_RDMA_DEVICE"})


@dataclass(frozen=True, slots=True)
class Value:
    """A setting's value and where it came from: "--map", "KVSTORE_MAP", "config.toml:3" or "default"."""

    value: Any
    origin: str


@dataclass(frozen=True)
class Settings:
    """All settings, each with its origin. `file` is the file that was read, if any; `warnings` are for the person, on stderr."""

    values: Mapping[str, Value]
    file: Path | None
    warnings: tuple[str, ...] = ()
    owners: tuple[Owner, ...] = ()  # of the file

    def __getitem__(self, name: str) -> Any:
        return self.values[name].value

    def origin(self, name: str) -> str:
        return self.values[name].origin


def load_settings(flags: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Settings:
    """Reads the file and the environment below `flags` (None: not given; "config": another file). Raises ConfigError with the place.

    A command with flags of these names but another meaning leaves them out of `flags`."""
    environ = os.environ if environ is None else environ
    path = _file_of(flags.get("config"), environ)
    values = {name: Value(default, "default") for name, (_, default) in _SETTINGS.items()}
    owners: list[Owner] = []
    if path is not None:
        table = TomlFile.load(path).table()
        for name, (parse, _) in _SETTINGS.items():
            if (value := table.parsed(name, parse, None)) is not None:
                values[name] = Value(value, table.file.at(key=name))
        owners = [owner_of_table(name, each) for name, each in table.subtables("owners").items()]
        table.done()
    for name, (parse, _) in _SETTINGS.items():
        variable = ENVIRONMENT_PREFIX + name.upper()
        if environ.get(variable):
            values[name] = Value(of_environment(name, environ), variable)
        if (flag := flags.get(name)) is not None:
            spelt = f"--{name.replace('_', '-')}"
            values[name] = Value(_parsed(parse, flag, f'{spelt} "{flag}" not understood'), spelt)
    return Settings(values, path, tuple(_strangers(environ)), tuple(owners))


def of_environment(name: str, environ: Mapping[str, str] | None = None) -> Any:
    """What the setting's variable says, else its default: for who has no command line. Raises ConfigError with the variable's name."""
    parse, default = _SETTINGS[name]
    variable = ENVIRONMENT_PREFIX + name.upper()
    text = (os.environ if environ is None else environ).get(variable)
    return _parsed(parse, text, f'{variable} is "{text}"') if text else default


def _parsed(parse: Callable[[Any], Any], value: Any, what: str) -> Any:
    try:
        return parse(value)
    except ConfigError as error:
        raise ConfigError(error.code, what, fix=error.fix) from None


def _file_of(flag: Any, environ: Mapping[str, str]) -> Path | None:
    named = flag or environ.get("KVSTORE_CONFIG")
    if named:
        return Path(named)  # a file that was named must be there
    candidates = (xdg("config", environ) / "config.toml", Path("/etc/kvstore/config.toml"))
    return next((path for path in candidates if path.exists()), None)


def _strangers(environ: Mapping[str, str]) -> list[str]:
    """One warning a KVSTORE_* variable that nearly names a setting: a slip of the keyboard must not pass in silence."""
    known = sorted({ENVIRONMENT_PREFIX + name.upper() for name in _SETTINGS} | _OTHER_VARIABLES)
    unknown = (name for name in sorted(environ) if name.startswith(ENVIRONMENT_PREFIX) and name not in known)
    near = ((name, difflib.get_close_matches(name, known, n=1, cutoff=0.8)) for name in unknown)
    return [f"{name} is no setting and was not used: did you mean {match[0]}?" for name, match in near if match]
