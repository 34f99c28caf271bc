from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LookupRequest(_message.Message):
    __slots__ = ("tokens", "keys", "input_tokens", "tenant", "retention_class", "depth_max")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    RETENTION_CLASS_FIELD_NUMBER: _ClassVar[int]
    DEPTH_MAX_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    keys: bytes
    input_tokens: int
    tenant: str
    retention_class: str
    depth_max: int
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., keys: _Optional[bytes] = ..., input_tokens: _Optional[int] = ..., tenant: _Optional[str] = ..., retention_class: _Optional[str] = ..., depth_max: _Optional[int] = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ("ticket", "input_tokens", "prefix_tokens", "cached_tokens", "uncached_tokens", "window", "windows", "fidelity", "depth", "expires_unix_ms", "block_tokens")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    FIDELITY_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    input_tokens: int
    prefix_tokens: int
    cached_tokens: int
    uncached_tokens: int
    window: str
    windows: _containers.RepeatedCompositeFieldContainer[Window]
    fidelity: str
    depth: int
    expires_unix_ms: int
    block_tokens: int
    def __init__(self, ticket: _Optional[bytes] = ..., input_tokens: _Optional[int] = ..., prefix_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., uncached_tokens: _Optional[int] = ..., window: _Optional[str] = ..., windows: _Optional[_Iterable[_Union[Window, _Mapping]]] = ..., fidelity: _Optional[str] = ..., depth: _Optional[int] = ..., expires_unix_ms: _Optional[int] = ..., block_tokens: _Optional[int] = ...) -> None: ...

class Window(_message.Message):
    __slots__ = ("tokens", "holders", "approximate")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    APPROXIMATE_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    holders: _containers.RepeatedScalarFieldContainer[str]
    approximate: bool
    def __init__(self, tokens: _Optional[int] = ..., holders: _Optional[_Iterable[str]] = ..., approximate: _Optional[bool] = ...) -> None: ...
