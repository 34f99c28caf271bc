"""The training loop: resumable at any moment, nothing but the step number decides what a step sees.

    OUT/checkpoint.safetensors   weights, both moments of Adam, step; replaced whole every five minutes, at the end, on SIGTERM and SIGINT
    OUT/log.jsonl                a line every `log_steps`: step, tokens, loss, tokens/s; every `eval_steps` also held-out bits a byte

A quarter of the tokens come in one text of `long_tokens`, the rest in short ones. On a share of the batches the decoder begins somewhere in
the text, as it does at the end of a prompt, and only rows from there on count. Compressed and window rows go through the codec.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from kvstore.engine_integration.model import ModelConfig, weights
from kvstore.engine_integration.model.blocks import Network
from kvstore.engine_integration.model.codecs import codec_of
from kvstore.engine_integration.model.moe import MoE
from kvstore.engine_integration.train.forward import draft_hidden, hidden
from kvstore.errors import InputError

DRAFT_SHARE: Final = 0.1  # of the loss
LOGGED_HELDOUT_BYTES: Final = 50_000  # evaluated on the way: a minute of `mini` on one core, and four for all of it


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What decides the result, with the seed; the whole of it is in the checkpoint, and one that differs is not resumed."""

    tokens: int = 20_000_000
    long_tokens: int = 4_096  # also the tokens of a step
    short_tokens: int = 512
    truncated_share: float = 0.25  # of batches whose decoder begins within the text
    rate: float = 2e-3
    warmup_steps: int = 100
    balance_step: float = 1e-3
    seed: int = 0
    bf16: bool = False  # products in bf16: ten times faster on processors with AMX, slower on others

    @property
    def steps(self) -> int:
        return -(-self.tokens // self.long_tokens)

    def rate_at(self, step: int) -> float:
        """Linear up, then half a cosine down to a tenth."""
        done = min(1.0, step / max(1, self.steps))
        return self.rate * min(1.0, (step + 1) / self.warmup_steps) * (0.55 + 0.45 * math.cos(math.pi * done))


class Trainer:
    def __init__(self, config: ModelConfig, codec: str, recipe: Recipe, text: npt.NDArray[np.uint16], out: Path) -> None:
        """Goes on from the checkpoint in `out` where there is one. InputError where it is of another model or recipe."""
        self.config, self.codec, self.recipe, self.text, self.out = config, codec_of(codec), recipe, text, out
        self.network = Network(config)
        self.network.randomise(recipe.seed)
        self.step = 0
        names = {id(weight): name for name, weight in self.network.named_parameters()}
        kinds = [[w for w in self.network.parameters() if (w.ndim == 2) is matrix] for matrix in (True, False)]
        groups = [{"params": kind, "weight_decay": decay} for kind, decay in zip(kinds, (0.1, 0.0), strict=True)]
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.rate, betas=(0.9, 0.95))
        self._names = [names[id(weight)] for kind in kinds for weight in kind]
        self._identity = json.dumps([config.name, codec, repr(recipe), len(text)])
        out.mkdir(parents=True, exist_ok=True)
        if self.checkpoint_path.exists():
            self._resume()

    @property
    def checkpoint_path(self) -> Path:
        return self.out / "checkpoint.safetensors"

    # --- one step ---

    def batch(self, step: int) -> tuple[Tensor, int]:
        """Tokens (n, length + 1) of a step, and where its decoder begins. The same for the same step, whatever ran before."""
        chosen = np.random.default_rng([self.recipe.seed, step])
        length = self.recipe.long_tokens if step % 4 == 3 else self.recipe.short_tokens
        starts = chosen.integers(0, len(self.text) - length - 1, self.recipe.long_tokens // length)
        rows = np.stack([self.text[at : at + length + 1] for at in starts]).astype(np.int64)
        truncated = chosen.random() < self.recipe.truncated_share
        start = int(chosen.integers(0, length - self.config.block)) if truncated else 0
        return torch.from_numpy(rows), start

    def loss(self, rows: Tensor, start: int) -> Tensor:
        tokens = rows[:, :-1]
        with torch.autocast("cpu", torch.bfloat16, enabled=self.recipe.bf16):
            outputs = hidden(self.network, self.codec, tokens, start)
            logits = self.network.logits(outputs[:, start:]).float()
            loss = F.cross_entropy(logits.flatten(0, 1), rows[:, start + 1 :].flatten())
            if self.network.draft is not None:
                drafted = self.network.logits(draft_hidden(self.network, self.codec, outputs, tokens, start)[:, start:-1]).float()
                loss = loss + DRAFT_SHARE * F.cross_entropy(drafted.flatten(0, 1), rows[:, start + 2 :].flatten())
        return loss

    def train_step(self) -> float:
        self.network.train()
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate_at(self.step)
        loss = self.loss(*self.batch(self.step))
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch gives it no types
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        for module in self.network.modules():
            if isinstance(module, MoE):
                module.balance(self.recipe.balance_step)
        self.step += 1
        return float(loss.detach())

    # --- many ---

    def run(
        self,
        heldout: bytes,
        *,
        seconds: float = math.inf,
        log_steps: int = 20,
        eval_steps: int = 500,
        checkpoint_seconds: float = 300.0,
        say: Callable[[str], None] = print,
    ) -> None:
        """Until the recipe's tokens are done, `seconds` have passed, or a signal asks; always leaves a checkpoint."""
        stopped: list[int] = []
        before = {number: signal.signal(number, lambda number, _: stopped.append(number)) for number in (signal.SIGTERM, signal.SIGINT)}
        began = saved = logged = time.monotonic()
        logged_step = self.step
        try:
            while self.step < self.recipe.steps and not stopped and time.monotonic() - began < seconds:
                loss = self.train_step()
                now = time.monotonic()
                if self.step % log_steps == 0 or self.step == self.recipe.steps:
                    rate = (self.step - logged_step) * self.recipe.long_tokens / max(1e-9, now - logged)
                    line = {
                        "step": self.step,
                        "tokens": self.step * self.recipe.long_tokens,
                        "loss": loss,
                        "tokens_per_second": round(rate),
                    }
                    if self.step % eval_steps == 0 or self.step == self.recipe.steps:
                        line["heldout_bits_per_byte"] = bits_per_byte(
                            self.network, self.codec.name, heldout[:LOGGED_HELDOUT_BYTES], self.recipe.long_tokens
                        )
                    with (self.out / "log.jsonl").open("a") as log:
                        log.write(json.dumps(line) + "\n")
                    say(json.dumps(line))
                    logged, logged_step = time.monotonic(), self.step
                if now - saved >= checkpoint_seconds:
                    self.save()
                    saved = now
            self.save()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def save(self) -> None:
        tensors = {f"weight.{name}": tensor for name, tensor in self.network.state_dict().items()}
        state = self.optimizer.state_dict()["state"]
        for number, name in enumerate(self._names):
            if number in state:
                tensors[f"mean.{name}"], tensors[f"square.{name}"] = state[number]["exp_avg"], state[number]["exp_avg_sq"]
        weights.save(self.checkpoint_path, tensors, {"step": str(self.step), "identity": self._identity})

    def _resume(self) -> None:
        tensors, meta = weights.load(self.checkpoint_path)
        if meta.get("identity") != self._identity:
            cause = f"was made by {meta.get('identity')}, asked for {self._identity}"
            raise InputError("E173", str(self.checkpoint_path), cause, "name another --out, or ask for the same")
        self.step = int(meta["step"])
        self.network.load_state_dict({n.removeprefix("weight."): t for n, t in tensors.items() if n.startswith("weight.")})
        state = self.optimizer.state_dict()
        for number, name in enumerate(self._names):
            if f"mean.{name}" in tensors:
                moments = {"exp_avg": tensors[f"mean.{name}"], "exp_avg_sq": tensors[f"square.{name}"]}
                state["state"][number] = {"step": torch.tensor(float(self.step)), **moments}
        self.optimizer.load_state_dict(state)
        log = self.out / "log.jsonl"
        if log.exists():  # what was logged past the checkpoint will be done and logged again
            lines = [line for line in log.read_text().splitlines() if json.loads(line)["step"] <= self.step]
            log.write_text("".join(line + "\n" for line in lines))


@torch.inference_mode()
def bits_per_byte(network: Network, codec: str, heldout: bytes, length: int) -> float:
    """Of `heldout`, in texts of `length` that overlap by a quarter, so that but for the first all bytes have a quarter text before them."""
    network.eval()
    raw = torch.from_numpy(np.frombuffer(heldout, np.uint8).astype(np.int64))
    block = network.config.block
    bits, counted, at = 0.0, 0, 0
    while counted < len(raw) - 1:
        piece = raw[at : at + length + 1]
        padded = F.pad(piece[:-1], (0, -(len(piece) - 1) % block))
        logits = network.logits(hidden(network, codec_of(codec), padded[None]))[0, : len(piece) - 1]
        fresh = counted - at
        bits += float(F.cross_entropy(logits[fresh:], piece[fresh + 1 :], reduction="sum")) / math.log(2)
        counted = at + len(piece) - 1
        at += length * 3 // 4
    return bits / counted
