"""A run that goes on from stored blocks computes what a cold run computes, bit for bit. The model alone: no cluster, random weights.

Not covered here: several requests at once, planes used as they arrive, speculation by the draft layer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.engine_integration.model import MINI, TINY, ModelConfig, Resume, WindowUse, hit_tokens_max, plan_resume
from kvstore.engine_integration.model.model import Model
from kvstore.engine_integration.model.state import Bytes, RequestState
from kvstore.errors import LayoutError, MisuseError
from kvstore.keys import KeyChain

pytestmark = pytest.mark.usefixtures("one_torch_thread")
B = TINY.block
CHOOSY = replace(TINY, name="choosy", index_sources=(1, 4, 6), index_dim=32, index_heads=2, top_k=7)  # tiny with an indexer that leaves out


@cache
def model(config: ModelConfig = TINY, codec: str = "v41", seed: int = 0) -> Model:
    return Model.random(config, codec, seed)


@cache
def text(length: int, seed: int = 0) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(256) for _ in range(length)]


@cache
def stored(of: Model, length: int, seed: int = 0) -> tuple[Bytes, dict[int, bytes]]:
    """Blocks, and entries at all multiples of the block, of another request that had this text."""
    state, entries = of.begin(length), {}
    for at in range(0, length, of.config.block):
        of.feed(state, text(length, seed)[at : at + of.config.block])
        entries.update(state.entries)
    return state.export_blocks(0, length // of.config.block), entries


def cold(of: Model, tokens: list[int]) -> tuple[torch.Tensor, Bytes]:
    """Logits and blocks of a run with no cache."""
    return _cold(of, tuple(tokens))


@lru_cache(maxsize=4)
def _cold(of: Model, tokens: tuple[int, ...]) -> tuple[torch.Tensor, Bytes]:
    state = of.begin(len(tokens))
    logits = of.feed(state, tokens)
    return logits, state.export_blocks(0, len(tokens) // of.config.block)


def resumed(of: Model, tokens: list[int], plan: Resume, blocks: Bytes, entries: dict[int, bytes]) -> tuple[torch.Tensor, RequestState]:
    state = of.begin(len(tokens), plan, blocks, entries.get(plan.start_tokens))
    return of.feed(state, tokens[plan.start_tokens :]), state


def assert_equal_to_cold(of: Model, tokens: list[int], plan: Resume, blocks: Bytes, entries: dict[int, bytes]) -> RequestState:
    want, want_blocks = cold(of, tokens)
    got, state = resumed(of, tokens, plan, blocks, entries)
    assert torch.equal(got, want), plan
    assert np.array_equal(state.export_blocks(0, len(tokens) // of.config.block), want_blocks), plan
    return state


def ways(config: ModelConfig, length: int, blocks: int, entries: dict[int, bytes]) -> Iterator[Resume]:
    """Window hit; an entry two blocks older; none, exact."""
    end = plan_resume(config, length, blocks).blocks_end_tokens
    for newest in (end, end - 2 * config.block, 0):
        yield plan_resume(config, length, blocks, {at for at in entries if at <= newest})


# --- equal bit for bit ---


@pytest.mark.parametrize("length", [*range(1, 40), *range(40, 101, 3)])  # all up to 385: the row resume_bit_equal
def test_prompts_of_many_lengths_resume_to_the_cold_runs_bits(length: int) -> None:
    blocks, entries = stored(model(), 112)
    for plan in ways(TINY, length, len(blocks), entries):
        assert plan.blocks_end_tokens == max(0, (length - 22) // 16 * 16)
        assert_equal_to_cold(model(), text(112)[:length], plan, blocks, entries)


@pytest.mark.parametrize("length", [150, 191, 262, 333])
@pytest.mark.parametrize(
    "config, codec", [(TINY, "v41"), (TINY, "f32"), (TINY, "bf16"), (CHOOSY, "v41")], ids=lambda v: getattr(v, "name", v)
)
def test_long_prompts_resume_to_the_cold_runs_bits(config: ModelConfig, codec: str, length: int) -> None:
    of = model(config, codec)
    blocks, entries = stored(of, 336)
    seen = {
        assert_equal_to_cold(of, text(336)[:length], plan, blocks, entries) and plan.window for plan in ways(config, length, 99, entries)
    }
    assert seen == {WindowUse.HIT, WindowUse.OLDER, WindowUse.EXACT}


@pytest.mark.parametrize("length", [127, 128, 129, 133, 134, 135, 262, 390])
def test_mini_resumes_to_the_cold_runs_bits(length: int) -> None:
    blocks, entries = stored(model(MINI), 512)
    for plan in {plan.window: plan for plan in ways(MINI, length, len(blocks), entries)}.values():
        assert_equal_to_cold(model(MINI), text(512)[:length], plan, blocks, entries)


def test_mini_replays_exactly_six_windows_and_a_tile_back() -> None:
    blocks, entries = stored(model(MINI), 1152)
    plan = plan_resume(MINI, 1152, len(blocks))
    assert (plan.window, plan.start_tokens, plan.blocks_end_tokens) == (WindowUse.EXACT, 896 - 776, 896)
    assert_equal_to_cold(model(MINI), text(1152), plan, blocks, entries)


def test_bounded_replay_within_the_first_window_is_exact() -> None:
    blocks, entries = stored(model(), 64)
    for length in range(22 + 16, 22 + 32):
        plan = plan_resume(TINY, length, len(blocks), mode="bounded")
        assert (plan.window, plan.blocks_end_tokens, plan.start_tokens, plan.approximate) == (WindowUse.BOUNDED, 16, 0, False)
        assert_equal_to_cold(model(), text(64)[:length], plan, blocks, entries)


def test_exact_replay_is_right_at_its_length_and_not_one_block_earlier() -> None:
    """In f32: the error of one block less is 1e-6, which v41 rounds away on this text. Only a whole entry takes a tile of 8 more."""
    of = model(codec="f32")
    blocks, _ = stored(of, 336)
    want, _ = cold(of, text(336))
    right = plan_resume(TINY, 336, len(blocks))
    assert right.replayed_tokens == TINY.replay_entry_tokens == TINY.replay_blocks_tokens + 8 == 72
    assert torch.equal(resumed(of, text(336), right, blocks, {})[0], want)
    enough = replace(right, start_tokens=right.start_tokens + 8)
    assert torch.equal(resumed(of, text(336), enough, blocks, {})[0], want)
    short = replace(right, start_tokens=right.start_tokens + 24)
    assert not torch.equal(resumed(of, text(336), short, blocks, {})[0], want)


def test_replay_lengths_are_those_of_the_document() -> None:
    assert (MINI.replay_visible_tokens, MINI.replay_window_tokens, MINI.replay_slots_tokens, MINI.replay_blocks_tokens) == (
        762,
        763,
        769,
        768,
    )
    assert (TINY.replay_window_tokens, TINY.replay_slots_tokens, TINY.replay_blocks_tokens) == (61, 67, 64)
    assert (MINI.replay_entry_tokens, TINY.replay_entry_tokens) == (776, 72)
    original = replace(MINI, encoder_layers=20, sources=((2, 2), (8, 2), (14, 2), (20, 1)))
    assert (original.replay_slots_tokens, original.replay_entry_tokens) == (2547, 2560), "there whole blocks reach far enough"


def test_a_bounded_replay_moves_the_logits_a_little_and_says_so() -> None:
    blocks, _ = stored(model(), 336)
    want, _ = cold(model(), text(336))
    plan = plan_resume(TINY, 336, len(blocks), mode="bounded")
    got, state = resumed(model(), text(336), plan, blocks, {})
    assert state.approximate and not torch.equal(got, want)
    assert (got - want).abs().max() < want.abs().max()


@settings(max_examples=10)
@given(st.data())
def test_however_a_prompt_is_cut_every_row_is_the_same(data: st.DataObject) -> None:
    """One token at a time, odd pieces, pieces across blocks: prompt and answer are one thing to a row."""
    tokens = text(112)[: data.draw(st.integers(1, 100))]
    want, want_blocks = cold(model(), tokens)
    state, at, rows = model().begin(len(tokens)), 0, []
    while at < len(tokens):
        step = data.draw(st.integers(1, 40))
        rows.append(model().feed(state, tokens[at : at + step]))
        at += step
    assert torch.equal(torch.cat(rows), want)
    assert np.array_equal(state.export_blocks(0, len(tokens) // B), want_blocks)


@pytest.mark.parametrize("config", [MINI, CHOOSY], ids=lambda c: c.name)
def test_tokens_computed_in_tiles_and_in_blocks_are_the_same(config: ModelConfig) -> None:
    """Where this machine's kernels allow tiles, single tokens take them; a model without them must agree."""
    of, whole = model(config), Model(model(config).network)
    whole.tile = config.block
    end = 2 * config.block + 3
    found = []
    for each in (of, whole):
        state = each.begin(config.block)
        each.feed(state, text(end)[: config.block - 5])
        rows = [each.feed(state, text(end)[at : at + 3]) for at in range(config.block - 5, config.block + 31, 3)]
        found.append((torch.cat(rows), state.export_blocks(0, 1)))
    assert torch.equal(found[0][0], found[1][0]) and np.array_equal(found[0][1], found[1][1])


