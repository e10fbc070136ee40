"""Batching changes when things are computed, never what."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import compiled_for, expected, forced_logits, greedy_ids, limited, plan_for
from max.nn.transformer import ReturnLogits

from models.decoder import CausalDecoder
from models.weights import WeightLoader

MODEL = "model=tiny_llama"
PROMPTS = [
    np.random.default_rng(length).integers(3, 256, length).tolist()
    for length in (1, 5, 17, 60, 127, 128, 129, 230)
]


def test_eight_prompts_in_one_batch_give_the_ids_of_one_by_one() -> None:
    compiled = compiled_for(MODEL)
    alone = [greedy_ids(compiled, [prompt], 12)[0] for prompt in PROMPTS]
    assert greedy_ids(compiled, PROMPTS, 12) == alone


def test_prompt_in_chunks_gives_the_logits_of_the_whole() -> None:
    values = expected("tiny_llama")
    # 200 tokens in chunks of 64, 64, 64 and 8: chunk ends inside and at the edge of pages.
    chunked = limited(compiled_for(MODEL), max_batch_input_tokens=64)
    (found,) = forced_logits(chunked, [(values["prompt_3"], values["forced_3"])])
    np.testing.assert_allclose(found, values["logits_3"], atol=1e-4, rtol=0)


def test_chunked_prefill_beside_decoding_gives_the_same_ids() -> None:
    compiled = compiled_for(MODEL)
    whole = greedy_ids(compiled, PROMPTS, 12)
    assert greedy_ids(limited(compiled, max_batch_input_tokens=23), PROMPTS, 12) == whole


def test_more_prompts_than_the_cache_holds_all_finish_with_the_same_ids() -> None:
    compiled = compiled_for(MODEL)
    whole = greedy_ids(compiled, PROMPTS, 12)
    # 4 pages hold one sequence of 512 tokens, or four of 128.
    assert greedy_ids(limited(compiled, num_pages=4), PROMPTS * 2, 12) == whole * 2


def test_pages_are_free_again_after_a_run() -> None:
    from builder.run import Runner

    compiled = compiled_for(MODEL)
    runner = Runner(compiled)
    total = compiled.registration.plan.num_pages
    runner.run(_requests(PROMPTS, 4))
    assert runner.free_pages() == total


def test_stop_token_ends_a_sequence_and_is_its_last_id() -> None:
    from builder.run import Runner

    compiled = compiled_for(MODEL)
    (ids,) = greedy_ids(compiled, [PROMPTS[2]], 12)
    (request,) = _requests([PROMPTS[2]], 12)
    request.stop_ids = frozenset({ids[4]})
    Runner(compiled).run([request])
    assert request.finish == "stop"
    assert request.ids == ids[: ids.index(ids[4]) + 1]


def test_a_run_that_is_stopped_keeps_what_it_has() -> None:
    from builder.run import Runner

    compiled = compiled_for(MODEL)
    (whole,) = greedy_ids(compiled, [PROMPTS[1]], 12)
    requests = _requests([PROMPTS[1]] * 12, 12)
    runner = Runner(compiled)
    runner.run(requests, should_stop=lambda: runner.times.steps == 5)
    # Eight run at once; four have not begun.
    assert [len(request.ids) for request in requests] == [5] * 8 + [0] * 4
    assert {request.finish for request in requests} == {"interrupted"}
    assert requests[0].ids == whole[:5]
    assert runner.free_pages() == compiled.registration.plan.num_pages


def test_inputs_are_there_before_a_step_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from max.driver import CPU, Buffer
    from max.dtype import DType
    from max.pipelines.graph_input_stager import GraphInputStaging

    compiled = compiled_for(MODEL)
    whole = greedy_ids(compiled, PROMPTS[:3], 6)
    send, busy = GraphInputStaging.send, []

    def send_late(self: GraphInputStaging) -> None:
        # Zeros for 64 MiB wait in the queue that the inputs are copied through, as on a machine
        # that is busy with something else.
        busy.append(Buffer.zeros([16 << 20], DType.float32, CPU()))
        send(self)

    monkeypatch.setattr(GraphInputStaging, "send", send_late)
    assert greedy_ids(compiled, PROMPTS[:3], 6) == whole


def test_all_token_logits_match_hugging_face() -> None:
    from builder.run import Runner

    values = expected("tiny_llama")
    compiled = compiled_for(MODEL, "deployment=cpu_all_logits")
    rows: list[np.ndarray] = []
    (request,) = _requests([values["prompt_0"].tolist()], 0)
    request.on_logits = lambda logits: rows.append(logits.copy())
    Runner(compiled).run([request])
    np.testing.assert_allclose(np.concatenate(rows), values["all_0"], atol=1e-4, rtol=0)


def test_variable_logits_are_the_last_rows_of_each_sequence() -> None:
    values = expected("tiny_llama")
    compiled = compiled_for(MODEL, "deployment=cpu_variable_logits")
    outputs = _one_step(compiled, [values["prompt_0"], values["prompt_0"]], return_n_logits=3)
    np.testing.assert_array_equal(outputs.logit_offsets.to_numpy(), [0, 3, 6])
    logits = outputs.logits.to_numpy()
    np.testing.assert_allclose(logits[:3], values["all_0"][-3:], atol=1e-4, rtol=0)
    np.testing.assert_allclose(logits[3:], values["all_0"][-3:], atol=1e-4, rtol=0)
    np.testing.assert_allclose(
        outputs.next_token_logits.to_numpy()[1], values["all_0"][-1], atol=1e-4, rtol=0
    )


def test_more_logits_than_the_graph_returns_are_refused() -> None:
    values = expected("tiny_llama")
    with pytest.raises(ValueError, match="return_n_logits=2, but the graph returns last_token"):
        _one_step(compiled_for(MODEL), [values["prompt_0"]], return_n_logits=2)
    variable = compiled_for(MODEL, "deployment=cpu_variable_logits")
    with pytest.raises(ValueError, match="shortest request of this step has 1 tokens"):
        _one_step(variable, [values["prompt_1"], values["prompt_0"]], return_n_logits=2)


@pytest.mark.parametrize(
    ("supported", "num_devices", "wanted"),
    [
        (False, 2, "does not support data parallelism"),
        (True, 3, "over 3 devices: each device needs a replica of its own"),
    ],
)
def test_data_parallelism_that_cannot_be_served_is_refused(
    supported: bool, num_devices: int, wanted: str
) -> None:
    from builder.build import build
    from builder.compile import process_session

    registration = build(plan_for(MODEL, "deployment=dp2"))
    decoder = type("Decoder", (CausalDecoder,), {"supports_data_parallelism": supported})
    model_cls = type("Model", (registration.model_cls,), {"decoder_cls": decoder})
    with pytest.raises(ValueError, match=wanted):
        model_cls(
            registration.pipeline_config,
            process_session(),
            registration.devices[:1] * num_devices,
            registration.pipeline_config.model.kv_cache,
            WeightLoader(registration.plan.checkpoint),
            return_logits=ReturnLogits.LAST_TOKEN,
            memory_plan=registration.memory_plan,
        )


def _requests(prompts, count):
    from builder.run import Request
    from builder.sampling import Sampler
    from builder.schema import SamplingConfig

    return [Request(list(p), count, Sampler(SamplingConfig(), 0)) for p in prompts]


def _one_step(compiled, prompts, return_n_logits):
    from max.pipelines.context import TextContext, TokenBuffer

    from builder.run import Runner

    kv = Runner(compiled)._kv
    contexts = [
        TextContext(max_length=512, tokens=TokenBuffer(np.array(p, np.int64))) for p in prompts
    ]
    for context in contexts:
        kv.claim(context)
        kv.alloc(context)
    inputs = compiled.model.prepare_initial_token_inputs(
        [contexts], kv.runtime_inputs([contexts]), return_n_logits
    )
    return compiled.model.execute(inputs)
