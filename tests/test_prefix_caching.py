"""Prompts that begin alike share pages: they are computed once, and nothing else changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import (
    LORA,
    LORA_PARALLEL,
    VISION,
    VISION_PARALLEL,
    assert_refused,
    compiled_for,
    limited,
    plan_for,
)
from max.engine import Model
from max.nn.kv_cache import KVCacheParams
from test_command import read, rolecall

from builder.compare import compare, random_image_prompts, random_prompts, record
from builder.compile import Compiled
from builder.run import Request, Runner
from builder.sampling import Sampler
from builder.schema import SamplingConfig, VerifyTask
from builder.tasks.verify import _plain, _prompts

MODEL = ("model=tiny_llama",)
PAGE = 128
LONG, REST, OTHER = random_prompts((300, 20, 20), 256)
SHARED = 2 * PAGE
"""The whole pages of what some prompts here begin with."""

ALIKE = [LONG, LONG[:280] + REST, LONG[:SHARED] + OTHER, LONG[:PAGE] + REST, LONG]

Count = Callable[[Compiled], list[int]]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Count:
    """Has a deployment's steps counted: the tokens that its first graph takes in each."""

    def count(compiled: Compiled) -> list[int]:
        steps: list[int] = []
        first, execute = compiled.model.models[0], Model.execute

        def counted(model: Model, *args: Any) -> Any:
            if model is first:
                steps.append(args[0].shape[0])
            return execute(model, *args)

        monkeypatch.setattr(Model, "execute", counted)
        return steps

    return count


def requests_of(prompts: Sequence[Sequence[int]], count: int = 4, **more: Any) -> list[Request]:
    return [Request(list(p), count, Sampler(SamplingConfig(), 0), **more) for p in prompts]


def ids_of(compiled: Compiled, prompts: Sequence[Sequence[int]], count: int = 4) -> list[list[int]]:
    """Each prompt's continuation with nothing shared."""
    requests = requests_of(prompts, count)
    Runner(limited(compiled, prefix_caching=False)).run(requests)
    assert {request.cached_tokens for request in requests} == {0}
    return [request.ids for request in requests]


def test_a_second_prompt_computes_only_what_it_does_not_share(computed: Count) -> None:
    compiled = compiled_for(*MODEL)
    first, second = LONG, LONG[:280] + REST
    wanted = ids_of(compiled, [first, second])
    runner = Runner(compiled)
    steps = computed(compiled)
    requests = requests_of([first, second])
    runner.run(requests[:1])
    assert sum(steps) == 300 + 3
    steps.clear()
    runner.run(requests[1:])
    # Of 280 tokens alike, two pages of 128.
    assert sum(steps) == (300 - SHARED) + 3
    assert [request.cached_tokens for request in requests] == [0, SHARED]
    assert [request.ids for request in requests] == wanted


def test_a_continuation_is_shared_like_a_prompt() -> None:
    compiled = compiled_for(*MODEL)
    runner = Runner(compiled)
    (turn,) = requests_of([LONG[:120]], 20)
    runner.run([turn])
    (next_turn,) = requests_of([LONG[:120] + turn.ids + REST])
    runner.run([next_turn])
    # The page's last tokens are generated ones.
    assert next_turn.cached_tokens == PAGE
    assert [next_turn.ids] == ids_of(compiled, [next_turn.prompt_ids])


def test_a_whole_prompt_is_never_shared() -> None:
    # Its last token is computed, so that it has logits.
    compiled = compiled_for(*MODEL)
    runner = Runner(compiled)
    for _ in range(2):
        (request,) = requests_of([LONG[:SHARED]])
        runner.run([request])
    assert request.cached_tokens == PAGE
    assert [request.ids] == ids_of(compiled, [LONG[:SHARED]])


def test_prompts_given_at_once_wait_for_the_one_that_computes_their_pages(computed: Count) -> None:
    compiled = compiled_for(*MODEL)
    wanted = ids_of(compiled, [LONG] * 8)
    steps = computed(compiled)
    requests = requests_of([LONG] * 8)
    Runner(compiled).run(requests)
    # One computes all 300 tokens, seven the 44 that are no whole page, and each decodes three.
    assert sum(steps) == 300 + 7 * (300 - SHARED) + 8 * 3
    assert [request.ids for request in requests] == wanted


