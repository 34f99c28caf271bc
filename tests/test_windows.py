"""Window entries in RAM: lifetimes, the cap, views that stay whole, keep rules, and that only the bytes kept under a key pass for it."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from kvstore.client.agent.keeps import decode_drops, prefill_keeps
from kvstore.client.agent.sealed import HEAD_BYTES, seal, unseal, window_key
from kvstore.client.agent.windows import ENTRY_OVERHEAD_BYTES, WindowStore
from kvstore.client.values import Fidelity
from kvstore.errors import MisuseError

SIZE = 1000
ROOM = SIZE + ENTRY_OVERHEAD_BYTES


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def entry(number: int, size: int = SIZE) -> bytes:
    return random.Random(number).randbytes(size)


def store_of(entries: int, clock: Clock | None = None) -> WindowStore:
    return WindowStore(entries * ROOM, 180, clock or Clock())


def test_an_entry_lives_180_seconds_from_its_last_use() -> None:
    clock = Clock()
    store = store_of(4, clock)
    assert store.put(key(1), entry(1)) and store.put(key(2), entry(2))
    clock.now = 180.0
    assert store.get(key(1)) == entry(1)
    clock.now = 180.1
    assert store.get(key(2)) is None and store.holds([key(1), key(2)]) == [True, False]
    clock.now = 360.0
    assert store.touch(key(1))
    clock.now = 540.1
    stats = store.stats()
    assert (stats.entries, stats.hits, stats.misses, stats.dropped["expired"]) == (0, 1, 1, 2)


def test_the_longest_unused_goes_first_and_the_cap_is_never_passed() -> None:
    driven_out: list[bytes] = []
    store = WindowStore(3 * ROOM, clock=Clock(), on_drop=driven_out.extend)
    for number in (1, 2, 3):
        store.put(key(number), entry(number))
    store.get(key(1))
    store.put(key(4), entry(4))
    assert store.keys() == [key(3), key(1), key(4)] and driven_out == [key(2)]
    assert store.stats().dropped == {"expired": 0, "capacity": 1, "discarded": 0}
    assert store.stats().allocated_bytes == store.capacity_bytes


def test_what_cannot_fit_is_refused_and_drives_nothing_out() -> None:
    store = store_of(3)
    store.put(key(1), entry(1))
    assert not store.put(key(2), entry(2, 3 * ROOM))
    assert not WindowStore(0).put(key(1), b"x")
    assert store.stats().refused == 1 and store.get(key(1)) == entry(1)


@pytest.mark.parametrize(("name", "data"), [(b"short", b"x"), (key(1), b""), (bytes(33), b"x")])
def test_hostile_keys_and_empty_entries_raise(name: bytes, data: bytes) -> None:
    with pytest.raises(MisuseError, match="E571"):
        store_of(1).put(name, data)


def test_an_impossible_store_raises() -> None:
    for arguments in ((-1, 180.0), (1, 0.0), (1, float("nan"))):
        with pytest.raises(MisuseError, match="E570"):
            WindowStore(*arguments)


def test_an_entry_that_is_read_is_neither_expired_nor_driven_out() -> None:
    clock = Clock()
    store = store_of(2, clock)
    store.put(key(1), entry(1))
    view = store.get(key(1))
    assert view is not None and view.readonly
    part = view[10:20]
    del view  # a slice keeps it as well
    clock.now = 1000.0
    for number in range(2, 6):
        assert store.put(key(number), entry(number))
    assert part == entry(1)[10:20] and store.holds([key(1)]) == [True]
    part.release()
    del part
    clock.now = 2000.0
    assert store.keys() == []


def test_with_all_entries_being_read_a_put_is_refused_not_squeezed_in() -> None:
    store = store_of(2)
    store.put(key(1), entry(1))
    store.put(key(2), entry(2))
    views = [store.get(key(1)), store.get(key(2))]
    assert not store.put(key(3), entry(3))
    assert views == [entry(1), entry(2)] and store.stats().allocated_bytes == 2 * ROOM
    views.clear()
    assert store.put(key(3), entry(3))


def test_memory_of_a_discarded_entry_is_not_filled_again_under_its_reader() -> None:
    store = store_of(1)
    store.put(key(1), entry(1))
    view = store.get(key(1))
    assert store.discard(key(1)) and not store.discard(key(1))
    assert store.get(key(1)) is None
    assert not store.put(key(2), entry(2)), "its memory is the only one there is"
    assert view == entry(1)
    del view
    assert store.put(key(2), entry(2)) and store.get(key(2)) == entry(2)
    store.clear()
    assert store.stats().entries == 0


def test_an_entry_that_is_there_already_stays() -> None:
    store = store_of(2)
    store.put(key(1), entry(1))
    view = store.get(key(1))
    assert store.put(key(1), entry(2))
    assert view == store.get(key(1)) == entry(1) and store.stats().kept == 1


def test_buffers_are_used_again_and_given_back_for_another_size() -> None:
    store = store_of(4)
    for number in range(40):
        store.put(key(number), entry(number))
    assert store.stats().allocated_bytes == 4 * ROOM
    big = entry(99, 2 * SIZE)
    assert store.put(key(99), big[:7], big[7:]) and store.get(key(99)) == big
    assert store.stats().allocated_bytes <= 4 * ROOM
    assert [store.get(key(number)) == entry(number) for number in (38, 39)] == [True, True]


def test_random_use_against_a_model() -> None:
    """Does not cover readers that outlive entries; the tests above do."""
    rng, clock = random.Random(3), Clock()
    store = store_of(5, clock)
    model: dict[bytes, tuple[float, bytes]] = {}  # in the order of use
    for _ in range(4000):
        clock.now += rng.expovariate(1 / 20)
        model = {name: held for name, held in model.items() if clock.now - held[0] <= 180}
        name = key(rng.randrange(12))
        held = model.pop(name, None)
        match rng.randrange(5):
            case 0 | 1:
                data = held[1] if held else rng.randbytes(SIZE)
                assert store.put(name, data)
                if len(model) == 5:
                    del model[next(iter(model))]
                model[name] = clock.now, data
            case 2 | 3:
                assert store.get(name) == (held[1] if held else None)
                if held:
                    model[name] = clock.now, held[1]
            case _:
                assert store.discard(name) == (held is not None)
        assert store.keys() == list(model)
        stats = store.stats()
        assert stats.entry_bytes == len(model) * SIZE and stats.allocated_bytes <= store.capacity_bytes


def test_threads_that_put_and_read_never_see_a_torn_entry() -> None:
    store = store_of(6)
    torn: list[int] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(400):
            number = rng.randrange(16)
            store.put(key(number), bytes([number]) * SIZE)
            view = store.get(key(rng.randrange(16)))
            if view is not None and len(set(view)) != 1:
                torn.append(number)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not torn and store.stats().allocated_bytes <= store.capacity_bytes


# --- what is kept ---


def test_prefill_keeps_the_ends_of_the_next_turn_and_of_a_repeat() -> None:
    assert prefill_keeps(127) == frozenset()
    assert prefill_keeps(128) == {128}
    assert prefill_keeps(261) == {256}, "a repeat hits nothing: 261 - 134 is less than a block"
    assert prefill_keeps(262) == {128, 256}
    assert prefill_keeps(77_000) == {76_928, 76_800}
    assert prefill_keeps(77_000, 14_720) == {76_928, 76_800, 14_720}, "and where the hit ended without an entry"
    assert prefill_keeps(50, block_tokens=16, slots=22) == {48, 16}


def test_decode_keeps_its_last_three() -> None:
    for prompt in (1, 127, 128, 300):
        kept: list[int] = []
        for tokens in range(prompt + 1, prompt + 2000):
            if tokens % 128 == 0:
                kept.append(tokens)
                old = decode_drops(tokens, prompt)
                if old is not None:
                    kept.remove(old)
        assert kept == [kept[-1] - 256, kept[-1] - 128, kept[-1]] and kept[-1] == (prompt + 1999) // 128 * 128


# --- seals ---


def test_only_the_bytes_kept_under_a_key_open_with_it() -> None:
    data = np.frombuffer(entry(1), np.uint8)
    for fidelity in (Fidelity.EXACT, Fidelity.DECODE, Fidelity.approx(7)):
        sealed = seal(key(1), data, fidelity) + bytes(data)
        opened = unseal(key(1), memoryview(sealed))
        assert opened is not None and opened == (data.tobytes(), fidelity)
        assert unseal(key(2), memoryview(sealed)) is None, "the ring of another prefix"
        for at in (0, 4, 5, 6, 8, 20, HEAD_BYTES, len(sealed) - 1):
            changed = bytearray(sealed)
            changed[at] ^= 1
            assert unseal(key(1), memoryview(changed)) is None or at == 5, at
        for length in (0, 1, HEAD_BYTES, len(sealed) - 1):
            assert unseal(key(1), memoryview(sealed)[:length]) is None


def test_approximate_entries_have_keys_of_their_own() -> None:
    assert window_key(key(1)) == key(1)
    assert len(window_key(key(1), approximate=True)) == 32
    assert len({window_key(key(number), approximate) for number in range(9) for approximate in (False, True)}) == 18
