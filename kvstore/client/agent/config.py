"""What one embedded agent may choose for itself."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from kvstore.client.agent.frames import PeerConfig
from kvstore.client.agent.keeps import WINDOW_SLOTS
from kvstore.client.agent.windows import LIFETIME_SECONDS
from kvstore.errors import ConfigError

OLDER_BLOCKS_MAX: Final = 255


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """A value outside its range raises ConfigError E150."""

    window_bytes: int = 1 << 30  # RAM for window entries; 0 keeps none
    window_seconds: float = LIFETIME_SECONDS  # after their last use
    slots: int = WINDOW_SLOTS  # tokens that an entry covers, and that the engine computes of every prompt in any case
    older_blocks_max: int = 20  # how far below the hit an older entry is of use: as many blocks as the encoder has layers
    directories: tuple[str, ...] = ()  # window directories, ip:port; none: those of the cluster map
    directory_seconds: float = 0.02  # what a lookup waits for them
    fetch_seconds: float = 0.1  # what window() may take, all holders together
    serve: bool = True  # give entries to other agents, where there are directories to tell them
    host: str = "127.0.0.1"  # ... at this address; on loopback, to agents of this host
    port: int = 0  # 0: any free one
    advertise: str = ""  # host:port at which others reach it; "": as above
    peer: PeerConfig = field(default_factory=PeerConfig)  # limits towards other agents
    close_seconds: float = 1.0  # what close() waits for the directories

    def __post_init__(self) -> None:
        self._need("window_bytes", self.window_bytes >= 0, "0 or more")
        self._need("window_seconds", 0 < self.window_seconds <= 86400, "above 0, at most 86400")
        self._need("slots", 1 <= self.slots <= 1 << 20, "1 to 1048576")
        self._need("older_blocks_max", 0 <= self.older_blocks_max <= OLDER_BLOCKS_MAX, f"0 to {OLDER_BLOCKS_MAX}")
        for name in ("directory_seconds", "fetch_seconds", "close_seconds"):
            self._need(name, 0 < getattr(self, name) <= 60, "above 0, at most 60")
        self._need("port", 0 <= self.port <= 65535, "0 to 65535")

    def _need(self, name: str, fine: bool, range_text: str) -> None:
        if not fine:
            raise ConfigError("E150", f"agent {name} = {getattr(self, name)}", f"must be {range_text}")


def reachable(address: str, directories: Iterable[str]) -> bool:
    """Whether an agent at `address` may be named to all who ask `directories`: loopback is another host to each, 0.0.0.0 is none."""
    return not _loopback(address) or all(_loopback(directory) for directory in directories)


def _loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        found = ipaddress.ip_address(host)
        return found.is_loopback or found.is_unspecified
    except ValueError:
        return host == "localhost"
