"""Path B where there is no RDMA device: one clear line. What it does where there is one: tests/verbs/test_direct.py."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.client.direct import DirectMemory
from kvstore.errors import ConfigError, LayoutError


def test_encrypted_blocks_are_refused_before_anything_is_registered() -> None:
    with pytest.raises(ConfigError, match=r"E158.*encrypted.*load this namespace through host RAM"):
        DirectMemory(np.zeros(4096, np.uint8), cipher=1)


@pytest.mark.parametrize(
    "zone", [np.zeros((4, 1024), np.uint8), np.zeros(64, np.uint16), np.zeros(4096, np.uint8)[::2]], ids=["2-d", "u16", "strided"]
)
def test_a_zone_of_another_form_is_refused(zone: np.ndarray) -> None:
    with pytest.raises(LayoutError, match="E508"):
        DirectMemory(zone)


def test_without_a_device_it_says_so() -> None:
    with pytest.raises(ConfigError) as refused:
        DirectMemory(np.zeros(4096, np.uint8), "none-of-these")
    assert refused.value.code in ("E145", "E146")
    assert refused.value.fix
