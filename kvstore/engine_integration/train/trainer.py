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
from kvstore.engine_integration.train.evaluate import bits_per_byte
from kvstore.engine_integration.train.forward import draft_hidden, hidden
from kvstore.engine_integration.train.muon import Muon
from kvstore.engine_integration.train.plan import Plan, Recipe, split
from kvstore.engine_integration.train.sleep import put_to_sleep, sleepers, wake
from kvstore.errors import InputError

DRAFT_SHARE: Final = 0.1  # of the loss
_KEPT: Final = {"mean": "mean", "exp_avg": "mean", "exp_avg_sq": "square", "step": "steps"}  # of an optimizer's state, in a checkpoint
LOGGED_HELDOUT_BYTES: Final = 50_000  # evaluated on the way: a minute of `mini` on one core, and four for all of it


class Trainer:
    def __init__(
        self, config: ModelConfig, codec: str, recipe: Recipe, text: npt.NDArray[np.uint16], out: Path, begin: Path | None = None
    ) -> None:
        """Goes on from the checkpoint in `out` where there is one, else begins with the weights in `begin`, or with fresh ones.
        InputError where a file is of another model or recipe."""
        self.config, self.codec, self.recipe, self.text, self.out = config, codec_of(codec), recipe, text, out
        self.dtype = torch.bfloat16 if recipe.bf16 else torch.float32
        if begin is None:
            self.network = Network(config)
            self.network.randomise(recipe.seed)
        else:
            self.network = Network.load(config, begin)
        self.step = 0
        self.progress = 0.0  # of the run, 0 to 1
        self.asleep = sleepers(config) if begin is None and recipe.wake_at else frozenset()
        put_to_sleep(self.network, self.asleep)
        self.plan = Plan(recipe, len(text))
        matrices, others = split(self.network)
        names = {id(weight): name for name, weight in self.network.named_parameters()}
        self.muon = Muon(matrices, recipe.matrix_rate, dtype=self.dtype)
        self.adam = torch.optim.AdamW(others, lr=recipe.rate, betas=(0.9, 0.95), weight_decay=0.0)
        self._names = [[names[id(w)] for w in optimizer.param_groups[0]["params"]] for optimizer in (self.muon, self.adam)]
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
        starts, length = self.plan.texts(step)
        rows = np.stack([self.text[at : at + length + 1] for at in starts]).astype(np.int64)
        chosen = np.random.default_rng([self.recipe.seed, step])
        truncated = chosen.random() < self.recipe.truncated_share
        start = int(chosen.integers(0, max(1, length - self.config.block))) if truncated else 0
        return torch.from_numpy(rows), start

    def loss(self, rows: Tensor, start: int, *, draft: bool) -> tuple[Tensor, Tensor]:
        """Mean loss in nats of the tokens from `start` on, and what is to be lowered: it, and a share of the draft layer's, which learns
        from the decoder's output without moving it."""
        tokens = rows[:, :-1]
        outputs = hidden(self.network, self.codec, tokens, start, self.dtype, self.asleep)
        logits = self.network.logits(outputs[:, start:])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, start + 1 :].flatten())
        if not draft:
            return loss, loss
        drafted = self.network.logits(draft_hidden(self.network, self.codec, outputs.detach(), tokens, start, self.dtype)[:, start:-1])
        return loss, loss + DRAFT_SHARE * F.cross_entropy(drafted.flatten(0, 1), rows[:, start + 2 :].flatten())

    def train_step(self) -> float:
        """Loss of the step, in nats a token."""
        self.network.train()
        if self.asleep and self.progress >= self.recipe.wake_at:
            wake(self.network, self.asleep)
            self.asleep = frozenset()
        share = self.recipe.rate_at(self.step, self.progress)
        self.muon.param_groups[0]["lr"] = self.recipe.matrix_rate * share
        self.adam.param_groups[0]["lr"] = self.recipe.rate * share
        drafting = self.network.draft is not None and self.progress >= self.recipe.draft_from
        loss, lowered = self.loss(*self.batch(self.step), draft=drafting)
        self.network.zero_grad()
        lowered.backward()  # type: ignore[no-untyped-call]  # torch gives it no types
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.muon.step()
        self.adam.step()
        for module in self.network.modules():
            if isinstance(module, MoE):
                module.balance(self.recipe.balance_step)
        self.step += 1
        self.progress = self.plan.tokens(self.step) / self.recipe.tokens
        return float(loss.detach())

    # --- many ---

    def run(
        self,
        heldout: bytes,
        *,
        seconds: float = math.inf,
        finish_seconds: float | None = None,
        log_steps: int = 20,
        eval_steps: int = 500,
        checkpoint_seconds: float = 300.0,
        say: Callable[[str], None] = print,
    ) -> None:
        """Until the recipe's tokens are done, `seconds` have passed, or a signal asks; always leaves a checkpoint. With `finish_seconds`
        the clock decides instead of the tokens: rates fall so that they reach nothing then, whatever was done until then."""
        stopped: list[int] = []
        before = {number: signal.signal(number, lambda number, _: stopped.append(number)) for number in (signal.SIGTERM, signal.SIGINT)}
        began = saved = logged = time.monotonic()
        done, logged_step, cpu = self.progress, self.step, time.process_time()
        try:
            while self.progress < 1.0 and not stopped and time.monotonic() - began < seconds:
                loss = self.train_step()
                now = time.monotonic()
                if finish_seconds is not None:
                    self.progress = done + (1.0 - done) * min(1.0, (now - began) / max(1e-9, finish_seconds))
                if self.step % log_steps == 0 or self.progress >= 1.0:
                    tokens = self.plan.tokens(self.step)
                    line = {
                        "step": self.step,
                        "tokens": tokens,
                        "loss": round(loss, 4),
                        "progress": round(self.progress, 4),
                        "tokens_per_second": round((tokens - self.plan.tokens(logged_step)) / max(1e-9, now - logged)),
                        "tokens_per_cpu_second": round((tokens - self.plan.tokens(logged_step)) / max(1e-9, time.process_time() - cpu)),
                    }
                    if self.step % eval_steps == 0 or self.progress >= 1.0:
                        line["heldout_bits_per_byte"] = bits_per_byte(
                            self.network, self.codec.name, heldout[:LOGGED_HELDOUT_BYTES], self.recipe.long_tokens
                        )
                    with (self.out / "log.jsonl").open("a") as log:
                        log.write(json.dumps(line) + "\n")
                    say(json.dumps(line))
                    logged, logged_step, cpu = time.monotonic(), self.step, time.process_time()
                if now - saved >= checkpoint_seconds:
                    self.save()
                    saved = now
            self.save()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def save(self) -> None:
        tensors = {f"weight.{name}": tensor for name, tensor in self.network.state_dict().items()}
        for optimizer, names in zip((self.muon, self.adam), self._names, strict=True):
            for weight, name in zip(optimizer.param_groups[0]["params"], names, strict=True):
                for key, kept in _KEPT.items():
                    if key in optimizer.state[weight]:
                        tensors[f"{kept}.{name}"] = optimizer.state[weight][key]
        meta = {
            "step": str(self.step),
            "tokens": str(self.plan.tokens(self.step)),
            "progress": repr(self.progress),
            "asleep": json.dumps(sorted(self.asleep)),
            "identity": self._identity,
        }
        weights.save(self.checkpoint_path, tensors, meta)

    def _resume(self) -> None:
        tensors, meta = weights.load(self.checkpoint_path)
        if meta.get("identity") != self._identity:
            cause = f"was made by {meta.get('identity')}, asked for {self._identity}"
            raise InputError("E173", str(self.checkpoint_path), cause, "name another --out, or ask for the same")
        self.step, self.progress = int(meta["step"]), float(meta["progress"])
        self.asleep = frozenset(json.loads(meta["asleep"]))
        self.network.load_state_dict({n.removeprefix("weight."): t for n, t in tensors.items() if n.startswith("weight.")})
        for optimizer, names in zip((self.muon, self.adam), self._names, strict=True):
            for weight, name in zip(optimizer.param_groups[0]["params"], names, strict=True):
                optimizer.state[weight] = {key: tensors[f"{kept}.{name}"] for key, kept in _KEPT.items() if f"{kept}.{name}" in tensors}
        log = self.out / "log.jsonl"
        if log.exists():  # what was logged past the checkpoint will be done and logged again
            lines = [line for line in log.read_text().splitlines() if json.loads(line)["step"] <= self.step]
            log.write_text("".join(line + "\n" for line in lines))
