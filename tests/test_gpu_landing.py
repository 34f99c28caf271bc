"""From records as nodes store them to an engine's pages: right blocks arrive bit by bit, wrong ones are told apart and never scattered."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gpu_tools import DEVICE, back, kernels_run, there

from kvstore import record
from kvstore.client.direct import DirectExtent, DirectRead
from kvstore.client.values import LoadOutcome
from kvstore.erasure import codec, cut_plane
from kvstore.errors import Closed, KeyFormatError, LayoutError, MisuseError
from kvstore.kernels.gpu import Arrived, Identity, LandedPlane, Outcome, PageTable, Part, land_plane, views_of_bodies
from kvstore.kernels.hash_reference import block_tag
from kvstore.layout import Layout, Plane, Section, shard_bytes_of

__all__ = ["kernels_run"]
pytestmark = pytest.mark.usefixtures("kernels_run")

K, M = 10, 2
# Two planes; the second holds index rows of 7 bytes and main rows of 30: no size is a multiple of 4.
PLANES = (Plane(0, 333, shard_bytes_of(333, K)), Plane(333, 9 * 37, shard_bytes_of(9 * 37, K)))
LAYOUT = Layout((Section("first", 333), Section("index", 9 * 7), Section("main", 9 * 30)))
INDEX, MAIN = Part(333, 9, 7), Part(333 + 9 * 7, 9, 30)
PAGE_ROWS, FIRST_ROW = 4, 5


@dataclass
class Zone:
    """What arrived of plane 1 of some extents, in numpy: to be spoilt by a test."""

    blocks: np.ndarray
    keys: list[bytes]
    arrived: list[Arrived]
    pieces: np.ndarray
    sums: np.ndarray
    digests: np.ndarray

    def land(self, **changes: object) -> LandedPlane:
        given = {"plane": PLANES[1], "plane_number": 1, "k": K, "m": M, **changes}
        return land_plane(there(self.pieces), there(self.sums), there(self.digests), self.arrived, self.keys, **given)  # type: ignore[arg-type]  # by name

    def check(self, landed: LandedPlane, right: set[int]) -> None:
        """Scatters both kinds of rows; pages of `right` blocks must hold theirs, all other bytes what was there."""
        assert {b for b, outcome in enumerate(landed.outcomes) if outcome <= Outcome.REBUILT} == right
        rng = np.random.default_rng(99)
        for part in (INDEX, MAIN):
            needed = -(-(FIRST_ROW + len(self.blocks) * part.rows) // PAGE_ROWS)
            table = rng.permutation(needed + 3)[:needed]
            expected = rng.integers(0, 256, (needed + 3, PAGE_ROWS, part.row_bytes), np.uint8)
            pages = there(expected)
            landed.scatter(part, pages, PageTable(table.tolist(), needed + 3, DEVICE), first_row=FIRST_ROW)
            for b in right:
                for r in range(part.rows):
                    page, slot = divmod(FIRST_ROW + b * part.rows + r, PAGE_ROWS)
                    at = part.offset_bytes + r * part.row_bytes
                    expected[table[page], slot] = self.blocks[b, at : at + part.row_bytes]
            assert np.array_equal(back(pages), expected)


def arrived_zone(seed: int = 0, lost: tuple[tuple[int, ...], ...] = ((), (3,), (0, 9)), first_block: int = 0) -> Zone:
    """Extents of 4 blocks each, one for each entry of `lost`: shards that did not arrive. Sums and digests are cut from true records."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (4 * len(lost), LAYOUT.block_bytes), np.uint8)
    keys = [rng.bytes(32) for _ in blocks]
    shape = (K + M, len(blocks), PLANES[1].shard_bytes)
    zone = Zone(
        blocks, keys, [], rng.integers(0, 256, shape, np.uint8), np.zeros(shape[:2], np.uint64), np.zeros((*shape[:2], 2), np.uint64)
    )
    for e, absent in enumerate(lost):
        rows = slice(4 * e, 4 * e + 4)
        mine = blocks[rows]
        shards = [np.concatenate([cut_plane(mine, plane, K), codec("isal").encode_plane(mine, plane)]) for plane in PLANES]
        name = Identity(rng.bytes(16), keys[4 * e], int(rng.integers(0, 2**63)) * 2, first_block)
        digests = []
        for p in range(2):
            data_sums = [[_sum(name, s, p, b, shards[p][s, b]) for s in range(K)] for b in range(4)]
            digests.append([record.plane_digest(keys[4 * e + b], name.write_id, data_sums[b]) for b in range(4)])
        here = tuple(s for s in range(K + M) if s not in absent)
        zone.arrived.append(Arrived(name, 4, here))
        for s in here:
            if first_block == 0:  # a record holds its extent from the first block on
                whole = record.Record(
                    name.owner, name.extent_key, name.write_id, s, K, M, [333, 333], [block_tag(key) for key in keys[rows]],
                    [[piece.tobytes() for piece in shards[p][s]] for p in range(2)], digests,
                )  # fmt: skip
                data = record.build(whole)
                head = record.parse_head(data)
                assert isinstance(head, record.Head)
                sums = np.frombuffer(data, np.uint64, 8, head.head_bytes)[4:]
            else:
                sums = np.array([_sum(name, s, 1, b, shards[1][s, b]) for b in range(4)], np.uint64)
            zone.pieces[s, rows], zone.sums[s, rows] = shards[1][s], sums
            zone.digests[s, rows] = np.frombuffer(b"".join(digests[1]), np.uint64).reshape(4, 2)
    return zone


