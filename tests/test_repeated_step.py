"""Steps that are made of the one before give the ids of steps that are prepared anew."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from conftest import compiled_for, limited

from builder.compile import Compiled
from builder.run import Request, Runner
from builder.sampling import Sampler
from builder.schema import SamplingConfig

MODEL = "model=tiny_llama"
PAGE = 128


def _requests(lengths: Sequence[int], counts: Sequence[int]) -> list[Request]:
    return [
        Request(
            np.random.default_rng(length).integers(3, 256, length).tolist(),
            count,
            Sampler(SamplingConfig(), 0),
        )
        for length, count in zip(lengths, counts, strict=True)
    ]


def _prepared(
    compiled: Compiled, requests: Sequence[Request], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, int]:
    """Runs requests; how many steps were prepared, and how many there were."""
    calls = []
    prepare = compiled.model.prepare_initial_token_inputs

    def counted(*args, **kwargs):
        calls.append(args)
        return prepare(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(compiled.model, "prepare_initial_token_inputs", counted)
        runner = Runner(compiled)
        runner.run(requests)
    assert runner.free_pages() == runner.plan.num_pages * runner.plan.num_replicas
    return len(calls), runner.times.steps


def _assert_same_ids(
    compiled: Compiled,
    lengths: Sequence[int],
    counts: Sequence[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ids are those of a run without such steps, of which there are some."""
    found, wanted = _requests(lengths, counts), _requests(lengths, counts)
    prepared, steps = _prepared(compiled, found, monkeypatch)
    assert prepared < steps
    with monkeypatch.context() as patch:
        patch.setattr(compiled.model, "repeated", lambda _inputs: None)
        prepared, steps = _prepared(compiled, wanted, monkeypatch)
    assert prepared == steps
    assert [request.ids for request in found] == [request.ids for request in wanted]
    assert [len(request.ids) for request in found] == list(counts)


@pytest.mark.parametrize(
    ("length", "count", "pages"),
    [
        # The tokens that decode are at 120 .. 418: of the first, and at 128, 256 and 384.
        (120, 300, 4),
        # At 127 alone, then 128 on: the second needs a page already.
        (127, 20, 2),
        # At 128 .. 146: the first decode step begins a page.
        (128, 20, 1),
        (5, 2, 1),
    ],
)
def test_a_step_is_prepared_once_per_page(
    length: int, count: int, pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared, steps = _prepared(compiled_for(MODEL), _requests([length], [count]), monkeypatch)
    # The prompt's step, and one for each page that is decoded into.
    assert prepared == 1 + pages
    assert steps == count


def test_ids_across_the_edges_of_pages_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    _assert_same_ids(compiled_for(MODEL), [100, 120, 250], [60, 60, 60], monkeypatch)


def test_ids_beside_one_that_ends_earlier_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    _assert_same_ids(compiled_for(MODEL), [20, 120, 40], [7, 40, 19], monkeypatch)


def test_ids_beside_one_that_joins_later_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    # Pages for two of these at a time: the third joins when the first ends.
    compiled = limited(compiled_for(MODEL), num_pages=4)
    _assert_same_ids(compiled, [100, 120, 90, 30], [50, 130, 60, 20], monkeypatch)


def test_ids_beside_a_prompt_in_chunks_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = limited(compiled_for(MODEL), max_batch_input_tokens=64)
    _assert_same_ids(compiled, [5, 200], [30, 30], monkeypatch)


def test_ids_of_replicas_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compiled_for(MODEL, "deployment=dp2")
    # One replica has more sequences than the other, then one has none.
    _assert_same_ids(compiled, [100, 20, 60], [60, 20, 45], monkeypatch)
