"""The one error tree. Outcomes (hit, miss, busy) are values elsewhere; only faults are raised, and all of them are here.

    KvstoreError                          exit 70   a bug of ours when nothing more exact is raised
    ├── UsageError              E1xx      exit 2    arguments, environment, input files: the person at the keyboard can mend it
    │   ├── ConfigError                             a configuration file or value, a data directory, a port
    │   │   └── DirectoryInUse(pid)                 another daemon owns the data directory
    │   └── InputError                              a trace, map or result file that does not parse
    ├── Unreachable             E2xx      exit 3    no peer answered
    │   └── DeadlineExceeded                        the caller's deadline passed before an answer
    ├── Refused                 E3xx      exit 4    refused for safety
    ├── StorageError            E4xx      exit 1    a node's disk or index
    │   ├── NoSpace(capacity, allocated, required)  the disk, the index or the configured capacity is full
    │   └── Damaged                                 stored bytes do not match their checksums or their format
    ├── MisuseError             E5xx      exit 70   a caller broke an interface of this package
    │   ├── LayoutError                             a layout, or a buffer that does not fit it
    │   ├── CodecError                              shards a decoder must not see: duplicate, missing, out of range, unequal
    │   ├── KeyFormatError                          keys, tokens or namespaces of the wrong shape or type
    │   └── Closed                                  a verb on something that was closed
    ├── ProtocolError           E6xx      exit 1    a peer sent what the protocol does not allow, or another version of it
    └── Cancelled               E7xx      exit 130  the caller cancelled

On a terminal each is one line, `error[CODE] what: cause. Fix: action`. Codes are stable: a number is never used for a second meaning.
Within E5xx: 500 layouts and extents, 507 to 510 kernels, 520 codecs, 531 keys, 550 and up clients.
"""


class KvstoreError(Exception):
    """Base of all. `what` names the place, `cause` says why, `fix` says what to do; lower case, values quoted, no final stop."""

    exit_code: int = 70

    def __init__(self, code: str, what: str, cause: str = "", fix: str = "") -> None:
        super().__init__(code, what, cause, fix)
        self.code = code
        self.what = what
        self.cause = cause
        self.fix = fix

    def __str__(self) -> str:
        text = f"error[{self.code}] {self.what}"
        if self.cause:
            text += f": {self.cause}"
        if self.fix:
            text += f". Fix: {self.fix}"
        return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class UsageError(KvstoreError):
    """Raised by commands for arguments, environment and files. Tell the user; trying again without a change is useless."""

    exit_code = 2


class ConfigError(UsageError):
    """Raised while configuration is read and while a process takes its directory and ports. Nothing was changed."""


class DirectoryInUse(ConfigError):
    """Raised by a daemon that finds `directory` owned by the running process `pid`. Stop that one or name another directory."""

    def __init__(self, pid: int, directory: str = "") -> None:
        place = directory or "data directory"
        super().__init__("E120", place, f"in use by pid {pid}", "stop that process, or name another directory")
        self.args = (pid, directory)  # what unpickling calls the class with
        self.pid = pid
        self.directory = directory


class InputError(UsageError):
    """Raised for a file that does not parse; `what` is `file:line`."""


class Unreachable(KvstoreError):
    """Raised when no peer that could answer did. The same call may work later."""

    exit_code = 3


class DeadlineExceeded(Unreachable):
    """Raised only where an answer must be whole; loads and lookups give a shorter result instead. Try again with more time."""


class Refused(KvstoreError):
    """Raised when doing as told could lose data. `fix` names the flag that insists."""

    exit_code = 4


class StorageError(KvstoreError):
    """Raised by a node's store for disk and index faults. Readers treat the shard as lost."""

    exit_code = 1


class NoSpace(StorageError):
    """Raised when `required_bytes` more do not fit. Writers drop the extent; eviction makes space in the background."""

    def __init__(self, capacity_bytes: int, allocated_bytes: int, required_bytes: int) -> None:
        super().__init__(
            "E401",
            f"{required_bytes} bytes do not fit",
            f"{allocated_bytes} of {capacity_bytes} bytes are taken",
            "give the node more capacity, or let eviction make space",
        )
        self.args = (capacity_bytes, allocated_bytes, required_bytes)
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = allocated_bytes
        self.required_bytes = required_bytes


class Damaged(StorageError):
    """Raised for bytes that fail their checksum or format. Nothing of them was used."""


class MisuseError(KvstoreError):
    """Raised before anything is done, for arguments that break a documented precondition. The calling code is wrong."""


class LayoutError(MisuseError):
    """Raised for impossible layouts, and buffers whose shape does not fit their layout."""


class CodecError(MisuseError):
    """Raised before a coder sees shards that are duplicate, missing, out of range or unequal in length."""


class KeyFormatError(MisuseError):
    """Raised for keys, tokens, secrets or namespace fields of the wrong shape, type or range."""


class Closed(MisuseError):
    """Raised by every verb of a client, store or iterator after it was closed."""


class ProtocolError(KvstoreError):
    """Raised when a peer's bytes break the protocol. The connection is closed; nothing of the message was used."""

    exit_code = 1


class Cancelled(KvstoreError):
    """Raised to the waiter of a verb that was cancelled. Its buffers are the caller's again."""

    exit_code = 130

    def __init__(self, what: str = "cancelled", cause: str = "", fix: str = "") -> None:
        super().__init__("E701", what, cause, fix)
        self.args = (what, cause, fix)