def _sum(name: Identity, shard: int, plane: int, block: int, piece: np.ndarray) -> int:
    return record.piece_sum(name.owner, name.extent_key, name.write_id, shard, plane, name.first_block + block, piece.tobytes())


@pytest.mark.parametrize("first_block", [0, 60])
def test_what_arrived_whole_or_with_two_shards_lost_is_scattered_bit_by_bit(first_block: int) -> None:
    zone = arrived_zone(first_block=first_block)
    landed = zone.land()
    assert landed.outcomes == (Outcome.RIGHT,) * 4 + (Outcome.REBUILT,) * 8
    assert landed.wrong_pieces == ()
    zone.check(landed, set(range(12)))


def test_the_bodies_of_items_are_a_zone_as_they_come() -> None:
    """Sums, digests and pieces of each shard one behind the other: looked at in place."""
    zone = arrived_zone(9, ((5, 6),))
    parts = [zone.sums.view(np.uint8).reshape(12, -1), zone.digests.view(np.uint8).reshape(12, -1), zone.pieces.reshape(12, -1)]
    bodies = there(np.concatenate(parts, axis=1))
    views = views_of_bodies(bodies, 4)
    for view, array in zip(views, (zone.pieces, zone.sums, zone.digests), strict=True):
        assert np.array_equal(back(view), array)
    landed = land_plane(*views, zone.arrived, zone.keys, plane=PLANES[1], plane_number=1, k=K, m=M)
    assert landed.outcomes == (Outcome.REBUILT,) * 4
    zone.check(landed, {0, 1, 2, 3})
    for wrong in (bodies[:, :-8], bodies[:, 8:], bodies[0], bodies.to(torch.int8)):
        with pytest.raises(LayoutError, match="E508"):
            views_of_bodies(wrong, 4)
    with pytest.raises(LayoutError, match="E508"):
        views_of_bodies(bodies, 0)


