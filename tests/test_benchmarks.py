"""The benchmarks' own parts; no other engine is needed."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import compiled_alone, expected
from gguf import GGUFReader, GGUFWriter
from gguf.constants import GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize, quantize

from benchmarks import start_up
from benchmarks.__main__ import main
from benchmarks.alternate import EngineFailedError, EngineProcess, Measured, alternate, rotated
from benchmarks.catalogue import ENGINES, UnavailableError, interpreter
from benchmarks.files import gguf_file, main_format
from benchmarks.protocol import Generation, measure
from benchmarks.results import rows
from benchmarks.workload import Case, Workload, windows

Q4_1, Q8_0 = GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0


@pytest.fixture
def original(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of the kinds of tensors and metadata that SmolLM2's has."""
    monkeypatch.setenv("ROLECALL_CACHE_DIR", str(tmp_path / "cache"))
    draw = np.random.default_rng(0)
    file = tmp_path / "small.gguf"
    writer = GGUFWriter(file, "llama")
    writer.add_uint32("llama.block_count", 1)
    writer.add_float32("llama.rope.freq_base", 100000.0)
    writer.add_file_type(3)
    writer.add_token_list(["a", "b", "ü"])
    writer.add_token_types([1, 1, 3])
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_tensor("output_norm.weight", draw.normal(size=64).astype(np.float32))
    for name, kind, shape in (
        ("token_embd.weight", Q8_0, (96, 64)),
        ("blk.0.ffn_up.weight", Q4_1, (160, 64)),
        ("blk.0.ffn_down.weight", Q4_1, (64, 160)),
    ):
        values = quantize(draw.normal(size=shape).astype(np.float32), kind)
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def values_of(file: Path) -> dict[str, np.ndarray]:
    return {t.name: dequantize(t.data, t.tensor_type) for t in GGUFReader(file).tensors}


def test_a_file_in_float32_has_the_values_of_the_original(original: Path) -> None:
    made = gguf_file(original, "F32")
    assert {t.tensor_type.name for t in GGUFReader(made).tensors} == {"F32"}
    wanted, found = values_of(original), values_of(made)
    assert list(found) == list(wanted)
    for name, values in wanted.items():
        np.testing.assert_array_equal(found[name], values)


def test_a_file_in_bfloat16_has_the_nearest_values(original: Path) -> None:
    wanted, found = values_of(original), values_of(gguf_file(original, "BF16"))
    for name, values in wanted.items():
        if name == "output_norm.weight":
            np.testing.assert_array_equal(found[name], values)
            continue
        # Eight bits of mantissa; what is left of the lower sixteen is zero.
        assert not (found[name].view(np.uint32) & 0xFFFF).any()
        np.testing.assert_allclose(found[name], values, rtol=2**-8, atol=0)


def test_a_file_in_four_bits_keeps_the_table_as_it_is(original: Path) -> None:
    made = GGUFReader(gguf_file(original, "Q4_0"))
    kinds = {t.name: t.tensor_type.name for t in made.tensors}
    assert kinds == {
        "output_norm.weight": "F32",
        "token_embd.weight": "Q8_0",
        "blk.0.ffn_up.weight": "Q4_0",
        "blk.0.ffn_down.weight": "Q4_0",
    }
    stored = {t.name: t.data for t in GGUFReader(original).tensors}
    (table,) = (t.data for t in made.tensors if t.name == "token_embd.weight")
    np.testing.assert_array_equal(table, stored["token_embd.weight"])
    # A block's step is an eighth of its largest value, and rounds by half of that, or at the
    # other end by all of it.
    wanted, found = values_of(original), values_of(gguf_file(original, "Q4_0"))
    blocks = wanted["blk.0.ffn_up.weight"].reshape(-1, 32)
    error = np.abs(found["blk.0.ffn_up.weight"].reshape(-1, 32) - blocks).max(axis=1)
    assert (error <= np.abs(blocks).max(axis=1) / 8 * 1.01).all()


def test_a_copy_has_the_metadata_but_for_its_file_type(original: Path) -> None:
    def metadata(file: Path) -> dict[str, Any]:
        fields = GGUFReader(file).fields
        return {
            name: (field.types[0], field.contents())
            for name, field in fields.items()
            if not name.startswith("GGUF.")
        }

    wanted, found = metadata(original), metadata(gguf_file(original, "BF16"))
    assert found.pop("general.file_type") == (GGUFValueType.UINT32, 32)
    del wanted["general.file_type"]
    assert found == wanted


def test_a_file_is_itself_in_its_own_format_and_made_once_in_another(original: Path) -> None:
    assert main_format(GGUFReader(original)) == "Q4_1"
    assert gguf_file(original, "Q4_1") == original
    made = gguf_file(original, "F32")
    when = made.stat().st_mtime_ns
    assert gguf_file(original, "F32") == made
    assert made.stat().st_mtime_ns == when


def test_another_engine_begins_each_turn() -> None:
    asked: list[tuple[str, int, int]] = []

    def ask(name: str, case: Case, repeat: int) -> dict[str, Any]:
        asked.append((name, case.batch, repeat))
        return {}

    found = alternate(["a", "b", "c"], [Case(1, 4, 2), Case(8, 4, 2)], 2, ask)
    assert [(name, batch) for name, batch, _ in asked] == [
        *(("a", 1), ("b", 1), ("c", 1), ("b", 8), ("c", 8), ("a", 8)),
        *(("c", 1), ("a", 1), ("b", 1), ("a", 8), ("b", 8), ("c", 8)),
    ]
    assert [(one.engine, one.case.batch, one.repeat) for one in found] == asked
    assert rotated([], 3) == []


