"""What surrounds MAX's kernels for accelerators, computed on the CPU: the rest needs a device."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from max.driver import Buffer
from max.dtype import DType
from max.engine import Model
from max.graph import DeviceRef, Graph, TensorType, ops
from max.nn.attention.multi_latent_attention import LatentAttentionWithRope

from builder.compile import process_session
from models.buffers import as_dtype
from models.kernels import accelerators
from models.lora import Routing, routing_of
from models.settings import LatentSettings

CPU = DeviceRef.CPU()
PARTS = 3
HEADS, NOPE, VALUE, RANK = 2, 3, 4, 5


@cache
def _model() -> Model:
    """Everything as one graph: a further compile is seconds."""
    types = [
        TensorType(DType.float32, ["rows", 4], CPU),
        TensorType(DType.int32, ["groups"], CPU),
        TensorType(DType.uint32, ["offsets"], CPU),
        TensorType(DType.int64, [1], CPU),
        TensorType(DType.int64, [1], CPU),
        TensorType(DType.float32, [HEADS * (NOPE + VALUE), RANK], CPU),
    ]
    with Graph("around", input_types=types) as graph:
        x, ids, offsets, end, first, weight = (value.tensor for value in graph.inputs)
        starts, adapted = accelerators.own_groups(x, Routing(ids, offsets, end), first)
        latent = LatentSettings(
            query_rank=None, kv_rank=RANK, rope_dim=2, nope_dim=NOPE, value_dim=VALUE, scale=1.0
        )
        # MAX's own arrangement of the same weight.
        whole = ops.transpose(weight, 0, 1).reshape((RANK, HEADS, NOPE + VALUE))
        layer = SimpleNamespace(_kv_b_proj_weight=whole, qk_nope_head_dim=NOPE, kv_lora_rank=RANK)
        wanted = [
            getattr(LatentAttentionWithRope, name).fget(layer) for name in ("w_k", "w_uk", "w_uv")
        ]
        graph.output(
            *(edge.reshape((1,)) for edge in accelerators.shares(x, PARTS)),
            ops.cast(starts, DType.int64),
            ops.cast(adapted, DType.int32),
            *accelerators.latent_weights(weight, HEADS, latent),
            *wanted,
        )
    return process_session().load(graph)


def _run(
    rows: int,
    slots: tuple[int, ...] = (),
    lengths: tuple[int, ...] = (),
    first: int = 0,
) -> list[np.ndarray]:
    routing = routing_of(slots, lengths)
    generator = np.random.default_rng(0)
    inputs = [
        np.arange(rows * 4, dtype=np.float32).reshape(rows, 4),
        routing.ids,
        routing.offsets,
        routing.end,
        np.array([first], np.int64),
        generator.standard_normal((HEADS * (NOPE + VALUE), RANK), np.float32),
    ]
    return [out.to_numpy() for out in _model().execute(*map(Buffer.from_numpy, inputs))]


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 300])
def test_shares_differ_by_one_row_at_most_and_are_all_rows(rows: int) -> None:
    edges = [int(edge[0]) for edge in _run(rows)[: PARTS + 1]]
    assert (edges[0], edges[-1]) == (0, rows)
    sizes = np.diff(edges)
    assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize("replica", [(0, 12), (0, 5), (5, 7), (3, 6), (12, 0), (0, 0)])
@pytest.mark.parametrize(
    ("slots", "lengths"),
    [
        ((0, -1, 2), (4, 3, 5)),
        ((-1, 1, 1, -1), (1, 2, 3, 6)),
        ((-1, -1), (5, 7)),
        ((3, 2, 1), (1, 1, 10)),
    ],
)
def test_each_row_is_in_the_group_of_its_token(
    slots: tuple[int, ...], lengths: tuple[int, ...], replica: tuple[int, int]
) -> None:
    first, rows = replica
    starts, adapted = _run(rows, slots, lengths, first)[PARTS + 1 : PARTS + 3]
    owner = np.repeat(slots, lengths)[first : first + rows]
    assert (adapted[:, 0] == (owner >= 0)).all()
    # What the kernel is given: every group's rows, which cover those with an adapter.
    ids = routing_of(slots, lengths).ids
    assert len(starts) == len(ids) + 1
    given = np.full(rows, -1)
    for group, chosen in enumerate(ids):
        given[starts[group] : starts[group + 1]] = chosen
    assert (given[owner >= 0] == owner[owner >= 0]).all()


def test_latent_weights_are_arranged_as_maxs_layer_arranges_them() -> None:
    found = _run(1)[PARTS + 3 :]
    for ours, wanted in zip(found[:3], found[3:], strict=True):
        assert ours.shape == wanted.shape
        np.testing.assert_array_equal(ours, wanted)


def test_bfloat16_is_rounded_to_even() -> None:
    # The last place of 1 in bfloat16 is 2**-7: halves go to the even neighbour.
    values = [1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -(1 + 3 * 2**-8), 3.4e38]
    wanted = [1.0, 1.0, 1 + 2**-6, 1 + 2**-7, -(1 + 2**-6), np.inf]
    special = [0.0, -0.0, np.inf, -np.inf, np.nan]
    held = as_dtype(np.array(values + special, np.float32), DType.bfloat16)
    assert isinstance(held, Buffer)
    assert held.dtype == DType.bfloat16
    bits = held.view(DType.uint16, held.shape).to_numpy().astype(np.uint32) << 16
    np.testing.assert_array_equal(bits.view(np.float32), np.array(wanted + special, np.float32))