def test_a_read_of_path_b_lands_and_scatters_notes_both_and_is_closed_to_both_after() -> None:
    """By itself: its memory and its client are no more than what it asks them. How it comes to be: tests/verbs/test_direct.py."""
    zone, noted, reading = arrived_zone(9, ((5, 6),)), [], threading.Lock()
    name, shards = zone.arrived[0].identity, zone.arrived[0].shards
    parts = [zone.sums.view(np.uint8).reshape(12, -1), zone.digests.view(np.uint8).reshape(12, -1), zone.pieces.reshape(12, -1)]
    bodies = there(np.concatenate(parts, axis=1)).reshape(-1)
    reading.acquire()
    memory: Any = SimpleNamespace(zone=bodies, note_user=lambda: noted.append(True), unused=lambda end: True, _reading=reading)
    client: Any = SimpleNamespace(map=SimpleNamespace(k=K, m=M), layout=SimpleNamespace(planes=lambda k: PLANES))
    ticket: Any = SimpleNamespace(owner=name.owner, keys=np.stack([np.frombuffer(key, np.uint8) for key in zone.keys]))
    extent = DirectExtent(name.extent_key, name.write_id, 0, 4, 0, (0,) * 12, (0, 0))
    read = DirectRead(memory, LoadOutcome.COMPLETE, ticket, 0, (extent,), (((), shards),), client)
    ((row, landed),) = read.land(1)
    assert (row, landed.outcomes, len(noted)) == (0, (Outcome.REBUILT,) * 4, 1)
    zone.check(landed, {0, 1, 2, 3})
    assert len(noted) == 3  # two scatters
    assert list(read.land(0)) == []  # no shard of that plane came
    read.close()
    assert not reading.locked()
    with pytest.raises(Closed, match="E519"):
        zone.check(landed, {0, 1, 2, 3})
    with pytest.raises(Closed, match="E519"):
        next(read.land(1))


def test_a_wrong_piece_is_lost_for_its_block_alone_and_three_are_too_many() -> None:
    zone = arrived_zone(1, ((), (11,)))
    zone.pieces[2, 0, 5] ^= 1
    zone.pieces[11, 1, 31] ^= 128
    zone.sums[4, 2] ^= np.uint64(1 << 63)
    zone.pieces[[0, 5, 10], 3, 0] ^= 4
    zone.pieces[[0, 5], 7, 0] ^= 4
    landed = zone.land()
    outcomes = [Outcome.REBUILT, Outcome.RIGHT, Outcome.REBUILT, Outcome.TOO_FEW, *[Outcome.RIGHT] * 3, Outcome.TOO_FEW]
    assert list(landed.outcomes) == outcomes
    assert landed.wrong_pieces == ((0, 2), (1, 11), (2, 4), (3, 0), (3, 5), (3, 10), (7, 0), (7, 5))
    zone.check(landed, {0, 1, 2, 4, 5, 6})


def test_sound_pieces_of_another_place_or_writing_do_not_pass() -> None:
    zone = arrived_zone(2, ((), ()))
    swapped = zone.pieces.copy(), zone.sums.copy()
    for mine, other in ((0, 1), (1, 0)):  # two blocks of one extent change places, with their sums
        zone.pieces[:, mine], zone.sums[:, mine] = swapped[0][:, other], swapped[1][:, other]
    zone.arrived[1] = replace(zone.arrived[1], identity=replace(zone.arrived[1].identity, write_id=7))
    landed = zone.land()
    assert [int(outcome) for outcome in landed.outcomes] == [Outcome.TOO_FEW] * 2 + [Outcome.RIGHT] * 2 + [Outcome.TOO_FEW] * 4
    zone.check(landed, {2, 3})


def test_a_digest_that_others_do_not_have_makes_its_piece_wrong() -> None:
    zone = arrived_zone(3, ((), (1,)))
    zone.digests[0, 2, 0] ^= np.uint64(1)
    zone.digests[11, 5, 1] ^= np.uint64(1)
    landed = zone.land()
    assert landed.wrong_pieces == ((2, 0), (5, 11))
    assert [landed.outcomes[b] for b in (2, 5)] == [Outcome.REBUILT] * 2
    zone.check(landed, set(range(8)))


