"""RDMA, in a guest whose kernel has it (tests/verbs/guest.py): one start for the small sizes, others with SIZE=full."""

from __future__ import annotations

import pytest
from verbs.guest import pytest_in_guest


@pytest.mark.timeout(360)
def test_the_daemons_end_of_verbs_in_a_guest() -> None:
    report = pytest_in_guest("tests/verbs", seconds=300)
    assert " passed" in report, report
