"""Decisions: limits, rows, losses, uneven disks, windows and money follow from the figures beneath them."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import ConfigError, UsageError
from kvstore.layout import PRESETS
from kvstore.plan.buy import Planner, Spec
from kvstore.plan.cluster import even_rooms, extents_of, loss_points, parse_nodes, rooms, short_share
from kvstore.plan.curve import exact_curve
from kvstore.plan.prices import Money, Prices, read_prices
from kvstore.plan.reuse import Reuse, reuse_of
from kvstore.plan.windows import window_use
from kvstore.replay.capacity import shape_of
from kvstore.replay.trace import open_trace
from tests.plan_tools import CONVERSATION, conversation, weka

LAYOUT = PRESETS["v41"]


@pytest.fixture(scope="module")
def chats() -> Reuse:
    return reuse_of(conversation(128))


def planner(reuse: Reuse, spec: Spec, prices: Prices | None = None) -> Planner:
    return Planner(reuse, exact_curve(reuse.accesses), spec, prices or Prices())


def test_extents_are_those_of_the_replay(chats: Reuse) -> None:
    extents = extents_of(chats, LAYOUT, 10)
    shape = shape_of(open_trace(CONVERSATION), LAYOUT, 10)
    assert extents.count == shape.extents
    assert extents.bytes_per_block == pytest.approx(shape.record_bytes_per_block, rel=1e-12)


def test_what_is_bought_meets_every_limit_and_one_node_less_does_not(chats: Reuse) -> None:
    asked = planner(chats, Spec(layout=LAYOUT, scale=5000, keep_seconds=900, spare_nodes=0))
    purchase = asked.purchase()
    bought = next(choice for choice in purchase.choices if choice.name == "buy")
    assert not bought.short_of
    assert bought.nodes == purchase.needed[purchase.binding]
    less = asked.choice("less", [asked.spec.size_bytes] * (bought.nodes - 2))  # rounding up may give one away
    assert purchase.binding in less.short_of


def test_rows_go_from_cheap_to_dear_and_so_does_what_they_give(chats: Reuse) -> None:
    choices = planner(chats, Spec(layout=LAYOUT, scale=500)).purchase().choices
    assert [choice.name for choice in choices] == ["cheaper", "cheaper", "buy", "dearer", "dearer"]
    raw, hits = ([getattr(choice, name) for choice in choices] for name in ("raw_bytes", "hit_ratio"))
    assert raw == sorted(raw)
    assert hits == sorted(hits)


def test_small_traffic_needs_a_stripe_of_nodes_and_no_more(chats: Reuse) -> None:
    purchase = planner(chats, Spec(layout=LAYOUT)).purchase()
    assert purchase.binding == "stripe"
    assert next(choice for choice in purchase.choices if choice.name == "buy").nodes == 13  # with one to spare


def test_disks_that_may_not_be_written_are_never_enough(chats: Reuse) -> None:
    purchase = planner(chats, Spec(layout=LAYOUT, drive_writes_a_day=0)).purchase()
    assert purchase.needed["wear"] is None
    assert all("wear" in choice.short_of for choice in purchase.choices)


def test_as_many_nodes_as_parity_may_go_without_a_loss(chats: Reuse) -> None:
    extents = extents_of(chats, LAYOUT, 10)
    points = [loss_points(chats, extents, 24, lost, 10, 2) for lost in range(6)]
    assert points[:3] == [0, 0, 0]
    assert 0 < points[3] < points[4] < points[5] < 100 * chats.hit_ratio()


def test_the_share_of_extents_that_fall_short_is_counted_right() -> None:
    nodes, lost = 8, {0, 1, 2, 3}
    groups = list(combinations(range(nodes), 5))
    assert short_share(nodes, len(lost), 4, 1) == pytest.approx(np.mean([len(lost & set(group)) > 1 for group in groups]))


def test_disks_that_are_placed_by_size_hold_more_than_as_if_they_were_equal() -> None:
    sizes = [4.0] * 20 + [8.0] * 10
    by_size, as_equal = rooms(sizes, sizes, 10, 2), rooms(sizes, [1.0] * len(sizes), 10, 2)
    assert as_equal.mean() < by_size.mean() <= 1.01
    assert even_rooms(10, 2).mean() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("text", ["", "14", "x4TB", "3x", "0x4TB", "1000x4TB", "2x0B", "4x4TB+"])
def test_a_list_of_nodes_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_nodes(text)
    assert parse_nodes("2x4TB+1x8TB") == [4 * 10**12, 4 * 10**12, 8 * 10**12]


@pytest.mark.parametrize(("left_at", "percent"), [((0,), 46.85), ((0, 134), 92.99)])
def test_window_entries_of_three_minutes_are_found_as_often_as_published(left_at: tuple[int, ...], percent: float) -> None:
    accesses = weka()
    use = window_use(accesses, reuse_of(accesses).hit_blocks(), left_at)
    assert round(100 * use.hit_ratio(180), 2) == percent
    assert len(use.missed(180)) == round((1 - use.hit_ratio(180)) * len(use.needed))


def test_money_adds_up() -> None:
    prices = Prices(tb_month=20, node_month=100, gpu_hour=2, prefill_tokens_per_second=1000)
    money = Money.of(prices, nodes=3, raw_bytes=5e12, input_tokens=7.2e9, hit_tokens=3.6e9)
    assert (money.storage_cost, money.gpu_hours_saved, money.gpu_saved, money.net) == (400, 1000, 2000, 1600)
    sold = Money.of(
        Prices(**{**vars(prices), "cached_million_tokens": 0.1, "uncached_million_tokens": 1.0}),
        nodes=3, raw_bytes=5e12, input_tokens=7.2e9, hit_tokens=3.6e9,
    )  # fmt: skip
    assert sold.revenue == pytest.approx(3960)
    assert sold.net == pytest.approx(3960 - 400 - 2000)
    assert Money.of(Prices(), nodes=3, raw_bytes=5e12, input_tokens=1, hit_tokens=1) == Money(None, None, None, None, None)


def test_prices_come_from_a_file_and_flags_go_over_it(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text("tb_month = 20\ngpu_hour = 2.5\n")
    assert read_prices(path, ["gpu_hour=3"]) == Prices(tb_month=20, gpu_hour=3)
    path.write_text("tb_mont = 20\n")
    with pytest.raises(ConfigError, match=r"E101.*tb_month"):
        read_prices(path)
    for text, code in [("tb_mont=1", "E101"), ("tb_month", "E131"), ("tb_month=-1", "E131"), ("gpu_hour=nan", "E131")]:
        with pytest.raises(UsageError, match=code):
            read_prices(None, [text])
