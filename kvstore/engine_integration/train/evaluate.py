"""What trained weights are worth on text they never saw: bits a byte, and how often the draft layer guesses what the model says."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from kvstore.engine_integration.model.blocks import Network
from kvstore.engine_integration.model.codecs import codec_of
from kvstore.engine_integration.model.model import Model
from kvstore.engine_integration.model.speculate import DraftLayer
from kvstore.engine_integration.train.forward import hidden


def bits_per_byte(network: Network, codec: str, heldout: bytes, length: int) -> float:
    """Mean over all bytes of `heldout` but the first, which has nothing before it."""
    return float(bits_of_bytes(network, codec, heldout, length).mean())


@torch.inference_mode()
def bits_of_bytes(network: Network, codec: str, heldout: bytes, length: int) -> Tensor:
    """Bits (len(heldout) - 1,) of each byte but the first, in texts of `length` that overlap by a quarter, so that but for the first text
    all bytes have a quarter text before them."""
    network.eval()
    raw = torch.from_numpy(np.frombuffer(heldout, np.uint8).astype(np.int64))
    block = network.config.block
    bits: list[Tensor] = []
    counted, at = 0, 0
    while counted < len(raw) - 1:
        piece = raw[at : at + length + 1]
        padded = F.pad(piece[:-1], (0, -(len(piece) - 1) % block))
        fresh = counted - at
        logits = network.logits(hidden(network, codec_of(codec), padded[None])[0, fresh : len(piece) - 1])
        bits.append(F.cross_entropy(logits, piece[fresh + 1 :], reduction="none") / math.log(2))
        counted = at + len(piece) - 1
        at += length * 3 // 4
    return torch.cat(bits)


def draft_acceptance(model: Model, heldout: bytes, probes: int = 100) -> tuple[int, int]:
    """Guesses accepted, and made, when the draft layer guesses on at `probes` places of `heldout`, evenly apart: accepted are those before
    the first that is not what the model itself finds most likely. The text read is always the held-out one, never the model's own."""
    config = model.config
    draft = DraftLayer(model)
    apart = min(2 * config.block, len(heldout) // (probes + 1))
    state = model.begin(apart)
    outputs, _ = model.run(state, list(heldout[:apart]))
    draft.observe(apart - len(outputs), outputs[:-1], list(heldout[apart - len(outputs) + 1 : apart]))
    accepted = made = 0
    for probe in range(1, probes + 1):
        position = state.length - 1  # of the last row; the byte after it is known, those after that are guessed
        known = heldout[position + 1]
        guesses = draft.guess(position, outputs[-1], known, min(config.spare - 1, config.draft_tokens))
        said = model.run(state, [known, *guesses])[1].argmax(-1).tolist()
        accepted += next((i for i, guess in enumerate(guesses) if guess != said[i]), len(guesses))
        made += len(guesses)
        state.rollback(len(guesses) + 1)
        before, text = outputs[-1:], list(heldout[position + 1 : (probe + 1) * apart])
        outputs, _ = model.run(state, text)
        draft.observe(position, torch.cat([before, outputs[:-1]]), text)
    return accepted, made
