"""A layer's half as one kernel computes what the kernels that it is composed of do."""

from __future__ import annotations

from functools import cache

import gguf
import numpy as np
import pytest
from max.driver import Buffer
from max.dtype import DType
from max.engine import Model
from max.graph import BufferType, DeviceRef, Graph, TensorType, TensorValue, ops
from max.nn.kv_cache import PagedCacheValues
from max.nn.kv_cache.cache_params import PACKED_PAGE_STRIDE

from builder.compile import process_session
from models.arena import Arena
from models.kernels import (
    Matrix,
    attention,
    attention_layer,
    feed_forward,
    kernel_library,
    rms_norm,
    rotate_and_store,
)
from models.storage import EXACT_STORAGES, STORAGES, Blocks, Storage

CPU = DeviceRef.CPU()
HIDDEN, INNER = 96, 160
EPS, OFFSET = 1e-5, 1.0

# Alike, and mixed as in files whose encodings differ by tensor.
KEPT = [
    (None, None),
    (STORAGES["BF16"], STORAGES["F16"]),
    (STORAGES["Q4_1"], STORAGES["Q4_1"]),
    (STORAGES["Q8_0"], None),
    (None, STORAGES["Q4_0"]),
    (EXACT_STORAGES["Q4_1"], EXACT_STORAGES["Q8_0"]),
]

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 32, 16
WINDOW = 50


def _matrix(storage: Storage | None, rows: int, columns: int) -> tuple[Buffer, TensorType]:
    generator = np.random.default_rng(rows)
    values = 0.1 * generator.standard_normal((rows, columns), np.float32)
    if storage is None:
        return Buffer.from_numpy(values), TensorType(DType.float32, values.shape, CPU)
    kind = gguf.GGMLQuantizationType[storage.encoding]
    stored = gguf.quantize(values, kind).view(np.uint8)
    packed = storage.pack(stored.reshape(rows, -1, storage.block_bytes), Arena())
    if isinstance(storage, Blocks):
        packed = Buffer.from_numpy(packed)
    return packed, storage.type(rows, columns, CPU)


def _matrices(
    shapes: tuple[tuple[int, int], tuple[int, int]],
) -> tuple[list[Buffer], list[TensorType], list[tuple[int, int, Storage | None]]]:
    """Each pair of matrices: its values, their types, and what a ``Matrix`` says of them."""
    buffers, types, facts = [], [], []
    for pair in KEPT:
        for storage, shape in zip(pair, shapes, strict=True):
            buffer, type_ = _matrix(storage, *shape)
            buffers.append(buffer)
            types.append(type_)
            facts.append((*shape, storage))
    return buffers, types, facts


@cache
def _feed_forwards() -> tuple[Model, list[Buffer]]:
    """Each pair of matrices, in one kernel and in several."""
    buffers, kept, facts = _matrices(((2 * INNER, HIDDEN), (HIDDEN, INNER)))
    types = [
        TensorType(DType.float32, ["tokens", HIDDEN], CPU),
        TensorType(DType.float32, [HIDDEN], CPU),
        *kept,
    ]
    with Graph("feed_forward", input_types=types, custom_extensions=[kernel_library()]) as graph:
        x, norm, *values = (value.tensor for value in graph.inputs)
        matrices = [Matrix(value, *fact) for value, fact in zip(values, facts, strict=True)]
        outputs: list[TensorValue] = []
        for gate_up, down in zip(matrices[::2], matrices[1::2], strict=True):
            outputs.append(feed_forward(x, norm, gate_up, down, eps=EPS, offset=OFFSET))
            both = gate_up.product(rms_norm(x, norm, EPS, OFFSET))
            gate, up = ops.split(both, [INNER, INNER], axis=1)
            outputs.append(x + down.product(ops.silu(gate) * up))
        graph.output(*outputs)
    return process_session().load(graph), buffers


@pytest.mark.parametrize("rows", [0, 1, 3, 5, 40])
def test_a_feed_forward_is_what_it_is_composed_of(rows: int) -> None:
    # None, one, and rows that are computed in tiles and in panels.
    model, matrices = _feed_forwards()
    generator = np.random.default_rng(rows)
    x = generator.standard_normal((rows, HIDDEN), np.float32)
    norm = generator.standard_normal(HIDDEN, np.float32)
    outputs = model.execute(Buffer.from_numpy(x), Buffer.from_numpy(norm), *matrices)
    found = [output.to_numpy() for output in outputs]
    for kept, one, several in zip(KEPT, found[::2], found[1::2], strict=True):
        np.testing.assert_allclose(one, several, atol=1e-5, err_msg=str(kept))