def test_the_readers_own_key_decides() -> None:
    zone = arrived_zone(4, ((), (0,)))
    zone.keys[1] = zone.keys[2]
    zone.keys[6] = bytes(32)
    landed = zone.land()
    assert [landed.outcomes[b] for b in (1, 6)] == [Outcome.WRONG_DIGEST] * 2
    zone.check(landed, {0, 2, 3, 4, 5, 7})


def test_bytes_whose_sum_a_node_made_itself_fail_the_digest() -> None:
    """Ten pieces with sums that hold, one of them not what was written: decoded or not, the block is not scattered."""
    zone = arrived_zone(5, ((10, 11), (0, 11)))
    for b, s in ((1, 3), (6, 3), (7, 10)):
        zone.pieces[s, b, 9] ^= 1
        name = zone.arrived[b // 4].identity
        zone.sums[s, b] = _sum(name, s, 1, b % 4, zone.pieces[s, b])
    landed = zone.land()
    assert [b for b, outcome in enumerate(landed.outcomes) if outcome == Outcome.WRONG_DIGEST] == [1, 6, 7]
    zone.check(landed, {0, 2, 3, 4, 5})


def test_random_damage_never_reaches_the_pages() -> None:
    rng = np.random.default_rng(6)
    zone = arrived_zone(7, ((), (), (2,), (11,), (0, 1), (4, 10)))
    here = {(b, s) for b in range(24) for s in zone.arrived[b // 4].shards}
    damaged = {divmod(int(number), K + M) for number in rng.permutation(24 * (K + M))[:40]}
    for b, s in damaged:
        kind = int(rng.integers(3))
        if kind == 0:
            zone.pieces[s, b, rng.integers(zone.pieces.shape[2])] ^= np.uint8(rng.integers(1, 256))
        elif kind == 1:
            zone.sums[s, b] ^= np.uint64(1 << int(rng.integers(64)))
        else:
            zone.digests[s, b, rng.integers(2)] ^= np.uint64(1 << int(rng.integers(64)))
    landed = zone.land()
    assert set(landed.wrong_pieces) == damaged & here
    right = {b for b in range(24) if sum((b, s) in here - damaged for s in range(K + M)) >= K}
    assert 4 < len(right) < 24
    zone.check(landed, right)


def test_encrypted_bytes_and_buffers_that_do_not_fit_are_refused_and_nothing_is_written() -> None:
    zone = arrived_zone(8, ((3,),))
    with pytest.raises(MisuseError, match=r"E510.*encrypted \(cipher 1\).*host memory"):
        zone.land(cipher=1)
    for change in ({"plane": Plane(333, 333, 96)}, {"plane": Plane(333, 641, 64)}, {"m": 3}, {"k": 9}):
        with pytest.raises(LayoutError, match="E508"):
            zone.land(**change)
    for name, wrong in (
        ("keys", zone.keys[:3]),
        ("keys", [*zone.keys[:3], b"short"]),
        ("sums", zone.sums[:, :3]),
        ("sums", zone.sums.astype(np.int32)),
        ("digests", zone.digests[:, :, :1]),
        ("arrived", [replace(zone.arrived[0], rows_count=3)]),
        ("arrived", [replace(zone.arrived[0], shards=(0, 0, 1))]),
        ("arrived", [replace(zone.arrived[0], shards=(0, 12))]),
        ("pieces", zone.pieces[:, :, :31]),
    ):
        with pytest.raises(LayoutError, match="E508"):
            replace(zone, **{name: wrong}).land()
    with pytest.raises(KeyFormatError):
        Identity(b"", bytes(32), 1)
    odd = torch.zeros(12 * 4 * 64 + 1, dtype=torch.uint8)[1:].reshape(12, 4, 64)
    with pytest.raises(LayoutError, match="multiples of 8"):
        land_plane(odd, there(zone.sums), there(zone.digests), zone.arrived, zone.keys, plane=PLANES[1], plane_number=1, k=K, m=M)
