"""Every health code that `kvstore status` can show and every error code that the command line prints, and what to do about each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class HealthCode:
    """A check: `severity` is its usual one; `causes` are in the order to look at them."""

    severity: str
    meaning: str
    measured: str
    causes: tuple[str, ...]
    fix: str


@dataclass(frozen=True, slots=True)
class ErrorCode:
    meaning: str
    causes: tuple[str, ...]
    fix: str


HEALTH: Final = {
    "HOSTS_BELOW_STRIPE": HealthCode(
        "WARN",
        "fewer hosts are up than an extent has shards: what is written now is short of shards (ERR below k: nothing can be written)",
        "hosts of the newest epoch with at least one answering node, against k+m; with fewer hosts in the map than k+m: nodes",
        ("hosts or daemons are down", "the map was planned with too few hosts"),
        "bring a host back; until then reads go on as long as 10 of 12 shards answer",
    ),
    "HOSTS_NO_MARGIN": HealthCode(
        "WARN",
        "exactly as many hosts are up as an extent has shards, and others of the map are down: the next loss stops whole writes",
        "hosts of the newest epoch that answer, against k+m",
        ("a host is down or being serviced",),
        "bring a host back, or add one in a new epoch",
    ),
    "LOSSES_NOT_SURVIVED": HealthCode(
        "WARN",
        "the map has so few hosts or nodes that losing fewer than m of them already loses data (it is a cache: the data would be misses)",
        "the worst placement group of the newest epoch, by placement",
        ("fewer hosts than k+m shards", "several daemons on one host"),
        "add hosts, or choose a smaller k+m for a test cluster",
    ),
    "NODE_DOWN": HealthCode(
        "WARN",
        "a node of the map does not answer (ERR where more than m are down: some extents cannot be read)",
        "its admin address, asked now, within --timeout",
        ("the daemon was stopped or crashed", "its host is down", "the network path is cut", "the map has an old address"),
        "look at the host and the daemon's log; start it: kvstore node --data DIR --id NODE --map FILE",
    ),
    "NODE_EPOCH_BEHIND": HealthCode(
        "WARN",
        "a node serves an older map than the newest epoch",
        "the epoch it reports against the map's newest",
        ("it was not restarted after the map file changed", "its copy of the map is old"),
        "give it the new map and restart it",
    ),
    "EVICTION_STALLED": HealthCode(
        "ERR",
        "a node is full and evicts nothing, so it refuses writes",
        "used bytes above the high watermark, writes refused with NO_SPACE since it started, and no eviction between two looks",
        ("too many bytes are promised or pinned", "floors of namespaces add up to the disk", "the evictor stopped: read the log"),
        "read the node's log; restart it if the evictor stopped; give it more capacity if floors fill it",
    ),
    "RETENTION_SHORT": HealthCode(
        "WARN",
        "a retention class is kept for a shorter time than the map says",
        "the age of the oldest on nodes that evicted the class for room; of each placement group the (m+1)-th tightest decides",
        ("more is written than the disks hold for that long", "floors of other owners leave it little room"),
        "add space, write less under that class, or lower its keep in the map",
    ),
    "CHECKSUM_ERRORS": HealthCode(
        "WARN",
        "a node found or was told of shards whose bytes fail their checksum (ERR from 100 on one disk)",
        "its count since it started",
        ("a failing disk", "failing memory", "somebody wrote to its files"),
        "kvstore fsck DIR on that node while it is stopped; look at SMART; replace the disk if it goes on",
    ),
    "INDEX_REBUILT": HealthCode(
        "INFO",
        "a node rebuilt its index from segment footers at its last start",
        "the mode of its last start",
        ("power loss or a crash of the host", "two crashes within a minute", "an index error"),
        "look why it stopped; nothing is lost but some seconds of recency",
    ),
    "CLOCK_SKEW": HealthCode(
        "WARN",
        "a node's clock is off from this host's by more than 250 ms",
        "the time in its answer against the middle of the question's flight",
        ("no time synchronisation on one of the hosts",),
        "chronyc tracking, on both",
    ),
    "VERSION_MIXED": HealthCode(
        "WARN",
        "nodes run different versions of kvstore",
        "the version each reports",
        ("an upgrade is under way, or stopped half-way",),
        "finish the upgrade",
    ),
}

ERRORS: Final = {
    "E100": ErrorCode("a file or directory cannot be used", ("it is not there", "no permission", "another kind"), "check the path"),
    "E101": ErrorCode("unknown key in a file", ("a misspelt key", "a key of another version"), "correct it; the message names the nearest"),
    "E102": ErrorCode("a size or time cannot be read", ("a unit that does not exist",), "sizes: 4.8TB, 16GiB; times: 250ms, 10s, 3h, 7d"),
    "E106": ErrorCode("a name has characters it must not have", ("blanks or capitals",), "use a-z, 0-9, - and up to 63 characters"),
    "E107": ErrorCode("a port is taken", ("another cluster runs here", "another program listens there"), "stop it, or --port N"),
    "E110": ErrorCode("a line of a trace cannot be used", ("a damaged file", "another format"), "drop the line, or --skip-bad"),
    "E111": ErrorCode("a file is no trace that is known here", ("another format", "an empty file"), "see kvstore replay --help"),
    "E120": ErrorCode("a directory is used by another process", ("a daemon or cluster runs there",), "stop that one, or name another"),
    "E124": ErrorCode("an address cannot be listened on", ("it is not this host's", "a port below 1024"), "--host and --port of this host"),
    "E130": ErrorCode("a required field is missing", ("a file cut short",), "add it"),
    "E131": ErrorCode("a number is out of range or no number", (), "the message names the range"),
    "E132": ErrorCode("a text has the wrong form", (), "the message names the form"),
    "E133": ErrorCode("a cluster map contradicts itself", ("edited by hand",), "see docs/CLUSTER.md"),
    "E134": ErrorCode("two retention classes share an id", (), "give each its own id, 0 to 15"),
    "E135": ErrorCode("a node id is not in the cluster map", ("wrong map", "misspelt id"), "add the node to the map or correct the id"),
    "E136": ErrorCode("a directory holds a cluster of another shape", ("--nodes changed",), "same shape, another directory, or --fresh"),
    "E140": ErrorCode("the command line was not understood", (), "kvstore COMMAND --help"),
    "E141": ErrorCode("no cluster is known", ("no `kvstore up` runs for this user", "no --map"), "kvstore up, or --map FILE"),
    "E142": ErrorCode("an input file cannot be used", ("wrong file", "not readable"), "the message says what is expected"),
    "E143": ErrorCode("not enough disk space or memory to start", ("a full disk",), "free some, or ask for less: --capacity"),
    "E144": ErrorCode("a stored file is not known here", ("it was put by another user or host",), "kvstore get --list, or give its handle"),
    "E121": ErrorCode("a daemon's setting is out of range, or two ports are the same", (), "the message names the range"),
    "E122": ErrorCode("a data directory cannot be used", ("it is not there", "no directory", "no permission"), "make it, or name another"),
    "E125": ErrorCode("a data directory is another node's", ("--id or --data mixed up", "a disk that moved"), "name this node's own"),
    "E123": ErrorCode("a disk is full", (), "free space on it, or name another disk with --data"),
    "E150": ErrorCode("a client's setting is out of range", (), "the message names the range; see kvstore/client/config.py"),
    "E152": ErrorCode("the folder of an access log cannot be used", ("no right to write", "its salt is damaged"), "name another folder"),
    "E151": ErrorCode("a command needs the sources", ("an installed package",), "run it in a checkout"),
    "E160": ErrorCode("a command needs a Python package that is not installed", ("kvstore without its extras",), "the message names it"),
    "E161": ErrorCode("an access log cannot be used", ("wrong directory", "files cut short", "another version"), "see docs/REPORT.md"),
    "E162": ErrorCode("a query was refused or is wrong", ("no SELECT", "reads more than the log", "misspelt"), "see docs/REPORT.md"),
    "E201": ErrorCode("a daemon did not start", ("see its log",), "read the log that the message names"),
    "E202": ErrorCode("no node of the cluster answers", ("the cluster is stopped", "wrong map", "network"), "kvstore up, or correct --map"),
    "E302": ErrorCode("a node cannot be spared now", ("others are down",), "bring the others back first"),
    "E210": ErrorCode("something took longer than it was given", ("a loaded cluster",), "wait longer"),
    "E301": ErrorCode("refused for safety", ("it would overwrite or erase something",), "add the flag that the message names"),
    "E303": ErrorCode("a repair was not confirmed", ("no terminal to ask on",), "add --yes"),
    "E401": ErrorCode("no room on a node", ("its capacity is used up and nothing may go",), "more capacity; see EVICTION_STALLED"),
    "E402": ErrorCode("bytes came back that are not those stored", ("a fault of kvstore or of memory",), "keep everything and report it"),
    "E403": ErrorCode("a stored file is not all there", ("evicted: its class is over", "too many nodes are down"), "put it again"),
    "E404": ErrorCode("a store failed", ("fewer than k nodes took it", "disks full"), "kvstore status"),
    "E701": ErrorCode("interrupted", ("Ctrl-C",), "start it again"),
    "E999": ErrorCode("a bug in kvstore", (), "report it with the crash file"),
}  # fmt: skip

# What a code of each hundred is about; kvstore/errors.py draws the tree.
RANGES: Final = {
    "E1": "usage, configuration or input: correct it and try again",
    "E2": "a peer did not answer: it may work later",
    "E3": "refused for safety: the message names the flag that insists",
    "E4": "a node's disk or index",
    "E5": "calling code broke an interface of this package",
    "E6": "a peer broke the protocol, or speaks another version",
    "E7": "cancelled by the caller",
    "E9": "a bug in kvstore",
}
