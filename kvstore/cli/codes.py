"""Every health code that `kvstore status` can show and every error code that the command line prints, and what to do about each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class HealthCode:
    """A check: `severity` is its usual one; `causes` are in the order to look at them. What has lasted less than `for_seconds` is shown as
    INFO: it may be gone by itself. `commands` are for who looks into it."""

    severity: str
    meaning: str
    measured: str
    causes: tuple[str, ...]
    fix: str
    commands: tuple[str, ...] = ("kvstore status --nodes",)
    for_seconds: float = 0.0


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
        commands=("kvstore status --nodes",),
    ),
    "HOSTS_NO_MARGIN": HealthCode(
        "WARN",
        "exactly as many hosts are up as an extent has shards, and others of the map are down: the next loss stops whole writes",
        "hosts of the newest epoch that answer, against k+m",
        ("a host is down or being serviced",),
        "bring a host back, or add one in a new epoch",
        commands=("kvstore status --nodes", "kvstore status --without HOST"),
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
        commands=("kvstore status --nodes", "journalctl -u kvstore-node", "kvstore status --without NODE"),
    ),
    "NODE_EPOCH_BEHIND": HealthCode(
        "WARN",
        "a node serves an older map than the newest epoch",
        "the epoch it reports against the map's newest",
        ("it was not restarted after the map file changed", "its copy of the map is old"),
        "give it the new map and restart it",
        commands=("kvstore status --nodes",),
        for_seconds=60.0,
    ),
    "MAP_BEHIND": HealthCode(
        "WARN",
        "nodes know a newer epoch than the map given here: members that it added are not looked at, and nodes refuse what is placed by it",
        "the newest epoch that a node reports against the map's newest",
        ("the map file here is an old copy",),
        "copy the nodes' map file here, or name it with --map",
        commands=("kvstore status --nodes",),
    ),
    "EVICTION_STALLED": HealthCode(
        "ERR",
        "a node is full and evicts nothing, so it refuses writes",
        "used bytes at 99 % or more, writes refused for room, and nothing evicted since its start, or by its own word in 10 s",
        ("too many bytes are promised or pinned", "floors of namespaces add up to the disk", "the evictor stopped: read the log"),
        "read the node's log; restart it if the evictor stopped; give it more capacity if floors fill it",
        commands=("kvstore status --nodes", "kvstore stats"),
    ),
    "DISK_FULL": HealthCode(
        "WARN",
        "a node's file system has so little free that it drops blocks for that, whatever its capacity (ERR: it refuses writes)",
        "bytes free on the file system of its data directory, with what is being given back, against 101 MB; ERR below 35 MB",
        ("something else fills the disk: logs, dumps, another daemon", "the capacities of its nodes are more than the disk has"),
        "free space on that disk, or start the node with a --capacity that it has",
        commands=("df -h DIR", "du -xsh DIR/*", "kvstore status --json | jq .data.nodes"),
    ),
    "RETENTION_SHORT": HealthCode(
        "WARN",
        "a retention class is kept for a shorter time than the map says",
        "the age of the oldest on nodes that evicted the class for room; of each placement group the (m+1)-th tightest decides",
        ("more is written than the disks hold for that long", "floors of other owners leave it little room"),
        "add space, write less under that class, or lower its keep in the map",
        commands=("kvstore status --json | jq .data.kept", "kvstore plan --help"),
    ),
    "STRIPE_DEGRADED": HealthCode(
        "WARN",
        "nodes are down for so long that extents written before live with fewer shards than they were written with",
        "placement groups of the newest epoch with 1 to m of their k+m nodes down",
        ("a host is down for longer than a restart takes", "a disk was lost"),
        "bring the nodes back; where they are gone for good, add others in a new epoch: what was stored ages away",
        commands=("kvstore status --nodes", "kvstore status --without HOST"),
        for_seconds=600.0,
    ),
    "STRIPE_LOST": HealthCode(
        "ERR",
        "of some placement groups more than m nodes are down: their extents are misses until the nodes are back",
        "placement groups of the newest epoch with more than m of their k+m nodes down",
        ("more than m hosts are down: a rack, a switch, a power feed, a bad upgrade",),
        "find what the hosts have in common; nothing is to be restored: it is a cache",
        commands=("kvstore status --nodes",),
    ),
    "NODE_FLAPPING": HealthCode(
        "WARN",
        "a node started three times or more within ten minutes",
        "the starts that its data directory remembers",
        ("it crashes at a start: read its log", "a supervisor that restarts it too eagerly", "out of memory", "a failing disk"),
        "stop it and read its log; start it again once the cause is found",
        commands=("journalctl -u kvstore-node", "dmesg", "kvstore status --without NODE"),
    ),
    "ZOMBIE_BYTES": HealthCode(
        "WARN",
        "more than 2 % of a node's capacity holds bytes that no index entry owns",
        "bytes allocated that nothing accounts for, and bytes dropped and not yet given back, against the capacity",
        ("holes are punched more slowly than the evictor drops", "reads that never end hold the bytes", "a slow file system"),
        "look at the disk's latency; kvstore fsck DIR while the node is stopped tells what nobody owns",
        commands=("kvstore status --json | jq .data.space", "iostat -x 5", "kvstore fsck DIR"),
        for_seconds=600.0,
    ),
    "DISK_WEAR": HealthCode(
        "WARN",
        "a disk has used more than 80 % of its rated life (ERR above 95 %)",
        "what the disk says of itself, each hour: SMART through smartctl, or the eMMC's life time; unknown where neither can be read",
        ("more is written to it each day than it was bought for", "its age"),
        "order another, and move the node to it in time; write less: admission, shorter classes",
        commands=("smartctl -a DEVICE", "kvstore status --without NODE", "kvstore plan --help"),
    ),
    "DISK_SLOW": HealthCode(
        "WARN",
        "a node answers READ requests four times slower than the others",
        "p99 of its READ requests in the last five minutes against the median of the others' p99; with 100 requests each, and above 5 ms",
        ("a disk that throttles or fails", "something else on that host", "its network path"),
        "look at SMART and at the host; take the node away if it stays: readers go around it, at the price of decoding",
        commands=("kvstore status --nodes", "iostat -x 5", "smartctl -a DEVICE", "kvstore status --without NODE"),
    ),
    "NAMESPACE_ZERO_HIT": HealthCode(
        "WARN",
        "a client has looked up prompts for 30 minutes, and not one token of them was there",
        "the counters of the clients that --client names, since their start, by owner",
        (
            "its first day",
            "another model, dtype, layout or adapter than what was stored",
            "another tenant secret",
            "PYTHONHASHSEED or block size differs between engines that bring their own hash",
            "the retention class is none or batch",
        ),
        "compare two prompts that should share: kvstore explain A.json B.json",
        commands=("kvstore explain A.json B.json", "kvstore report"),
        for_seconds=1800.0,
    ),
    "CHECKSUM_ERRORS": HealthCode(
        "WARN",
        "a node found shards whose bytes fail their checksum, and dropped them (ERR from 100 on one disk)",
        "its count since it started",
        ("a failing disk", "failing memory", "somebody wrote to its files"),
        "kvstore fsck DIR on that node while it is stopped; look at SMART; replace the disk if it goes on",
        commands=("kvstore fsck DIR", "smartctl -a DEVICE", "kvstore status --without NODE"),
    ),
    "INDEX_REBUILT": HealthCode(
        "INFO",
        "a node rebuilt its index from segment footers at its last start",
        "the mode of its last start",
        ("power loss or a crash of the host", "two crashes within a minute", "an index error"),
        "look why it stopped; nothing is lost but some seconds of recency",
        commands=("journalctl -u kvstore-node", "dmesg"),
    ),
    "CLOCK_SKEW": HealthCode(
        "WARN",
        "a node's clock is off from this host's by more than 250 ms",
        "the time in its answer against the middle of the question's flight",
        ("no time synchronisation on one of the hosts",),
        "chronyc tracking, on both",
        commands=("chronyc tracking",),
    ),
    "DIRECTORY_DOWN": HealthCode(
        "WARN",
        "a window directory does not answer: the windows of its share of the keys are misses, and are computed again",
        "status, top and the dashboard ask each directory that the map lists, or --directory names, over its own protocol",
        ("it is stopped, or its host is", "the map lists an address that is no directory of this cluster", "network"),
        "start it again: kvstore directory --listen ADDRESS --map MAP; it needs no data",
        commands=("kvstore status", "journalctl -u kvstore-directory"),
    ),
    "VERSION_MIXED": HealthCode(
        "WARN",
        "nodes run different versions of kvstore, for more than a day",
        "the version each reports, and how long the newest of both run",
        ("an upgrade is under way, or stopped half-way",),
        "finish the upgrade",
        commands=("kvstore status --json | jq .data.nodes[].version",),
        for_seconds=86400.0,
    ),
}

ERRORS: Final = {
    "E100": ErrorCode("a file or directory cannot be used", ("it is not there", "no permission", "another kind"), "check the path"),
    "E101": ErrorCode("unknown key in a file", ("a misspelt key", "a key of another version"), "correct it; the message names the nearest"),
    "E102": ErrorCode("a size or time cannot be read", ("a unit that does not exist",), "sizes: 4.8TB, 16GiB; times: 250ms, 10s, 3h, 7d"),
    "E103": ErrorCode("fewer nodes than an extent has shards", (), "add nodes; the message names how many"),
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
    "E137": ErrorCode(
        "the cluster map given is older than the nodes'", ("an epoch was added since",), "copy the nodes' map file there"
    ),
    "E140": ErrorCode("the command line was not understood", (), "kvstore COMMAND --help"),
    "E141": ErrorCode("no cluster is known", ("no `kvstore up` runs for this user", "no --map"), "kvstore up, or --map FILE"),
    "E142": ErrorCode("an input file cannot be used", ("wrong file", "not readable"), "the message says what is expected"),
    "E143": ErrorCode("too little disk, memory or descriptors", ("a full disk", "a low ulimit -n"), "free some, or ask for less"),
    "E144": ErrorCode("a stored file is not known here", ("it was put by another user or host",), "kvstore get --list, or give its handle"),
    "E147": ErrorCode("memory cannot be registered for RDMA", ("a low limit of locked memory",), "ulimit -l unlimited"),
    "E148": ErrorCode("an RDMA device refuses what it was asked", ("its limits", "its driver"), "fewer connections, dmesg, or use TCP"),
    "E121": ErrorCode("a daemon's setting is out of range, or two ports are the same", (), "the message names the range"),
    "E122": ErrorCode("a data directory cannot be used", ("it is not there", "no directory", "no permission"), "make it, or name another"),
    "E125": ErrorCode("a data directory is another node's", ("--id or --data mixed up", "a disk that moved"), "name this node's own"),
    "E123": ErrorCode("a disk is full", (), "free space on it, or name another disk with --data"),
    "E145": ErrorCode("the library of RDMA cannot be used", ("no libibverbs1 here", "it is too old"), "install it; or --transport tcp"),
    "E146": ErrorCode("there is no RDMA device to use", ("none", "its port is down", "another name"), "kvstore doctor; or --transport tcp"),
    "E149": ErrorCode("no RDMA device has a GID of that index", ("the setting of another host",), "kvstore doctor lists them; or auto"),
    "E150": ErrorCode("a client's setting is out of range", (), "the message names the range; see kvstore/client/config.py"),
    "E152": ErrorCode("the folder of an access log cannot be used", ("no right to write", "its salt is damaged"), "name another folder"),
    "E151": ErrorCode("a command needs the sources", ("an installed package",), "run it in a checkout"),
    "E156": ErrorCode("a mover cannot run on this host", ("no GPU, no RDMA device, or a package is missing",), "kvstore doctor --measure"),
    "E157": ErrorCode("there is no mover of that name", ("misspelt",), "auto, cpu, cuda, cuda-kernel or loopback"),
    "E158": ErrorCode("encrypted blocks were to land in a GPU", (), "load that namespace through host RAM"),
    "E160": ErrorCode("a command needs a Python package that is not installed", ("kvstore without its extras",), "the message names it"),
    "E161": ErrorCode("an access log cannot be used", ("wrong directory", "files cut short", "another version"), "see docs/REPORT.md"),
    "E162": ErrorCode("a query was refused or is wrong", ("no SELECT", "reads more than the log", "misspelt"), "see docs/REPORT.md"),
    "E170": ErrorCode("a file of weights cannot be read", ("wrong path", "no permission"), "name a file of weights"),
    "E171": ErrorCode("a file is no file of weights", ("cut short", "another format"), "take one that kvstore wrote, or safetensors"),
    "E172": ErrorCode("texts to train on are not the pinned ones", ("another library", "changed files"), "name the pinned one: --corpus"),
    "E173": ErrorCode("a checkpoint is of other training", ("other settings", "another --out"), "name another --out, or ask for the same"),
    "E174": ErrorCode("weights are of another model size", ("the wrong file",), "name the size that they were made for"),
    "E180": ErrorCode("a window directory's setting is out of range", (), "the message names the range or the form"),
    "E196": ErrorCode("an agent's limit towards others is out of range", (), "the message names the range; see docs/PROTOCOL.md"),
    "E190": ErrorCode("there is no model of that size", ("misspelt",), "--model mini, or tiny"),
    "E185": ErrorCode("a setting of the agent process is out of range", (), "the message names the range"),
    "E186": ErrorCode("no shared memory of that size can be had", ("more than the host has", "a cgroup limit"), "ask for less: --memory"),
    "E187": ErrorCode("a socket's path is too long", ("a deep runtime directory",), "name a shorter one with --socket"),
    "E188": ErrorCode("an agent runs already at that socket", ("it was started twice",), "stop that one, or name another with --socket"),
    "E189": ErrorCode("the agent cannot listen for other agents", ("the port is taken", "no address of this host"), "--listen another"),
    "E197": ErrorCode("a model card names no possible model", ("a section or a digest is missing",), "have the engine write it anew"),
    "E198": ErrorCode("a lookup service's setting is out of range", (), "the message names the range; see docs/LOOKUP_SERVICE.md"),
    "E201": ErrorCode("a daemon did not start", ("see its log",), "read the log that the message names"),
    "E202": ErrorCode("no node of the cluster answers", ("the cluster is stopped", "wrong map", "network"), "kvstore up, or correct --map"),
    "E302": ErrorCode("a node cannot be spared now", ("others are down",), "bring the others back first"),
    "E210": ErrorCode("something took longer than it was given", ("a loaded cluster",), "wait longer"),
    "E213": ErrorCode("the agent takes no more workers now", ("it drains", "it has as many as --workers says"), "wait, or end one"),
    "E214": ErrorCode("no agent answers at that socket", ("none runs", "another path", "it hangs"), "kvstore agent, or --socket PATH"),
    "E220": ErrorCode("a layer did not come in time", ("the device is busy or stuck",), "kvstore doctor --measure"),
    "E221": ErrorCode("a GPU or an RDMA device refuses what it was asked", ("its driver", "it fell off the bus"), "nvidia-smi, dmesg"),
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
