"""Limits that a deployment leaves open, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import assert_refused, plan_for
from published import LLAMA_31_70B, published

from builder import choices, machine
from builder.report import plan_json

MIB, GIB = 2**20, 2**30
OPEN = ("deployment.batch.max_batch_size=null", "deployment.batch.max_batch_input_tokens=null")
MODEL = "model=tiny_llama"

ROW = (64 + 2 * 96) * 4
"""What a token has in a layer of tiny_llama: 64 values, and twice 96 columns, in float32."""

SEQUENCE = 4 * 128 * 4 * 2 * 2 * 64 * 4
"""Four pages of 128 tokens: keys and values of two heads of 64 in four layers, in float32."""


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 4 GiB and a cache of 1 MiB."""
    monkeypatch.setattr(choices, "memory_bytes", lambda: 4 * GIB)
    monkeypatch.setattr(choices, "last_level_cache_bytes", lambda: MIB)


def chosen(*overrides: str) -> tuple[int, int]:
    batch = plan_for(*overrides).batch
    return batch.max_batch_size, batch.max_batch_input_tokens


def test_limits_that_are_not_open_are_as_given() -> None:
    assert chosen(MODEL) == (8, 512)
    assert chosen(MODEL, OPEN[1], "deployment.batch.max_batch_size=3")[0] == 3
    assert chosen(MODEL, OPEN[0], "deployment.batch.max_batch_input_tokens=100")[1] == 100


@pytest.mark.parametrize(("cache", "tokens"), [(1, 512), (2, 1024), (64, 2048), (0.125, 128)])
def test_a_steps_rows_take_half_of_the_cache(
    monkeypatch: pytest.MonkeyPatch, cache: float, tokens: int
) -> None:
    monkeypatch.setattr(choices, "last_level_cache_bytes", lambda: int(cache * MIB))
    assert tokens in (128, 2048, int(cache * MIB) // 2 // ROW)
    assert chosen(MODEL, OPEN[1]) == (8, tokens)


def test_a_steps_tokens_are_whole_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "last_level_cache_bytes", lambda: 2 * 700 * ROW)
    assert chosen(MODEL, OPEN[1])[1] == 640
    assert chosen(MODEL, OPEN[1], "deployment.kv.page_size=256")[1] == 512
    # Each of so many sequences has a token.
    many = ("deployment.batch.max_batch_size=700", "deployment.kv.num_pages=4")
    assert chosen(MODEL, OPEN[1], *many) == (700, 768)


def test_devices_of_one_host_share_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each of four has the 64 values, and a fourth of the columns; each of two replicas has all.
    monkeypatch.setattr(choices, "last_level_cache_bytes", lambda: 2 * 512 * (4 * 64 + 2 * 96) * 4)
    assert chosen(MODEL, "deployment=tp4", OPEN[1])[1] == 512
    monkeypatch.setattr(choices, "last_level_cache_bytes", lambda: 2 * 512 * 2 * ROW)
    assert chosen(MODEL, "deployment=dp2", OPEN[1])[1] == 512


def test_experts_rows_are_those_that_a_token_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = plan_for("model=tiny_mixtral").settings
    assert settings.experts is not None
    row = settings.experts.top_k * (settings.hidden_size + 2 * settings.experts.intermediate_size)
    monkeypatch.setattr(choices, "last_level_cache_bytes", lambda: 2 * 384 * row * 4)
    assert chosen("model=tiny_mixtral", OPEN[1])[1] == 384


@pytest.mark.parametrize("sequences", [1, 5, 33, 64, 200])
def test_sequences_are_what_the_memory_has_pages_for(
    monkeypatch: pytest.MonkeyPatch, sequences: int
) -> None:
    plan = plan_for(MODEL)
    null_page = SEQUENCE // 4
    needed = plan.weights.host + null_page + sequences * SEQUENCE
    # Just so many fit into nine tenths.
    monkeypatch.setattr(choices, "memory_bytes", lambda: needed * 10 // 9 + 2)
    wanted = {1: 1, 5: 4, 33: 32, 64: 64, 200: 64}[sequences]
    assert chosen(MODEL, OPEN[0]) == (wanted, 512)
    (choice,) = plan_for(MODEL, OPEN[0]).choices[1:]
    assert f"= {sequences};" in choice.because


def test_a_limit_of_the_hosts_memory_counts() -> None:
    weights = plan_for(MODEL).weights.host
    part = (weights + SEQUENCE // 4 + 10 * SEQUENCE + SEQUENCE // 2) / GIB
    more = (f"deployment.devices.memory_gib={part}", "deployment.devices.memory_utilization=1")
    assert chosen(MODEL, OPEN[0], *more)[0] == 8
    assert_refused(
        [MODEL, "deployment.devices.memory_utilization=1.5"],
        "deployment.devices.memory_utilization: 1.5 is not between 0 and 1",
    )


def test_sequences_are_no_more_than_tokens_or_given_pages() -> None:
    assert chosen(MODEL, OPEN[0], "deployment.batch.max_batch_input_tokens=20")[0] == 16
    assert chosen(MODEL, OPEN[0], "deployment.kv.num_pages=13")[0] == 2
    assert plan_for(MODEL, OPEN[0], "deployment.kv.num_pages=13").num_pages == 13


def test_state_and_latents_workspace_count_with_each_sequence() -> None:
    for model in ("tiny_lfm2", "tiny_deepseek_v3"):
        one, two = (
            plan_for(f"model={model}", f"deployment.batch.max_batch_size={n}") for n in (1, 2)
        )
        held = [sum(s.kv_pages + s.workspace for s in plan.devices) for plan in (one, two)]
        part = (one.weights.host + held[0] + 5 * (held[1] - held[0]) + 1) / GIB
        more = (f"deployment.devices.memory_gib={part}", "deployment.devices.memory_utilization=1")
        (choice,) = plan_for(f"model={model}", OPEN[0], *more).choices[1:]
        assert "= 6;" in choice.because


def test_sequences_on_accelerators_are_what_fits_them(tmp_path: Path) -> None:
    four = ("deployment.devices.count=4", "deployment.parallel.tensor=4")
    limits = ("deployment.max_length=8192", OPEN[0])
    plan = published(tmp_path, LLAMA_31_70B, "deployment=h100_x2_tp2", *four, *limits)
    # By hand, in test_capacity: 61.
    assert plan.batch.max_batch_size == 32
    assert plan.choices[1].because.startswith("61 sequences of 8192 tokens fit into h100")
    assert chosen("model=tiny_llama", "deployment=h100_x1", *OPEN) == (64, 2048)


def test_the_plan_has_the_numbers_and_their_arithmetic() -> None:
    plan = plan_json(plan_for(MODEL, *OPEN))
    assert plan["deployment"]["batch"] == {"max_batch_size": 64, "max_batch_input_tokens": 512}
    assert [choice["key"].rsplit(".")[-1] for choice in plan["choices"]] == [
        *("prefix_caching", "max_batch_input_tokens", "max_batch_size")
    ]
    assert f"1.0 MiB of cache / {ROW} bytes" in plan["choices"][1]["because"]


def test_the_largest_cache_is_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "CACHES", tmp_path)
    assert machine.last_level_cache_bytes() == machine.UNKNOWN_CACHE
    for number, size in enumerate(("32K\n", "1024K\n", "32M\n", "\n")):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "size").write_text(size)
    assert machine.last_level_cache_bytes() == 32 * MIB
