"""Kernels that take arrived planes to an engine's GPU memory, in Triton, each with a plain reference beside it (docs/GPU.md).

    paging.py      scatter into paged KV and gather from it          reference.py: scatter_reference, gather_reference
    coding.py      lost data shards rebuilt in a landing zone        reference.py: rebuild_reference; both codecs of kvstore/erasure
    sums.py        piece sums (xxh3-64), digests (xxh3-128)          kvstore/kernels/hash_reference.py
    landing.py     all of it for one plane: check, rebuild, check, scatter what is right

`*_kernel.py` are the programs, the modules named above check arguments and start them. Tensors are torch's, on a GPU, or on the CPU where
Triton interprets (TRITON_INTERPRET=1, set before triton is imported). Importing this package needs neither torch nor triton; the first
kernel asked for does, and says so (E507).
"""

from kvstore.kernels.gpu.coding import rebuild
from kvstore.kernels.gpu.landing import Arrived, LandedPlane, Outcome, land_plane, views_of_bodies
from kvstore.kernels.gpu.paging import PageTable, Part, gather, scatter
from kvstore.kernels.gpu.sums import Identity, piece_sums, plane_digests

__all__ = [
    "Arrived",
    "Identity",
    "LandedPlane",
    "Outcome",
    "PageTable",
    "Part",
    "gather",
    "land_plane",
    "piece_sums",
    "plane_digests",
    "rebuild",
    "scatter",
    "views_of_bodies",
]
