"""Which way reads move, on hosts with and without RDMA. What RDMA itself does is tested in tests/verbs, where there are devices."""

from __future__ import annotations

import logging

import pytest
from client_tools import SMALL, chain, load, store
from faultpeer import PeerCluster

from kvstore.client import Client, ClientConfig, LoadOutcome
from kvstore.errors import ConfigError

NO_DEVICE = "none-of-these"


@pytest.mark.parametrize(
    "wrong",
    [
        {"transport": "ib"}, {"rdma_device": "a b"}, {"rdma_device": 3},
        {"rdma_pool_bytes": 1 << 20, "rdma_zone_bytes": 4 << 20}, {"rdma_pool_bytes": 1 << 80},
        {"rdma_pool_bytes": 1.5e9}, {"rdma_zone_bytes": 4.5e6},
        {"rdma_traffic_class": 256}, {"rdma_traffic_class": -1}, {"rdma_traffic_class": 1.5},
        {"rdma_gid_index": -2}, {"rdma_gid_index": 256},
    ],
    ids=str,
)  # fmt: skip
def test_settings_have_their_range(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="E150"):
        ClientConfig(**wrong)  # type: ignore[arg-type]  # of no right type or value, on purpose


def test_the_environment_chooses_where_nobody_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_TRANSPORT", "tcp")
    monkeypatch.setenv("KVSTORE_RDMA_DEVICE", "mlx5_3")
    assert (ClientConfig().transport, ClientConfig().rdma_device) == ("tcp", "mlx5_3")
    monkeypatch.setenv("KVSTORE_RDMA_TRAFFIC_CLASS", "104")
    monkeypatch.setenv("KVSTORE_RDMA_GID_INDEX", "3")
    assert (ClientConfig().rdma_traffic_class, ClientConfig().rdma_gid_index) == (104, 3)
    monkeypatch.setenv("KVSTORE_RDMA_GID_INDEX", "auto")
    assert ClientConfig().rdma_gid_index == -1
    monkeypatch.setenv("KVSTORE_RDMA_TRAFFIC_CLASS", "256")
    with pytest.raises(ConfigError, match=r'E131.*KVSTORE_RDMA_TRAFFIC_CLASS is "256"'):
        ClientConfig()
    monkeypatch.delenv("KVSTORE_RDMA_TRAFFIC_CLASS")
    assert ClientConfig(transport="auto").transport == "auto"
    monkeypatch.setenv("KVSTORE_TRANSPORT", "")
    assert ClientConfig().transport == "auto"


def test_rdma_is_refused_at_once_where_there_is_none() -> None:
    config = ClientConfig(transport="rdma", rdma_device=NO_DEVICE)
    with PeerCluster() as cluster, pytest.raises(ConfigError) as refused:
        Client(cluster.map, layout=SMALL, config=config)
    assert refused.value.code in ("E145", "E146")  # no library, or no such device
    assert refused.value.fix


def test_auto_goes_over_tcp_with_one_line(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSTORE_TRANSPORT", raising=False)
    config = ClientConfig(transport="auto", rdma_device=NO_DEVICE)
    caplog.set_level(logging.INFO, "kvstore.client")
    with PeerCluster() as cluster, Client(cluster.map, layout=SMALL, config=config) as client:
        keys = chain(4, SMALL)
        data = store(client, keys)
        for _ in range(2):
            result, place = load(client, client.lookup(keys))
            assert result.outcome is LoadOutcome.COMPLETE
            assert (place == data).all()
        stats = client.stats()
    assert (stats["read_bytes_rdma"], stats["rdma_queue_pairs"], stats["rdma_registered_bytes"]) == (0, 0, 0)
    assert stats["read_bytes_tcp"] > data.nbytes
    (line,) = [record for record in caplog.records if "TCP" in record.message]
    assert line.levelno == logging.WARNING  # the device was named
    assert NO_DEVICE in line.message or "libibverbs" in line.message
