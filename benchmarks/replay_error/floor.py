"""What the figures are to be held against: how far a cold run lies from itself when only something harmless changes.

chunking          the prompt cut elsewhere: equal bits, or the study ends
threads           two threads of torch instead of one
other products    the network over the whole text at once, as training runs it: same mathematics and codec, products of other shapes, as
                  in any engine that does not promise equal bits
bf16 products     the same with products in bf16, as accelerators run it
codec             f32 rows in the cache against bf16 rows, and against v41's FP4 and FP8: what compressing the cache costs
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.replay_error.probe import answer_logits, deviation
from benchmarks.replay_error.study import Study, chosen
from kvstore.engine_integration.model.codecs import codec_of
from kvstore.engine_integration.model.model import Model
from kvstore.engine_integration.train.forward import hidden


def floor_sample(study: Study, number: int) -> None:
    model, config = study.model, study.model.config
    kind, nth = study.kind(number), number // len(study.texts)
    draw = chosen("floor", number)
    prompt = 4 * config.block + int(draw.integers(0, config.block))
    end = prompt + config.block
    tokens = study.texts[kind].passage(nth, 6 * config.block)
    truth = tokens[prompt:end]

    def cold(of: Model = model) -> Tensor:
        return answer_logits(of, of.begin(prompt), tokens, prompt, len(truth))

    def whole(*, bf16: bool = False) -> Tensor:
        length = -(-(end - 1) // config.block) * config.block
        with torch.inference_mode():
            ids = torch.tensor(tokens[:length])[None]
            outputs = hidden(model.network, codec_of("v41"), ids, prompt - config.slots, torch.bfloat16 if bf16 else torch.float32)
            return model.network.logits(outputs)[0, prompt - 1 : end - 1].float()

    exact = cold()
    state = model.begin(prompt)
    while state.length < prompt - 1:
        model.feed(state, tokens[state.length : min(prompt - 1, state.length + int(draw.integers(1, 4 * config.block)))])
    study.check("a prompt cut elsewhere", torch.equal(exact, answer_logits(model, state, tokens, prompt, len(truth))))

    if nth % 2 == 0:
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            study.tally(f"floor/{kind}/threads").add(deviation(exact, cold(), truth))
        finally:
            torch.set_num_threads(before)
    products = whole()
    study.tally(f"floor/{kind}/other products").add(deviation(exact, products, truth))
    study.tally(f"floor/{kind}/bf16 products").add(deviation(products, whole(bf16=True), truth))
    raw = cold(study.in_codec("f32"))
    study.tally(f"floor/{kind}/bf16 rows").add(deviation(raw, cold(study.in_codec("bf16")), truth))
    study.tally(f"floor/{kind}/v41 rows").add(deviation(raw, exact, truth))
