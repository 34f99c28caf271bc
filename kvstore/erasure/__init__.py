"""Codecs: ISA-L (fast, native) and zfec (portable, and the oracle) behind one interface, parity byte for byte the same.

    codec("isal", 10, 2)    what the product uses
    codec("zfec", 10, 2)    what tests compare it with

`interface.py` states what both promise, `checks.py` refuses what neither must see, `pieces.py` cuts blocks into shards and joins them.
"""

from kvstore.erasure.interface import Codec, codec
from kvstore.erasure.pieces import cut_plane, place_pieces

__all__ = ["Codec", "codec", "cut_plane", "place_pieces"]
