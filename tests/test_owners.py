"""Floors and caps of owners: read from file and flags, refused in one line, kept by a real daemon, shown by status and metrics."""

from __future__ import annotations

import json
import signal
import urllib.request
from pathlib import Path

import pytest
from cli_tool import Cli
from server_tools import Daemon, daemon, make_record, until

from kvstore.clustermap import ClusterMap, Node
from kvstore.errors import ConfigError
from kvstore.owners import Owner, OwnerLimits, merged, owner_of_argument
from kvstore.record import Record, build, padded_bytes
from kvstore.wire import Status

ACME, ZETA = "0f" * 16, "a1" * 16
LABELS = ("default", "acme", "other")
BOUND = 'kvstore_retention_bound_seconds{retention_class="chat"}'


def metrics(server: Daemon) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{server.ready['http']}/metrics", timeout=20) as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def used(server: Daemon, name: str) -> float:
    return metrics(server)[f'kvstore_owner_used_bytes{{owner="{name}"}}']


def records(owner: str, first_bucket: int, count: int, seed: int) -> list[Record]:
    """Each in a bucket of its own, the oldest first."""
    return [make_record(seed + n, owner=bytes.fromhex(owner), bucket=first_bucket + n, retention_class=2) for n in range(count)]


def kept(server: Daemon, stored: list[Record]) -> list[int]:
    return [n for n, r in enumerate(stored) if server.discover(r.extent_key, owner=r.owner)]


def put(server: Daemon, stored: list[Record]) -> None:
    connection = server.bulk()
    for r in stored:
        until(lambda r=r: server.write(r, bulk=connection) in ([Status.OK], [Status.EXISTS]), "there is room")


def bound_at_rest(server: Daemon, stored: list[Record], high_bytes: int = 7_500_000) -> float:
    """The retention bound in seconds, when the evictor has nothing to do (8 MB less its slack) and has told all it did."""

    def told() -> bool:
        found, left = metrics(server), kept(server, stored)
        return found['kvstore_disk_used_bytes{kind="shards"}'] <= high_bytes and found[BOUND] == (len(stored) - 1 - left[0]) * 60

    until(told, "eviction is at rest")
    return metrics(server)[BOUND]


def test_over_its_cap_an_owner_loses_its_own_oldest_and_nobody_elses(tmp_path: Path) -> None:
    with daemon(tmp_path, "--virtual-clock", "--owner", f"name=acme,tag={ACME},cap=1MB") as server:
        older, own = records(ZETA, 900, 10, 0), records(ACME, 1000, 40, 100)
        put(server, older)
        put(server, own)
        size = padded_bytes(len(build(own[0])))
        fits = 1_000_000 // size
        until(lambda: used(server, "acme") <= 1_000_000, "the cap is kept")
        assert kept(server, own) == list(range(40 - fits, 40))
        assert kept(server, older) == list(range(10))
        until(
            lambda: metrics(server)['kvstore_evicted_extents_total{reason="quota",retention_class="chat"}'] == 40 - fits,
            "what went is counted",
        )
        found = metrics(server)
        assert found['kvstore_owner_used_bytes{owner="other"}'] == 10 * size and found['kvstore_owner_used_bytes{owner="default"}'] == 0
        assert found['kvstore_owner_cap_bytes{owner="acme"}'] == 1_000_000
        assert {f'kvstore_owner_used_bytes{{owner="{name}"}}' for name in LABELS} <= found.keys()


def test_under_its_floor_an_owner_is_spared_where_others_fill_the_node(tmp_path: Path) -> None:
    with daemon(tmp_path, "--virtual-clock", "--capacity", "8MB", "--owner", f"name=acme,tag={ACME},floor=1MB") as server:
        oldest, others = records(ACME, 900, 18, 0), records(ZETA, 1000, 240, 100)
        put(server, oldest)
        put(server, others)
        # The spared ones are old; of the others everything from the oldest that is left on is there, and one bucket before it went.
        assert bound_at_rest(server, others) > 0
        assert sum(padded_bytes(len(build(r))) for r in others) > 8_000_000
        assert used(server, "acme") < 1_000_000
        assert kept(server, oldest) == list(range(18))
        left = kept(server, others)
        assert left == list(range(240 - len(left), 240)) and len(left) < 160
        assert metrics(server)['kvstore_owner_floor_bytes{owner="acme"}'] == 1_000_000
        assert metrics(server)['kvstore_retention_seconds{retention_class="chat"}'] == (1239 - 900) * 60


def test_without_a_floor_the_same_owner_goes_first(tmp_path: Path) -> None:
    with daemon(tmp_path, "--virtual-clock", "--capacity", "8MB") as server:
        oldest = records(ACME, 900, 18, 0)
        put(server, oldest)
        put(server, records(ZETA, 1000, 240, 100))
        assert kept(server, oldest) == []


