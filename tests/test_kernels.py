"""The Mojo kernels compute what numpy does, for every size of tile and remainder."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from max.driver import Buffer
from max.dtype import DType
from max.engine import Model
from max.graph import DeviceRef, Graph, TensorType

from builder.compile import process_session
from models.kernels import KERNELS, matmul

CPU = DeviceRef.CPU()


@cache
def _matmul() -> Model:
    types = [TensorType(DType.float32, shape, CPU) for shape in (["m", "k"], ["n", "k"])]
    with Graph("matmul", input_types=types, custom_extensions=[KERNELS]) as graph:
        x, weight = (value.tensor for value in graph.inputs)
        graph.output(matmul(x, weight))
    return process_session().load(graph)


# Rows in tiles of 4 and blocks of 32, columns in tiles of 4, both over two threads.
@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 32, 33, 70])
@pytest.mark.parametrize(("columns", "inner"), [(1, 1), (3, 16), (4, 15), (37, 51), (960, 576)])
def test_matmul_of_any_size_is_numpys(rows: int, columns: int, inner: int) -> None:
    generator = np.random.default_rng(rows + columns)
    x = generator.standard_normal((rows, inner), np.float32)
    weight = generator.standard_normal((columns, inner), np.float32)
    (found,) = _matmul().execute(Buffer.from_numpy(x), Buffer.from_numpy(weight))
    np.testing.assert_allclose(found.to_numpy(), x @ weight.T, atol=1e-4 * inner**0.5)
