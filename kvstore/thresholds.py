"""Where health checks begin that a daemon makes about itself and `kvstore status` makes about it: one number for both."""

from __future__ import annotations

from typing import Final

FULL_RATIO: Final = 0.99  # of the capacity: full
ZOMBIE_RATIO: Final = 0.02  # of the capacity: on disk and in nobody's use
CHECKSUM_ERRORS_ERR: Final = 100  # bad shards since the start: from here on the disk repeats itself
WEAR_WARN: Final = 0.8  # of a disk's rated life
WEAR_ERR: Final = 0.95
