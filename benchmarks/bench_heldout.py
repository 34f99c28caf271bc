"""heldout_bpb: bits a byte of the committed weights of `mini` on the held-out text, beside a Witten-Bell 5-gram of the same corpus."""

from __future__ import annotations

from benchmarks.harness import Bench, Figure, at_most, measures

BYTES = {"smoke": 1_000, "ci": 200_000, "full": 200_000}


@measures("heldout_bpb")
def heldout_bpb(bench: Bench) -> dict[str, Figure]:
    from kvstore.engine_integration.model.model import Model
    from kvstore.engine_integration.train import corpus, evaluate, ngram
    from kvstore.errors import InputError

    model = Model.mini()
    heldout = corpus.HELDOUT.read_bytes()[: BYTES[bench.scale.name]]
    bits = evaluate.bits_per_byte(model.network, "v41", heldout, 32 * model.config.block)
    accepted, made = evaluate.draft_acceptance(model, heldout, probes=100 if len(heldout) > 100_000 else 3)
    beside = "5-gram not counted at this size"
    if bench.scale.name != "smoke":
        try:
            text = corpus.tokens()
            beside = f"5-gram {ngram.bits_per_byte(text[text < 256].astype('u1').tobytes(), heldout, 5):.3f}"
        except InputError:
            beside = "5-gram not counted: another library than the pinned one"
    note = f"{len(heldout)} bytes in texts of 4,096; {beside}; of {made} guesses of the draft layer {accepted / made:.0%} accepted"
    return {"heldout_bpb": Figure(bits, at_most(1.90), note)}
