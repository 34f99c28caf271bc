"""The whole way: blocks a model exported, stored on a cluster of real daemons, loaded by another process, resumed to the same bits."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from client_tools import WAIT_SECONDS, cluster_of, until_whole

from kvstore.client import Client, ClientConfig, LoadOutcome, StoreOutcome
from kvstore.clustermap import ClusterMap
from kvstore.engine_integration.model import TINY, plan_resume
from kvstore.engine_integration.model.model import Model
from kvstore.keys import KeyChain, Keys

CONFIG = ClientConfig(block_tokens=TINY.block)
PROMPT = [(7 * i * i + 3 * i) % 256 for i in range(200)]
SECRET = b"one tenant's secret"


def keys_of(model: Model, tokens: list[int], secret: bytes = SECRET) -> Keys:
    return KeyChain(model.namespace, secret, block_tokens=TINY.block).extend(tokens)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def digest(logits: torch.Tensor) -> str:
    return hashlib.blake2b(logits.contiguous().numpy().tobytes()).hexdigest()


def resume_from_cluster(map_path: Path, entry_path: Path | None) -> dict[str, object]:
    """What a second host does: keys from its own weights and tokens, lookup, load, resume. Without an entry: exact replay."""
    model = Model.random(TINY)
    with Client(ClusterMap.load(map_path), layout=model.layout, config=CONFIG) as client:
        ticket = client.lookup(keys_of(model, PROMPT), input_tokens=len(PROMPT), recompute_tokens=TINY.slots)
        blocks = np.zeros((ticket.hit_blocks, model.layout.block_bytes), np.uint8)
        loaded = client.load(ticket, blocks)
    end = plan_resume(TINY, len(PROMPT), loaded.blocks).blocks_end_tokens
    plan = plan_resume(TINY, len(PROMPT), loaded.blocks, {end} if entry_path else ())
    state = model.begin(len(PROMPT), plan, blocks, entry_path.read_bytes() if entry_path else None)
    logits = model.feed(state, PROMPT[plan.start_tokens :])
    return {"window": plan.window.value, "cached": plan.blocks_end_tokens, "logits": digest(logits), "outcome": loaded.outcome.name}


@pytest.fixture
def cold() -> tuple[Model, str, np.ndarray, dict[int, bytes]]:
    model = Model.random(TINY)
    state = model.begin(len(PROMPT))
    logits = model.feed(state, PROMPT)
    return model, digest(logits), state.export_blocks(0, len(PROMPT) // TINY.block), state.entries


def in_another_process(*arguments: str) -> dict[str, object]:
    here = Path(__file__).parent
    program = f"import sys; sys.path[:0] = [{str(here)!r}, {str(here.parent)!r}]; import test_model_cluster as t; t.main(sys.argv[1:])"
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=here.parent)
    assert done.returncode == 0, done.stderr
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    print(json.dumps(resume_from_cluster(Path(arguments[0]), Path(arguments[1]) if len(arguments) > 1 else None)))


def test_another_process_resumes_from_the_cluster_to_the_same_bits_with_two_nodes_down(
    tmp_path: Path, cold: tuple[Model, str, np.ndarray, dict[int, bytes]]
) -> None:
    model, want, blocks, entries = cold
    with cluster_of(tmp_path) as cluster:
        with Client(cluster.map, layout=model.layout, config=CONFIG) as client:
            result = client.store(keys_of(model, PROMPT), blocks, first_block=0).result(WAIT_SECONDS)
            assert (result.outcome, result.blocks) == (StoreOutcome.STORED, 12)
            until_whole(client, keys_of(model, PROMPT))
        cluster.kill(3)
        cluster.kill(8)
        entry = tmp_path / "entry"
        entry.write_bytes(entries[176])
        expected = {"cached": 176, "logits": want, "outcome": LoadOutcome.COMPLETE.name}
        assert in_another_process(str(cluster.map_path), str(entry)) == {"window": "hit", **expected}
        assert resume_from_cluster(cluster.map_path, None) == {"window": "exact", **expected}
        with Client(cluster.map, layout=model.layout, config=CONFIG) as client:
            for other in (keys_of(model, PROMPT, b"another"), keys_of(Model.random(TINY, seed=1), PROMPT), keys_of(model, PROMPT[1:])):
                assert client.lookup(other).hit_blocks == 0
            assert client.lookup(keys_of(model, [*PROMPT[:100], 0, *PROMPT[101:]])).hit_tokens == 96
        cluster.kill(5)  # three of twelve: nothing can be read, and the answer is the same
        assert resume_from_cluster(cluster.map_path, entry)["logits"] == want