# --- the hit rule ---


def test_a_prompt_hits_all_but_its_last_134_tokens_in_whole_blocks() -> None:
    for length in range(1, 1200):
        everything = set(range(128, length + 1, 128))
        want = max(0, 128 * ((length - 134) // 128))
        assert hit_tokens_max(MINI, length) == want
        assert plan_resume(MINI, length, 99, everything).hit_tokens == want
        assert plan_resume(MINI, length, 99, mode="bounded").hit_tokens == max(0, want - 128)


def test_the_cheaper_of_older_window_and_exact_replay_is_taken() -> None:
    assert plan_resume(MINI, 4096, 99, {3840 - 640}).window is WindowUse.OLDER
    assert plan_resume(MINI, 4096, 99, {3840 - 896}).window is WindowUse.EXACT
    assert plan_resume(MINI, 4096, 99, {128}, mode="bounded").start_tokens == 3840 - 128


# --- conversations ---


def greedy(of: Model, state: RequestState, last: torch.Tensor, tokens: int) -> list[int]:
    answer: list[int] = []
    for _ in range(tokens):
        answer.append(int(last.argmax()))
        last = of.feed(state, answer[-1:])[-1]
    return answer


def test_turns_over_blocks_that_decoding_wrote_equal_cold_turns() -> None:
    """Turn 2 takes what turn 1 prefilled and decoded, turn 3 what turn 2 resumed and decoded: blocks, windows and text of cold runs."""
    of, blocks, entries = model(), np.zeros((0, model().layout.block_bytes), np.uint8), {}
    tokens: list[int] = []
    for turn in range(3):
        tokens = tokens + text(60 + turn, seed=turn)
        plan = plan_resume(TINY, len(tokens), len(blocks), entries)
        assert plan.window is (WindowUse.HIT if turn else WindowUse.NONE)
        got, state = resumed(of, tokens, plan, blocks, entries)
        answer = greedy(of, state, got[-1], 21)
        fresh = of.begin(len(tokens))
        assert greedy(of, fresh, of.feed(fresh, tokens)[-1], 21) == answer
        tokens = tokens + answer
        blocks, entries = state.export_blocks(0, len(tokens) // B), state.entries
        assert np.array_equal(blocks, cold(of, tokens)[1])


@pytest.mark.parametrize("config", [TINY, CHOOSY], ids=lambda c: c.name)
def test_rolling_back_one_to_six_tokens_after_a_boundary_leaves_no_trace(config: ModelConfig) -> None:
    of, tokens, wrong = model(config), text(112), text(16, seed=9)
    want, want_blocks = cold(of, tokens[:99])
    for back in range(1, 7):
        for kept in {48 - back, 48 - back // 2, 48}:  # the drafts cross the boundary at 48, end at it, or begin there
            state = of.begin(99)
            of.feed(state, tokens[:kept])
            of.feed(state, wrong[:back])
            state.rollback(back)
            assert max(state.entries) <= kept
            of.feed(state, tokens[kept:70])
            of.feed(state, wrong[:back])
            state.rollback(back)
            assert torch.equal(of.feed(state, tokens[70:99])[-20:], want[-20:]), (back, kept)
            assert np.array_equal(state.export_blocks(0, 6), want_blocks), (back, kept)
            assert state.entries[96] == stored(of, 112)[1][96]


def test_seven_tokens_cannot_be_rolled_back_nor_six_twice() -> None:
    state = model().begin(40)
    model().feed(state, text(40))
    with pytest.raises(MisuseError, match="rollback of 7 tokens"):
        state.rollback(7)
    state.rollback(6)
    with pytest.raises(MisuseError, match="rollback of 1 tokens"):
        state.rollback(1)


# --- what was a bug somewhere ---


def test_a_stale_ring_is_never_seen() -> None:
    """Rings full of another request's rows: no replay looks at them."""
    blocks, entries = stored(model(), 112)
    for mode in ("exact", "bounded"):
        plan = plan_resume(TINY, 112, 3, mode=mode)  # type: ignore[arg-type]  # one of the two
        want, _ = resumed(model(), text(112), plan, blocks, entries)
        state = model().begin(112, plan, blocks)
        for ring in state.rings:
            ring.values.fill_(7.0)
            ring.codes.fill_(77)
        assert torch.equal(model().feed(state, text(112)[plan.start_tokens :]), want)


@pytest.mark.parametrize("mode", ["exact", "bounded"])
def test_replay_writes_no_row_below_the_hit(mode: str) -> None:
    """Rows of another computation stay what they were, though replay would compute others."""
    other = stored(model(seed=1), 112)[0]
    plan = plan_resume(TINY, 112, len(other), mode=mode)  # type: ignore[arg-type]  # one of the two
    _, state = resumed(model(), text(112), plan, other, {})
    kept = plan.blocks_end_tokens // B
    assert plan.replayed_tokens > 0 and np.array_equal(state.export_blocks(0, kept), other[:kept])
    assert not np.array_equal(state.export_blocks(kept, 7), other[kept:])


def test_however_many_blocks_arrive_the_answer_is_the_same() -> None:
    """A missing middle block, an eviction after the lookup, a load that fails: fewer blocks, all before the first that lacks."""
    blocks, entries = stored(model(), 112)
    for found in range(8):
        assert_equal_to_cold(model(), text(112)[:107], plan_resume(TINY, 107, found, entries), blocks[:found], entries)
        assert_equal_to_cold(model(), text(112)[:107], plan_resume(TINY, 107, found), blocks[:found], {})


def test_an_entry_is_given_only_where_all_its_rows_are_right() -> None:
    blocks, entries = stored(model(), 336)
    for newest in (304, 288, 0):
        plan = plan_resume(TINY, 336, len(blocks), {at for at in entries if at <= newest})
        state = assert_equal_to_cold(model(), text(336), plan, blocks, entries)
        assert state.entries and all(entry == entries[at] for at, entry in state.entries.items())
        assert (plan.window is WindowUse.EXACT) <= (plan.blocks_end_tokens in state.entries)
    # Of an entry 67 tokens have to be replayed: after 64 its oldest spare rows would be wrong.
    state = model().begin(336, replace(plan, start_tokens=304 - 64, exact_from_tokens=304 - 64 + 45), blocks)
    model().feed(state, text(336)[304 - 64 :])
    assert 304 not in state.entries and 320 in state.entries


def test_blocks_of_another_model_codec_or_salt_have_other_keys() -> None:
    models = [model(), model(seed=1), model(codec="f32"), model(MINI), model(CHOOSY)]
    chains = [(of.namespace, b"") for of in models] + [(models[0].namespace, b"salt")]
    keys = {KeyChain(space, salt, block_tokens=B).extend(text(16))[0].tobytes() for space, salt in chains}
    assert len(keys) == len(chains)


def test_bytes_of_another_layout_are_refused_in_one_line() -> None:
    blocks, entries = stored(model(codec="f32"), 112)
    plan = plan_resume(TINY, 112, len(blocks), entries)
    with pytest.raises(LayoutError, match=r"E586.*blocks have 432 bytes.*codec 'v41'"):
        model().begin(112, plan, blocks, entries[plan.start_tokens])
    with pytest.raises(LayoutError, match=r"E587.*not 2944"):
        model().begin(112, plan, stored(model(), 112)[0], entries[plan.start_tokens])
    with pytest.raises(MisuseError, match=r"E589.*needs 5 blocks and an entry; got 2 blocks, no entry"):
        model().begin(112, plan, stored(model(), 112)[0][:2])
    with pytest.raises(MisuseError, match=r"E590.*ids are 0 to 255"):
        model().feed(model().begin(1), [256])
    with pytest.raises(MisuseError, match=r"E585.*whole blocks"):
        model().begin(1).export_blocks(0, 1)


# --- choices ---


def test_an_indexer_that_may_choose_all_changes_nothing() -> None:
    chosen, dense = model(replace(CHOOSY, top_k=10_000)), model(replace(CHOOSY, top_k=0))
    assert torch.equal(cold(chosen, text(100))[0], cold(dense, text(100))[0])
    assert not torch.equal(cold(model(CHOOSY), text(100))[0], cold(dense, text(100))[0])


def test_ties_go_to_the_lower_number() -> None:
    moe = Model.random(TINY, seed=3).network.layer(0).moe
    with torch.no_grad():
        moe.router.weight.zero_()
        weights = moe.route(torch.ones(5, TINY.d))
    assert torch.equal(weights, torch.tensor([[1.5, 0, 0, 0]]).expand(5, -1))


def test_the_bias_chooses_experts_and_does_not_weigh_them() -> None:
    moe = Model.random(MINI, seed=3).network.layer(0).moe
    x = torch.randn(64, MINI.d, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        moe.selection_bias[5] = 100.0
        weights = moe.route(x)
    assert (weights[:, 5] > 0).all() and ((weights > 0).sum(-1) == 2).all()
    assert torch.allclose(weights.sum(-1), torch.full((64,), 1.5)) and weights[:, 5].max() < 1.5
