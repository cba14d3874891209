"""Named pairs: shapes at a limit, and one or two pairs behind each door that vLLM keeps shut (doors.py)."""

from __future__ import annotations

from cases.case import Entry

_BOTH = (Entry.LAYER, Entry.FUSED_EXPERTS)
_LAYER, _DIRECT, _BATCHED = (Entry.LAYER,), (Entry.FUSED_EXPERTS,), (Entry.BATCHED,)

SMOKE_BOUNDARIES: tuple[tuple[str, tuple[Entry, ...]], ...] = (
    # many experts: more than tokens, so that most are empty, and block assignment without sorting
    ("int8-channel-dyntoken-ct-silu-bf16-e40k2m3h64i32-balanced", _BOTH),
    ("e4m3fn-channel-dyntoken-ct-silu-bf16-e60k4m3h64i32-balanced", _BOTH),
    ("e4m3fn-tensor-static-vllmfp8-silu-bf16-e60k1m2h64i32-one_each", _BOTH),
    # more rows than the largest tile
    ("int8-channel-dyntoken-quark-silu-fp16-e4k2m129h64i32-skewed", _BOTH),
    ("e4m3fn-channel-dyntoken-ct-relu2_no_mul-fp16-e4k1m129h64i32-balanced", _BOTH),
    ("fp32-none-none-plain-silu-fp32-e3k2m129h64i32-balanced", _BOTH),
    # sizes no power of two divides far: 40 = 8 * 5, 24 = 8 * 3
    ("int8-channel-dyntoken-ct-silu-fp16-e3k2m17h40i24-balanced", _BOTH),
    ("e4m3fn-tensor-static-ct-silu-bf16-e3k2m17h40i24-balanced", _BOTH),
    ("bf16-none-none-plain-silu-bf16-e3k2m17h40i24-balanced", _BOTH),
    # more than one block along N, K of both GEMMs
    ("e4m3fn-block128-dyngroup128-vllmfp8-silu-bf16-e3k2m17h384i256-balanced", _BOTH),
    ("int8-block128-dyngroup128-raw-silu-fp16-e3k2m17h384i256-balanced", _DIRECT),
    # gpt-oss with rows enough for Hopper's kernels; router weights that are given, and on the input
    ("e2m1-group32-none-gptoss-swigluoai-bf16-e4k2m8h256i128-balanced-bias", _LAYER),
    ("e2m1-group32-none-gptoss-swigluoai-bf16-e4k2m8h256i128-balanced-norenorm", _LAYER),
    ("e2m1-group32-none-gptoss-swigluoai-bf16-e4k1m17h256i128-balanced-norenorm-onin", _LAYER),
    # shut: Quark INT8 with static activations cannot run through the layer
    ("int8-channel-static-quark-silu-fp16-e4k2m8h128i64-balanced", _BOTH),
    ("int8-tensor-static-quark-silu-bf16-e4k1m17h64i32-balanced", _BOTH),
    # shut: schemes that Quark's MoE methods do not know
    ("int8-tensor-dyntensor-quark-silu-bf16-e4k2m8h128i64-balanced", _BOTH),
    ("int8-channel-dyntensor-quark-silu-fp16-e4k2m8h128i64-balanced", _BOTH),
    ("e4m3fn-channel-static-quark-silu-bf16-e4k2m8h128i64-balanced", _BOTH),
    ("e4m3fn-tensor-dyntoken-quark-silu-bf16-e4k2m8h128i64-balanced", _BOTH),
    # shut: compressed-tensors FP8 drops biases
    ("e4m3fn-tensor-static-ct-silu-bf16-e4k2m8h128i64-balanced-bias", _BOTH),
    ("e4m3fn-channel-dyntoken-ct-silu-bf16-e4k2m8h128i64-balanced-bias", _BOTH),
    ("e4m3fn-block128-dyngroup128-ct-silu-bf16-e4k2m8h128i128-balanced-bias", _BOTH),
    # shut: ModelOpt FP8 drops biases
    ("e4m3fn-tensor-static-modelopt-silu-bf16-e4k2m8h128i64-balanced-bias", _LAYER),
    # rows packed per expert, for the kernels that take silu and blocks only
    ("e4m3fn-block128-dyngroup128-raw-silu-bf16-e4k2m8h256i128-balanced", _BATCHED),
    ("e4m3fn-block128-dyngroup128-raw-silu-bf16-e4k1m17h128i256-skewed-norenorm-onin", _BATCHED),
    ("e4m3fn-block128-dyngroup128-raw-silu-bf16-e5k3m3h256i256-balanced-norenorm", _BATCHED),
    # shut: batched experts drop biases
    ("bf16-none-none-plain-silu-bf16-e4k2m8h128i64-balanced-bias", _BATCHED),
    ("e4m3fn-channel-dyntoken-raw-silu-bf16-e4k2m8h128i64-balanced-bias", _BATCHED),
    # shut: schemes that batched experts do not know
    ("int8-channel-dyntoken-raw-silu-bf16-e4k2m8h128i64-balanced", _BATCHED),
    ("e4m3fn-channel-static-raw-silu-bf16-e4k2m8h128i64-balanced", _BATCHED),
    # shut: a fused operator without fp32
    ("e4m3fn-block128-dyngroup128-ct-silu-fp32-e4k2m8h128i128-balanced", _BOTH),
)

NIGHTLY_BOUNDARIES: tuple[tuple[str, tuple[Entry, ...]], ...] = (
    # many K tiles in either GEMM
    ("int8-channel-dyntoken-ct-silu-fp16-e4k2m17h1024i64-balanced", _BOTH),
    ("e4m3fn-channel-dyntoken-ct-silu-bf16-e4k2m17h64i1024-balanced", _BOTH),
    # k = E = 8, all to all
    ("e4m3fn-tensor-static-vllmfp8-silu-bf16-e8k8m17h128i64-balanced", _BOTH),
    ("int8-channel-dyntoken-ct-relu2_no_mul-bf16-e8k8m17h128i64-balanced", _BOTH),
    # one expert, one token
    ("e4m3fn-channel-dyntoken-ct-silu-bf16-e1k1m1h128i64-single", _BOTH),
)