def test_kvstore_node_reads_them_from_its_file_and_a_flag_wins(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(f'[owners.default]\nfloor = "20MB"\n[owners.acme]\ntag = "{ACME}"\nfloor = 5_000_000\ncap = "6MB"\n')
    cli = Cli(tmp_path)
    (tmp_path / "data").mkdir()
    flag = f"name=acme,tag={ACME},cap=9MB"
    process = cli.start("node", "--config", config, "--data", tmp_path / "data", "--capacity", "1GB", "--owner", flag)
    try:
        assert process.stdout is not None and process.stderr is not None
        ready = json.loads(process.stdout.readline().removeprefix("ready "))
        cluster = ClusterMap.local([Node("node-00", "a", ready["address"], ready["admin"], ready["http"])], k=1, m=0)
        cluster.save(tmp_path / "map.toml")
        data = cli.run("status", "--map", tmp_path / "map.toml", "--json").json["data"]
        assert data["owners"] == [
            {"owner": "acme", "used_bytes": 0, "floor_bytes": 0, "cap_bytes": 9_000_000},
            {"owner": "default", "used_bytes": 0, "floor_bytes": 20_000_000, "cap_bytes": None},
        ]
        shown = cli.run("status", "--map", tmp_path / "map.toml").stdout
        assert "owners   acme 0 B (cap 9.0 MB)   default 0 B (floor 20.0 MB)\n" in shown
    finally:
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=30)[1]
    assert process.returncode == 0 and "owner acme: floor 0 B, cap 9.0 MB" in said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[owners.acme]\ncap = "1GB"', 'c.toml:1: owner "acme" has no tag'),
        (f'[owners.acme]\ntag = "{ACME}"\ncap = "4T8"', 'c.toml:3: size "4T8" is not a size'),
        ('[owners.acme]\ntag = "abc"', 'owner "acme" has tag "abc". Fix: write the 32 hex digits'),
        (f'[owners.acme]\ntag = "{"0" * 32}"', 'only "default" is all zeros'),
        (f'[owners.default]\ntag = "{ACME}"', 'only "default" is all zeros'),
        (f'[owners.acme]\ntag = "{ACME}"\nfloor = "2GB"\ncap = "1GB"', "a cap no less than the floor"),
        (f'[owners.acme]\ntag = "{ACME}"\nquota = "1GB"', 'unknown key "quota"'),
        (f'[owners."Acme Inc"]\ntag = "{ACME}"', 'owner "Acme Inc"'),
        (f'[owners.other]\ntag = "{ACME}"', 'owner "other"'),
        (f'[owners.acme]\ntag = "{ACME}"\n[owners.zeta]\ntag = "{ACME}"', 'owners "acme" and "zeta" have the same tag'),
        ("[owners.acme]\ntag = true", "c.toml:2"),
        ("owners = 3", '"owners" is not a table of tables'),
        ('[owners.default]\nfloor = "950MB"', "floors of 1 owners are 950.0 MB together: this node has 1.0 GB"),
    ],
)
def test_a_bad_file_is_one_line_with_its_place(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "c.toml").write_text(text)
    (tmp_path / "data").mkdir()
    Cli(tmp_path).run("node", "--config", "c.toml", "--data", "data", "--capacity", "1GB").refused(2, says)


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("acme", '"acme" not understood'),
        ("name=acme", 'owner "acme" has no tag'),
        ("name=acme,capp=1GB", 'did you mean "cap"?'),
        ("floor=1GB,floor=2GB", "not understood"),
        ("floor=", 'floor "" is not a size'),
        ("cap=-1", 'cap "-1" is not a size'),
        ("floor=2GB,cap=1GB", "a cap no less than the floor"),
    ],
)
def test_a_bad_flag_names_itself(argument: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        owner_of_argument(argument)
    assert f'--owner "{argument}"' in str(error.value) and says in str(error.value) and error.value.fix


def test_flags_and_files_come_to_one_list() -> None:
    file = [Owner("acme", bytes.fromhex(ACME), OwnerLimits(1, 2)), Owner("zeta", bytes.fromhex(ZETA), OwnerLimits())]
    flag = owner_of_argument(f"name=acme,tag={ACME},cap=5")
    assert merged(file, [flag]) == (file[1], flag)
    assert owner_of_argument(flag.argument) == flag and owner_of_argument("floor=7").tag == bytes(16)
    with pytest.raises(ConfigError, match="twice"):
        merged(file, [flag, flag])
    with pytest.raises(ConfigError, match="at most 64"):
        merged([Owner(f"o{n}", n.to_bytes(16, "big"), OwnerLimits()) for n in range(1, 66)], [])