@cache
def _attention_layers() -> tuple[Model, list[Buffer]]:
    """The same of attention; each way has pages of its own."""
    width = HEADS * DIM
    buffers, kept, facts = _matrices(((width + 2 * KV_HEADS * DIM, HIDDEN), (HIDDEN, width)))
    types = [
        TensorType(DType.float32, ["tokens", HIDDEN], CPU),
        TensorType(DType.float32, [HIDDEN], CPU),
        TensorType(DType.float32, ["positions", DIM], CPU),
        TensorType(DType.uint32, ["offsets"], CPU),
        TensorType(DType.int64, [1], CPU),
        TensorType(DType.uint32, ["sequences", "most_pages"], CPU),
        TensorType(DType.uint32, ["sequences"], CPU),
        TensorType(DType.uint32, [1], CPU),
        TensorType(DType.uint32, [1], CPU),
        *([BufferType(DType.float32, ["pages", 2, 2, PAGE, KV_HEADS, DIM], CPU)] * 2 * len(KEPT)),
        *kept,
    ]
    with Graph("attention", input_types=types, custom_extensions=[kernel_library()]) as graph:
        pools = [value.buffer for value in graph.inputs[9 : 9 + 2 * len(KEPT)]]
        tensors = [value.tensor for value in graph.inputs if isinstance(value, TensorValue)]
        x, norm, table, offsets, stride, lookup, lengths, most_new, most, *values = tensors
        caches = [
            PagedCacheValues(
                kv_blocks=pool,
                cache_lengths=lengths,
                lookup_table=lookup,
                max_prompt_length=most_new,
                max_cache_length=most,
                page_stride=stride,
            )
            for pool in pools
        ]
        matrices = [Matrix(value, *fact) for value, fact in zip(values, facts, strict=True)]
        outputs: list[TensorValue] = []
        for at in range(0, len(matrices), 2):
            (qkv, o), (own, other) = matrices[at : at + 2], caches[at : at + 2]
            seen = {"window": WINDOW, "scale": 0.2}
            rest = (own, offsets, table, 1)
            outputs.append(attention_layer(x, norm, qkv, o, *rest, eps=EPS, offset=OFFSET, **seen))
            projected = qkv.product(rms_norm(x, norm, EPS, OFFSET))
            queries = rotate_and_store(projected, other, offsets, table, 1, width)
            outputs.append(x + o.product(attention(queries, other, offsets, 1, **seen)))
        graph.output(*outputs)
    return process_session().load(graph), buffers


@pytest.mark.parametrize("new", [[], [1], [1, 1, 1], [1, 30, 0, 2], [3]], ids=str)
def test_an_attention_layer_is_what_it_is_composed_of(new: list[int]) -> None:
    model, matrices = _attention_layers()
    generator = np.random.default_rng(sum(new))
    cached = [70, 3, 20, 0][: len(new)]
    totals = [before + now for before, now in zip(cached, new, strict=True)]
    pages = -(-max(totals, default=1) // PAGE)
    pool = generator.standard_normal((pages * len(new) + 1, 2, 2, PAGE, KV_HEADS, DIM), np.float32)
    pools = [pool.copy() for _ in range(2 * len(KEPT))]
    inputs = (
        generator.standard_normal((sum(new), HIDDEN), np.float32),
        generator.standard_normal(HIDDEN, np.float32),
        generator.standard_normal((128, DIM), np.float32),
        np.cumsum([0, *new]).astype(np.uint32),
        np.array([PACKED_PAGE_STRIDE], np.int64),
        np.arange(pages * len(new), dtype=np.uint32).reshape(len(new), pages),
        np.array(cached, np.uint32),
        np.array([max(new, default=0)], np.uint32),
        np.array([max(totals, default=0)], np.uint32),
        *pools,
    )
    outputs = model.execute(*map(Buffer.from_numpy, inputs), *matrices)
    found = [output.to_numpy() for output in outputs]
    for kept, one, several in zip(KEPT, found[::2], found[1::2], strict=True):
        np.testing.assert_allclose(one, several, atol=1e-4, err_msg=str(kept))
    for one, several in zip(pools[::2], pools[1::2], strict=True):
        np.testing.assert_allclose(one, several, atol=1e-5)
        assert sum(new) == 0 or not np.array_equal(one, pool)