@pytest.mark.parametrize("tokens", [512, 40])
@pytest.mark.parametrize(
    "overrides",
    [
        *((*MODEL, f"deployment={name}") for name in ("cpu", "tp4", "dp2", "pp2", "pp2_tp2")),
        ("model=tiny_mixtral",),
        ("model=tiny_gpt2",),
        ("model=tiny_deepseek_v3", "deployment=ep2_tp2"),
        ("model=tiny_deepseek_v3", "deployment=ep4_dp4"),
    ],
    ids=" ".join,
)
def test_logits_equal_those_with_nothing_shared(
    overrides: tuple[str, ...], tokens: int, computed: Count
) -> None:
    overrides = tuple(word for word in overrides if word != "deployment=cpu")
    compiled = compiled_for(*overrides)
    ids, wanted = record(limited(compiled, prefix_caching=False), ALIKE, 5, tokens)
    steps = computed(compiled)
    _, found = record(compiled, ALIKE, 5, tokens, forced=ids)
    result = compare(wanted, found)
    assert result.max_abs_diff < 1e-4
    assert result.tokens_equal
    if compiled.registration.plan.num_replicas == 1:
        shared = [0, SHARED, SHARED, PAGE, SHARED]
        assert sum(steps) == sum(map(len, ALIKE)) - sum(shared) + 5 * 5


def test_each_replica_computes_what_its_prompts_begin_with(computed: Count) -> None:
    compiled = compiled_for(*MODEL, "deployment=dp2")
    wanted = ids_of(compiled, [LONG] * 4)
    steps = computed(compiled)
    requests = requests_of([LONG] * 4)
    Runner(compiled).run(requests)
    assert sorted(request.cached_tokens for request in requests) == [0, 0, SHARED, SHARED]
    assert sum(steps) == 2 * 300 + 2 * (300 - SHARED) + 4 * 3
    assert [request.ids for request in requests] == wanted
    params = compiled.registration.plan.stages[0].config.kv_params
    assert isinstance(params, KVCacheParams)
    assert not params.enable_dp_cross_replica_prefix_copy


@pytest.mark.parametrize("overrides", [LORA, *LORA_PARALLEL[1:]], ids=lambda o: o[1])
def test_prompts_with_different_adapters_share_nothing(overrides: tuple[str, ...]) -> None:
    compiled = compiled_for(*overrides)
    names = ("", "all", "some")
    found = {}
    for on in (False, True):
        runner = Runner(limited(compiled, prefix_caching=on))
        for turn in (0, 1):
            for name in names:
                (request,) = requests_of([LONG], adapter=name)
                runner.run([request])
                found[on, turn, name] = request
    for turn, name in ((turn, name) for turn in (0, 1) for name in names):
        assert found[True, turn, name].ids == found[False, turn, name].ids
    assert {found[True, 0, name].cached_tokens for name in names} == {0}
    assert {found[True, 1, name].cached_tokens for name in names} == {SHARED}


def test_an_adapter_that_takes_anothers_name_shares_nothing_of_it() -> None:
    from conftest import REFERENCE

    from models.checkpoints.peft import open_adapter

    folder = REFERENCE / "tiny_llama_adapters"
    compiled = compiled_for(*LORA)
    adapters = compiled.model.adapters
    assert adapters is not None
    runner = Runner(compiled)
    try:
        for name in ("some", "all"):
            adapters.unload("some")
            adapters.load("some", open_adapter(folder / name))
            (request,) = requests_of([LONG], adapter="some")
            runner.run([request])
            assert request.cached_tokens == 0
    finally:
        adapters.unload("some")
        adapters.load("some", open_adapter(folder / "some"))


@pytest.mark.parametrize("overrides", [VISION, *VISION_PARALLEL], ids=lambda o: o[1])
def test_prompts_share_pages_of_the_same_images_alone(overrides: tuple[str, ...]) -> None:
    compiled = compiled_for(*overrides)
    vision = compiled.registration.plan.vision
    assert vision is not None
    (ids, crops), (_, others) = random_image_prompts((2, 2), 256, vision.settings)
    ids = ids + random_prompts((2 * PAGE,), 256, vision.settings)[0]
    in_turn = [crops, others, crops, others[:1] + crops[1:]]
    found = {}
    for on in (False, True):
        runner = Runner(limited(compiled, prefix_caching=on))
        for turn, taken in enumerate(in_turn):
            (request,) = requests_of([ids], crops=taken)
            runner.run([request])
            found[on, turn] = request
    for turn in range(len(in_turn)):
        assert found[True, turn].ids == found[False, turn].ids
    shared = (len(ids) - 1) // PAGE * PAGE
    assert [found[True, turn].cached_tokens for turn in range(4)] == [0, 0, shared, 0]
    assert compiled.model.images is not None
    assert compiled.model.images._kept == {}


def test_images_that_are_given_at_once_are_encoded_for_each_prompt() -> None:
    compiled = compiled_for(*VISION)
    vision = compiled.registration.plan.vision
    assert vision is not None
    pictured = random_image_prompts((3, 3), 256, vision.settings)
    ids = pictured[0][0] + random_prompts((PAGE,), 256, vision.settings)[0]
    prompts, crops = [ids] * 4, [pictured[n % 2][1] for n in range(4)]
    forced, wanted = record(limited(compiled, prefix_caching=False), prompts, 4, 40, crops=crops)
    _, found = record(compiled, prompts, 4, 40, forced=forced, crops=crops)
    assert compare(wanted, found).max_abs_diff < 1e-4


