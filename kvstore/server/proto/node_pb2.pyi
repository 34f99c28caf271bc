from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STATE_UNSPECIFIED: _ClassVar[State]
    STATE_STARTING: _ClassVar[State]
    STATE_READY: _ClassVar[State]
    STATE_DRAINING: _ClassVar[State]
STATE_UNSPECIFIED: State
STATE_STARTING: State
STATE_READY: State
STATE_DRAINING: State

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("id", "cluster", "epoch", "epoch_seen", "state", "boot_id", "pid", "version", "uptime_seconds", "data_address", "admin_address", "http_address", "data_directory", "io", "capacity_bytes", "used_bytes", "extents", "connections", "requests_in_flight", "index_start", "unix_seconds", "traffic", "growth")
    ID_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EPOCH_SEEN_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ADMIN_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DATA_DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    IO_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    INDEX_START_FIELD_NUMBER: _ClassVar[int]
    UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    GROWTH_FIELD_NUMBER: _ClassVar[int]
    id: str
    cluster: str
    epoch: int
    epoch_seen: int
    state: State
    boot_id: int
    pid: int
    version: str
    uptime_seconds: float
    data_address: str
    admin_address: str
    http_address: str
    data_directory: str
    io: str
    capacity_bytes: int
    used_bytes: int
    extents: int
    connections: int
    requests_in_flight: int
    index_start: str
    unix_seconds: float
    traffic: Traffic
    growth: Growth
    def __init__(self, id: _Optional[str] = ..., cluster: _Optional[str] = ..., epoch: _Optional[int] = ..., epoch_seen: _Optional[int] = ..., state: _Optional[_Union[State, str]] = ..., boot_id: _Optional[int] = ..., pid: _Optional[int] = ..., version: _Optional[str] = ..., uptime_seconds: _Optional[float] = ..., data_address: _Optional[str] = ..., admin_address: _Optional[str] = ..., http_address: _Optional[str] = ..., data_directory: _Optional[str] = ..., io: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., extents: _Optional[int] = ..., connections: _Optional[int] = ..., requests_in_flight: _Optional[int] = ..., index_start: _Optional[str] = ..., unix_seconds: _Optional[float] = ..., traffic: _Optional[_Union[Traffic, _Mapping]] = ..., growth: _Optional[_Union[Growth, _Mapping]] = ...) -> None: ...

class Growth(_message.Message):
    __slots__ = ("seconds", "used_bytes", "written_bytes")
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    used_bytes: int
    written_bytes: int
    def __init__(self, seconds: _Optional[float] = ..., used_bytes: _Optional[int] = ..., written_bytes: _Optional[int] = ...) -> None: ...

class Traffic(_message.Message):
    __slots__ = ("seconds", "requests", "bytes_in", "bytes_out", "read_counts")
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    BYTES_IN_FIELD_NUMBER: _ClassVar[int]
    BYTES_OUT_FIELD_NUMBER: _ClassVar[int]
    READ_COUNTS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    requests: int
    bytes_in: int
    bytes_out: int
    read_counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, seconds: _Optional[float] = ..., requests: _Optional[int] = ..., bytes_in: _Optional[int] = ..., bytes_out: _Optional[int] = ..., read_counts: _Optional[_Iterable[int]] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("values",)
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.ScalarMap[str, float]
    def __init__(self, values: _Optional[_Mapping[str, float]] = ...) -> None: ...

class ListQueuesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Queue(_message.Message):
    __slots__ = ("op", "requests")
    OP_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    op: str
    requests: int
    def __init__(self, op: _Optional[str] = ..., requests: _Optional[int] = ...) -> None: ...

class ListQueuesReply(_message.Message):
    __slots__ = ("queues", "write_bytes", "write_bytes_max", "read_head_bytes", "read_head_bytes_max")
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    WRITE_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITE_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    READ_HEAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    READ_HEAD_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    queues: _containers.RepeatedCompositeFieldContainer[Queue]
    write_bytes: int
    write_bytes_max: int
    read_head_bytes: int
    read_head_bytes_max: int
    def __init__(self, queues: _Optional[_Iterable[_Union[Queue, _Mapping]]] = ..., write_bytes: _Optional[int] = ..., write_bytes_max: _Optional[int] = ..., read_head_bytes: _Optional[int] = ..., read_head_bytes_max: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_seconds",)
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    timeout_seconds: float
    def __init__(self, timeout_seconds: _Optional[float] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("finished",)
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    finished: bool
    def __init__(self, finished: _Optional[bool] = ...) -> None: ...

class ReloadMapRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReloadMapReply(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...
