"""The model alone, one request at a time: what is cached, in which bytes, and how a run goes on from them. See docs/ENGINE.md.

config    sizes `mini` and `tiny`; every other number follows
codecs    rows of floats to stored bytes and back: v41, bf16, f32
layout    what lies where in a block and in a window entry
resume    from where a prompt goes on, given what was found
attention, moe, compressor, blocks    the layers (torch)
rings, state                          what one request keeps
model                                 prefill, decode, rollback, export, import
handover                              a request in bytes: from a prefill process to a decode process
"""

from kvstore.engine_integration.model.config import MINI, SIZES, TINY, ModelConfig
from kvstore.engine_integration.model.resume import Resume, WindowUse, hit_tokens_max, plan_resume

__all__ = ["MINI", "SIZES", "TINY", "ModelConfig", "Resume", "WindowUse", "hit_tokens_max", "plan_resume"]