def test_logits_of_every_token_are_those_of_a_prompt_that_shares_nothing() -> None:
    compiled = compiled_for(*MODEL, "deployment=cpu_all_logits")
    rows: list[list[np.ndarray]] = [[], []]
    requests = requests_of([LONG, LONG], 0)
    for request, own in zip(requests, rows, strict=True):
        request.on_logits = lambda logits, own=own: own.append(logits.copy())
    runner = Runner(compiled)
    runner.run(requests)
    first, second = (np.concatenate(own) for own in rows)
    assert first.shape == second.shape == (300, 256)
    np.testing.assert_allclose(first, second, atol=1e-4, rtol=0)
    # One that asks for none shares, but nothing of theirs.
    others = requests_of([LONG, LONG], 1)
    runner.run(others)
    assert [request.cached_tokens for request in others] == [0, SHARED]


def test_cached_pages_are_free_and_are_given_up_for_other_prompts() -> None:
    compiled = limited(compiled_for(*MODEL), num_pages=4)
    prompts = random_prompts((300, 310, 320), 256)
    wanted = ids_of(compiled, prompts)
    runner = Runner(compiled)
    for _ in range(2):
        for prompt, ids in zip(prompts, wanted, strict=True):
            (request,) = requests_of([prompt])
            runner.run([request])
            # Each needs three of the four pages, so nothing whole is left of the one before last.
            assert (request.ids, request.cached_tokens) == (ids, 0)
            assert runner.free_pages() == 4


def test_a_run_that_is_stopped_leaves_what_it_computed() -> None:
    compiled = compiled_for(*MODEL)
    runner = Runner(limited(compiled, max_batch_input_tokens=100))
    stopped, again = requests_of([LONG, LONG])
    runner.run([stopped], should_stop=lambda: runner.times.steps == 2)
    assert stopped.finish == "interrupted"
    assert runner.free_pages() == compiled.registration.plan.num_pages
    runner.run([again])
    # 200 tokens were computed: one whole page.
    assert again.cached_tokens == PAGE
    assert [again.ids] == ids_of(compiled, [LONG])


RECURRENT = {"tiny_lfm2": "short convolutions", "tiny_qwen3_next": "the gated delta rule"}


@pytest.mark.parametrize("model", RECURRENT)
def test_a_model_that_keeps_state_shares_nothing_and_the_plan_says_why(model: str) -> None:
    plan = plan_for(f"model={model}")
    assert not plan.prefix_caching
    (choice,) = plan.choices
    assert RECURRENT[model] in choice.because
    assert_refused(
        [f"model={model}", "deployment.kv.prefix_caching=true"],
        "deployment.kv.prefix_caching: true, but",
    )
    assert not plan_for(f"model={model}", "deployment.kv.prefix_caching=false").prefix_caching


def test_sharing_is_on_unless_it_is_turned_off() -> None:
    assert plan_for(*MODEL).prefix_caching
    assert plan_for(*MODEL, "deployment.kv.prefix_caching=true").prefix_caching
    plan = plan_for(*MODEL, "deployment.kv.prefix_caching=false")
    assert not plan.prefix_caching
    # Graphs are the same, so a job of a sweep takes those of the job before.
    assert plan.stages == plan_for(*MODEL).stages


def test_verify_holds_sharing_against_nothing_shared() -> None:
    plan = plan_for(*MODEL)
    assert _plain(plan.deployment).kv.prefix_caching is False
    *others, last = _prompts(VerifyTask(), plan)
    assert any(last.ids[:PAGE] == prompt.ids[:PAGE] for prompt in others)
    without = plan_for(*MODEL, "deployment.kv.prefix_caching=false")
    assert _prompts(VerifyTask(), without) == others


def test_the_command_tells_what_each_prompt_shares(tmp_path: Path) -> None:
    prompts = json.dumps([LONG, LONG])
    more = ("task.max_new_tokens=2", "task.ignore_eos=true")
    rolecall(tmp_path, *MODEL, f"task.prompts={prompts}", *more)
    lines = (tmp_path / "job" / "generations.jsonl").read_text().splitlines()
    assert [json.loads(line)["cached_tokens"] for line in lines] == [0, SHARED]
    assert read(tmp_path, "metrics.json")["prefix_cached_tokens"] == SHARED
    (choice,) = read(tmp_path, "plan.json")["choices"]
    assert (choice["key"], choice["value"]) == ("deployment.kv.prefix_caching", True)