def test_an_engine_that_is_lost_is_not_asked_again() -> None:
    asked: list[str] = []

    def ask(name: str, _case: Case, _repeat: int) -> dict[str, Any] | None:
        asked.append(name)
        return None if name == "b" else {}

    found = alternate(["a", "b"], [Case(1, 4, 2)], 3, ask)
    assert asked.count("b") == 1
    assert [one.engine for one in found] == ["a", "a", "a"]


def test_prefill_is_the_first_prompts_and_decode_the_batchs() -> None:
    def generate(prompts: Any, new: int) -> Generation:
        # Half a second of prefill per prompt, then steps of a quarter.
        first = 100 + len(prompts) / 2
        return Generation(
            [[7] * new for _ in prompts], 100.0, [first + at / 4 for at in range(new)]
        )

    found = measure(generate, [[1] * 10, [2] * 10, [3] * 10], 5)
    assert found["ttft_ms"] == pytest.approx(500)
    assert found["prefill_tok_s"] == pytest.approx(20)
    assert found["step_ms"] == pytest.approx([250] * 4)
    assert found["decode_tok_s"] == pytest.approx(12)
    assert found["ids"] == [[7] * 5] * 3


def answer(rate: float, ids: list[int]) -> dict[str, Any]:
    return {
        "ttft_ms": 1e6 / rate,
        "prefill_tok_s": 10 * rate,
        "decode_tok_s": rate,
        "step_ms": [1e3 / rate],
        "ids": [ids],
    }


def test_a_ratio_is_the_median_of_the_repeats_own() -> None:
    case = Case(1, 512, 4)
    rates = {"slow": (10, 5, 20), "fast": (20, 15, 30)}
    measured = [
        Measured(name, case, repeat, answer(rate, [1, 2, 3, 4 if name == "slow" else 5]))
        for name, of in rates.items()
        for repeat, rate in enumerate(of)
    ]
    slow, fast = rows(measured, "slow", "slow")
    assert (slow.decode_tok_s, slow.decode_ratio, slow.prefill_ratio) == (10, 1, 1)
    # The ratios are 2, 3 and 1.5; that of the medians would be 2 too, of the means 1.86.
    assert (fast.decode_tok_s, fast.decode_ratio) == (20, 2)
    assert fast.step_ms == 50
    assert (slow.same_tokens, fast.same_tokens, fast.compared_tokens) == (4, 3, 4)
    assert rows(measured[:3], "fast", None)[0].decode_ratio is None
    assert rows([], "fast", None) == []


def test_start_up_ratios_are_of_one_repeat() -> None:
    seconds = {"rolecall": [4.0, 5.0, 8.0], "max generate": [8.0, 15.0, 20.0]}
    assert start_up.ratios(seconds, "rolecall") == {"rolecall": 1, "max generate": 2.5}


def test_prompts_of_a_batch_begin_at_different_places() -> None:
    assert windows(range(10), 2, 4) == [[0, 1, 2, 3], [5, 6, 7, 8]]
    assert windows(range(4), 2, 6) == [[0, 1, 2, 3, 0, 1], [2, 3, 0, 1, 2, 3]]


def waits_for_state(pid: int, wanted: str) -> bool:
    for _ in range(50):
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == wanted:
            return True
        time.sleep(0.1)
    return False


def test_the_process_of_our_engine_gives_hugging_faces_ids_and_is_stopped_between() -> None:
    compiled_alone("model=tiny_llama")  # The process finds the graph in the cache.
    values = expected("tiny_llama")
    prompt, wanted = values["prompt_0"].tolist(), values["greedy_0"].tolist()
    work = Workload(("model=tiny_llama",), (Case(2, len(prompt), 8),))
    engine = ENGINES["rolecall-float32"]
    with EngineProcess(
        engine, interpreter(engine, []), engine.settings(work), Path("/dev/null")
    ) as process:
        assert waits_for_state(process.pid, "T")
        alone = process.ask([prompt], 8)
        other = process.ask([prompt[::-1]], 8)
        both = process.ask([prompt, prompt[::-1]], 8)
    assert alone["ids"] == [wanted[:8]]
    assert both["ids"] == [*alone["ids"], *other["ids"]]
    assert len(both["step_ms"]) == 7
    assert both["ttft_ms"] > 0


def test_an_engine_that_a_signal_ends_is_told_with_the_signal(tmp_path: Path) -> None:
    work = Workload(("model=tiny_llama",), (Case(1, 4, 2),))
    engine = ENGINES["rolecall-float32"]
    python, log = interpreter(engine, []), tmp_path / "log"
    compiled_alone("model=tiny_llama")
    with EngineProcess(engine, python, engine.settings(work), log) as process:
        os.kill(process.pid, signal.SIGILL)
        with pytest.raises(EngineFailedError, match=r"^ended by Illegal instruction; before it: "):
            process.ask([[1, 2, 3, 4]], 2)


def test_an_engine_that_is_not_installed_is_named_with_what_installs_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UnavailableError, match="torch and transformers not installed in nowhere"):
        interpreter(ENGINES["transformers-float32"], [Path("nowhere")])
    out, nowhere = str(tmp_path), str(tmp_path / "python")
    words = ["--overrides", "model=tiny_llama", "--out", out, "--peers-python", nowhere]
    assert main([*words, "--engines", "llama.cpp-F32"]) == 1
    told = f"llama.cpp-F32: not measured: llama_cpp not installed in {nowhere}; `make peers`"
    assert told in capsys.readouterr().out
    assert "llama.cpp-F32" in json.loads((tmp_path / "results.json").read_text())["missing"]


def test_what_our_command_refuses_is_a_mistake_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--overrides", "model=none_such", "--out", str(tmp_path)]) == 2
    assert "none_such" in capsys.readouterr().err
