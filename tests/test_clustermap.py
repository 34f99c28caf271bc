"""The map file: what is valid reads back equal, what is not is refused with file, line, field and a fix."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.clustermap import ClusterMap, Node, RetentionClass, pg_bits_for
from kvstore.errors import ConfigError

GOOD = """\
cluster = "prod-a"
k = 4
m = 2
bucket_seconds = 30

[classes.rag]
id = 7
keep = "12h"

[[node]]
id = "node-00"
host = "host-a"
address = "10.0.0.1:7400"
admin = "10.0.0.1:7401"
weight = 3.84
disk = "nvme0"

[[node]]
id = "node-01"
host = "host-b"
address = "10.0.0.2:7400"

[[epoch]]
number = 1
nodes = ["node-00"]

[[epoch]]
number = 5
nodes = ["node-01", "node-00"]
pg_bits = 9
"""


def nodes(count: int) -> list[Node]:
    return [Node(f"node-{i:02}", f"host-{i:02}", f"127.0.0.1:{7000 + i}") for i in range(count)]


def test_a_good_map_is_read_whole() -> None:
    got = ClusterMap.parse(GOOD)
    assert (got.cluster_id, got.k, got.m, got.bucket_seconds, got.epoch, got.pg_bits) == ("prod-a", 4, 2, 30, 5, 9)
    assert got.nodes[0] == Node("node-00", "host-a", "10.0.0.1:7400", "10.0.0.1:7401", "", 3.84, "nvme0", 0)
    assert [n.ordinal for n in got.epochs[5].nodes] == [0, 1], "members stand in map order, whatever order the epoch lists them in"
    assert got.classes["rag"] == RetentionClass("rag", 7, 43200.0)
    assert got.classes["chat"].keep_seconds == 7 * 86400 and got.classes["agent"].keep_seconds == 3 * 86400
    assert len(got.tag) == 16


def test_a_map_reads_back_equal_from_its_own_text(tmp_path: Path) -> None:
    got = ClusterMap.parse(GOOD)
    assert ClusterMap.parse(got.to_toml()) == got
    got.save(tmp_path / "map.toml")
    assert ClusterMap.load(tmp_path / "map.toml") == got
    assert [p.name for p in tmp_path.iterdir()] == ["map.toml"]
    odd = ClusterMap.local(nodes(3), classes=[RetentionClass("year", 9, 365.25 * 86400)])
    assert ClusterMap.parse(odd.to_toml()) == odd and odd.classes["year"].keep_seconds == 365.25 * 86400


def test_a_class_has_the_share_that_the_map_says_and_batch_a_fiftieth_unless_it_does() -> None:
    shares = {name: found.share for name, found in ClusterMap.parse(GOOD).classes.items()}
    assert shares == {"none": 1.0, "batch": 0.02, "chat": 1.0, "agent": 1.0, "rag": 1.0}
    told = ClusterMap.parse(GOOD + "\n[classes.batch]\nshare = 0.5\n")
    assert told.classes["batch"] == RetentionClass("batch", 1, 3600.0, 0.5) and ClusterMap.parse(told.to_toml()) == told
    with pytest.raises(ConfigError, match=r'"share" is 5\. Fix: write a number from 0'):
        ClusterMap.parse(GOOD + "\n[classes.batch]\nshare = 5\n")


def test_a_new_epoch_keeps_ordinals_and_old_epochs() -> None:
    old = ClusterMap.local(nodes(3))
    new = old.with_epoch([Node("node-99", "host-z", "127.0.0.1:9999")], ["node-99", "node-01", "node-02"])
    assert new.epoch == 2 and new.epochs[1] == old.epochs[1]
    assert [(n.id, n.ordinal) for n in new.newest.nodes] == [("node-01", 1), ("node-02", 2), ("node-99", 3)]
    with pytest.raises(ConfigError, match="node-98"):
        old.with_epoch([], ["node-98"])


def test_a_map_follows_another_only_where_all_that_records_were_placed_by_stays() -> None:
    old = ClusterMap.local(nodes(3))
    grown = old.with_epoch([Node("node-99", "host-z", "127.0.0.1:9999")], ["node-99", "node-01", "node-02"])
    first = old.nodes[0]
    moved = replace(grown, nodes=(replace(first, address="127.0.0.1:9", disk="other"), *grown.nodes[1:]), classes={})
    for follows in (old, grown, moved):
        old.check_successor(follows)
    for new, named in (
        (replace(old, k=9), "changes k of"),
        (replace(old, cluster_id="other", bucket_seconds=7), "changes cluster, bucket_seconds of"),
        (replace(old, nodes=(replace(first, weight=2.0), *old.nodes[1:])), "changes nodes of"),
        (replace(old, nodes=old.nodes[:2]), "changes nodes of"),
        (ClusterMap.parse(old.to_toml().replace('  "node-01",\n', "")), "changes epoch 1 of"),
    ):
        with pytest.raises(ConfigError, match=named):
            old.check_successor(new)


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("bucket_seconds = 30", "bucket_second = 30", 4, 'unknown key "bucket_second". Fix: did you mean "bucket_seconds"?'),
        ("k = 4", "k = 40", 2, '"k" is 40. Fix: write a whole number from 1 to 32'),
        ("k = 4", "k = true", 2, '"k" is true'),
        ("m = 2", 'm = "two"', 3, '"m" is "two"'),
        ('cluster = "prod-a"', 'cluster = "Prod A"', 1, '"cluster" is "Prod A". Fix: write a-z, 0-9'),
        ('keep = "12h"', 'keep = "12 fortnights"', 8, '"12 fortnights" is not a time. Fix: write it as'),
        ("id = 7", "id = 2", 7, 'classes "chat" and "rag" share id 2'),
        ('address = "10.0.0.2:7400"', 'address = "10.0.0.1:7400"', 21, "10.0.0.1:7400 is taken by node node-00"),
        ('address = "10.0.0.2:7400"', 'address = "10.0.0.2"', 21, "Fix: write ip:port"),
        ('address = "10.0.0.2:7400"', 'address = "10.0.0.2:70000"', 21, "Fix: write ip:port"),
        ('address = "10.0.0.2:7400"', "", 18, '[[node]] has no "address". Fix: add address = ...'),
        ('id = "node-01"', 'id = "node-00"', 19, "is taken by node node-00"),
        ("weight = 3.84", "weight = 0", 15, '"weight" is 0'),
        ("weight = 3.84", "weigth = 1.0", 15, 'unknown key "weigth". Fix: did you mean "weight"?'),
        ('nodes = ["node-00"]', 'nodes = ["node-07"]', 25, 'epoch 1 lists "node-07", which is no [[node]]'),
        ('nodes = ["node-00"]', "nodes = []", 25, "epoch 1 has no members"),
        ('nodes = ["node-00"]', "nodes = 3", 25, "write a list of texts"),
        ('nodes = ["node-01", "node-00"]', 'nodes = ["node-01", "node-01"]', 29, 'epoch 5 lists "node-01" twice'),
        ("number = 5", "number = 1", 28, "epoch 1 stands after epoch 1"),
        ("k = 4", "k = = 4", None, "is not TOML"),
    ],
)
def test_a_bad_map_is_refused_with_its_line_and_a_fix(tmp_path: Path, old: str, new: str, line: int | None, says: str) -> None:
    assert GOOD.count(old) >= 1
    path = tmp_path / "map.toml"
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        ClusterMap.load(path)
    text = str(caught.value)
    assert says in text and "Fix: " in text and text.startswith("error[E1") and "\n" not in text
    if line is not None:
        assert f"{path}:{line}: " in text
    assert caught.value.exit_code == 2


def test_a_map_without_nodes_or_epochs_or_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \[\[node\]\]"):
        ClusterMap.parse('cluster = "a"')
    with pytest.raises(ConfigError, match=r"no \[\[epoch\]\]"):
        ClusterMap.parse('cluster = "a"\n[[node]]\nid = "n"\naddress = "1.2.3.4:5"\n')
    with pytest.raises(ConfigError, match="no such file"):
        ClusterMap.load(tmp_path / "nothing.toml")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not text"):
        ClusterMap.load(tmp_path / "binary")


def test_group_bits_give_each_daemon_one_to_two_thousand_groups() -> None:
    assert pg_bits_for(12, 12) == 10 and pg_bits_for(7360, 12) == 20
    for count in (1, 2, 12, 13, 14, 100, 1000, 7360):
        per_node = 2 ** pg_bits_for(count, 12) * 12 / count
        assert 1000 <= per_node <= 2048 or count < 12


def test_directories_are_optional_and_checked() -> None:
    assert ClusterMap.parse(GOOD).directories == ()
    listed = 'directories = ["10.0.0.1:7399", "[::1]:7399"]\n' + GOOD
    found = ClusterMap.parse(listed)
    assert found.directories == ("10.0.0.1:7399", "[::1]:7399")
    assert ClusterMap.parse(found.to_toml()) == found
    ClusterMap.parse(GOOD).check_successor(found)  # no new epoch is needed
    assert found.tag == ClusterMap.parse(GOOD).tag
    for bad, code in (
        ('["10.0.0.1"]', "E132"),
        ('["10.0.0.1:0"]', "E132"),
        ('[""]', "E132"),
        ('["a:1", "a:1"]', "E133"),
        ("[7399]", "E132"),
        (str([f"10.0.0.1:{n}" for n in range(1, 66)]), "E131"),
    ):
        with pytest.raises(ConfigError, match=code):
            ClusterMap.parse(f"directories = {bad}\n" + GOOD)
