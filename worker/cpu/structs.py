"""ctypes mirrors of the structs and enums in pw_cpu.h and pw_feed.h, field by field in the same order.

`library.py` compares every size with the compiled library before anything is called.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_uint64, c_void_p
from enum import IntEnum

ABI_VERSION = 1
MAX_TOP = 20


class Code(IntEnum):
    """What the library's functions return."""

    OK = 0
    ARGUMENT = -1
    MEMORY = -2
    CANCELLED = -3
    UNSUPPORTED = -4
    FILE = -5
    DEVICE = -6


class KvType(IntEnum):
    """How keys and values are stored; ggml's type ids."""

    F16 = 1
    Q8_0 = 8


class WeightStruct(ctypes.Structure):
    """`pw_weight`: a matrix [rows, cols] or a stack of `experts` of them; addresses may be None."""

    _fields_ = [
        ("type", c_int32),
        ("rows", c_int32),
        ("cols", c_int32),
        ("experts", c_int32),
        ("packed", c_void_p),
        ("file", c_void_p),
        ("packed_expert_bytes", c_int64),
        ("file_expert_bytes", c_int64),
    ]


class OpStruct(ctypes.Structure):
    """`pw_op`. The C field `in` is a keyword here and is called `inputs`, the others likewise in full."""

    _fields_ = [
        ("kind", c_int32),
        ("layer", c_int32),
        ("inputs", c_int32 * 4),
        ("outputs", c_int32 * 4),
        ("weights", c_int32 * 4),
        ("biases", c_int32 * 4),
        ("ints", c_int32 * 8),
        ("floats", c_float * 4),
    ]


class BufferStruct(ctypes.Structure):
    """`pw_buffer`: f32 rows of `width`, one per token or (is_output) one per output of the batch."""

    _fields_ = [("width", c_int32), ("is_output", c_int32)]


class SamplerStruct(ctypes.Structure):
    """`pw_sampler`: how one output row becomes a token."""

    _fields_ = [
        ("temperature", c_float),
        ("top_k", c_int32),
        ("top_p", c_float),
        ("min_p", c_float),
        ("repeat_penalty", c_float),
        ("presence_penalty", c_float),
        ("frequency_penalty", c_float),
        ("n_history", c_int32),
        ("history", c_void_p),
        ("n_bias", c_int32),
        ("n_top", c_int32),
        ("bias_ids", c_void_p),
        ("bias_values", c_void_p),
        ("seed", c_uint64),
        ("draw", c_uint64),
    ]


class SampledStruct(ctypes.Structure):
    """`pw_sampled`: the chosen token; logprob is NaN where none was asked for."""

    _fields_ = [
        ("token", c_int32),
        ("logprob", c_float),
        ("n_top", c_int32),
        ("top_ids", c_int32 * MAX_TOP),
        ("top_logprobs", c_float * MAX_TOP),
    ]


class BatchStruct(ctypes.Structure):
    """`pw_batch`: what one forward pass works on."""

    _fields_ = [
        ("n_tokens", c_int32),
        ("n_sequences", c_int32),
        ("n_outputs", c_int32),
        ("page_table_stride", c_int32),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("sequence_first", c_void_p),
        ("page_tables", c_void_p),
        ("output_rows", c_void_p),
        ("samplers", POINTER(SamplerStruct)),
        ("sampled", POINTER(SampledStruct)),
        ("logits", c_void_p),
        ("cancel", c_void_p),
    ]


class MatmulCallStruct(ctypes.Structure):
    """`pw_matmul_call`: one matrix product on the calling thread."""

    _fields_ = [
        ("weight", POINTER(WeightStruct)),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("gather", c_void_p),
        ("y", c_void_p),
        ("y_stride", c_int64),
        ("output_rows", c_void_p),
        ("bias", c_void_p),
        ("seconds", c_void_p),
        ("n_tokens", c_int32),
        ("expert_begin", c_int32),
        ("expert_end", c_int32),
        ("group_begin", c_int32),
        ("group_end", c_int32),
        ("accumulate", c_int32),
        ("scale", c_float),
    ]


class DriverStruct(ctypes.Structure):
    """`pw_driver`: functions of the CUDA driver, by address."""

    _fields_ = [
        ("set_context", c_void_p),
        ("register_memory", c_void_p),
        ("unregister_memory", c_void_p),
        ("create_stream", c_void_p),
        ("destroy_stream", c_void_p),
        ("synchronize_stream", c_void_p),
        ("create_event", c_void_p),
        ("destroy_event", c_void_p),
        ("record_event", c_void_p),
        ("synchronize_event", c_void_p),
        ("wait_event", c_void_p),
        ("copy_in", c_void_p),
    ]


class PartStruct(ctypes.Structure):
    """`pw_part`: bytes of a file on their way to a device."""

    _fields_ = [
        ("offset_bytes", c_int64),
        ("size_bytes", c_int64),
        ("target", c_uint64),
        ("file", c_int32),
        ("buffer", c_int32),
        ("n_released", c_int32),
        ("n_released_again", c_int32),
    ]


class FeedPlanStruct(ctypes.Structure):
    """`pw_feed_plan`: everything that a feed needs to know."""

    _fields_ = [
        ("driver", POINTER(DriverStruct)),
        ("context", c_void_p),
        ("stream", c_void_p),
        ("parts", POINTER(PartStruct)),
        ("piece_bytes", c_int64),
        ("n_parts", c_int32),
        ("n_buffers", c_int32),
        ("n_readers", c_int32),
        ("n_slots", c_int32),
        ("repeats", c_int32),
        ("reserved", c_int32),
    ]


STRUCTS: dict[str, type[ctypes.Structure]] = {
    "pw_weight": WeightStruct,
    "pw_op": OpStruct,
    "pw_buffer": BufferStruct,
    "pw_sampler": SamplerStruct,
    "pw_sampled": SampledStruct,
    "pw_batch": BatchStruct,
    "pw_matmul_call": MatmulCallStruct,
    "pw_driver": DriverStruct,
    "pw_part": PartStruct,
    "pw_feed_plan": FeedPlanStruct,
}
