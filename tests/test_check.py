"""Many deployments at once: ``task=check`` of a folder, and ``task=diff`` of two."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from conftest import DEPLOYMENTS, plan_for
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from test_command import processor_seconds, read, rolecall

from builder.compose import register_schema
from builder.loading import Composer, config_folder, folders
from models.role_contracts import FIELD_NAMES

TINY = "model=tiny_llama"
PLANS = 6
"""Plans that a hundred deployments may cost; 3.6 here, most of it Hydra's composing."""


def write(folder: Path, name: str, body: str, devices: str = "cpu_x1") -> None:
    group = folder / "deployment"
    group.mkdir(parents=True, exist_ok=True)
    defaults = f"defaults: [base, /devices@devices: {devices}, _self_]"
    (group / f"{name}.yaml").write_text(f"{defaults}\nname: {name}\n{body}\n")


def test_one_that_is_refused_fails_the_check_and_the_others_are_told(tmp_path: Path) -> None:
    conf = tmp_path / "conf"
    write(conf, "plain", "max_length: 256")
    write(conf, "halves", "parallel: {tensor: 2}", "cpu_x2")
    write(conf, "thirds", "parallel: {tensor: 3}", "cpu_x3")
    done = rolecall(tmp_path, "--config-dir", str(conf), TINY, "task=check", status=1)
    assert "failed: 1 of 3 are refused" in done.stderr
    found = read(tmp_path, "check.json")
    assert not found["pass"]
    assert [(row["deployment"], row["ok"]) for row in found["results"]] == [
        ("halves", True),
        ("plain", True),
        ("thirds", False),
    ]
    halves, plain, thirds = found["results"]
    assert thirds["error"].startswith("deployment.parallel.tensor: 4 heads do not divide")
    assert set(halves["fields"]) - set(plain["fields"]) == {"signals"}
    assert halves["fields"] == [name for name in FIELD_NAMES if name in halves["fields"]]
    assert len(halves["device_bytes"]) == 2
    assert read(tmp_path, "status.json")["status"] == "failed"


def test_all_fine_is_status_0_and_overrides_hold_for_every_one(tmp_path: Path) -> None:
    conf = tmp_path / "conf"
    write(conf, "plain", "")
    write(conf, "halves", "parallel: {tensor: 2}", "cpu_x2")
    arguments = ["--config-dir", str(conf), TINY, "task=check"]
    rolecall(tmp_path, *arguments)
    assert read(tmp_path, "check.json")["pass"]
    done = rolecall(tmp_path, *arguments, "deployment.max_length=100000", status=1)
    assert "2 of 2 are refused" in done.stderr


def test_given_deployments_are_checked_for_given_models(tmp_path: Path) -> None:
    pairs = ("task.deployments=[cpu,ep2]", "task.models=[tiny_llama,tiny_mixtral]")
    rolecall(tmp_path, "task=check", *pairs, status=1)
    rows = read(tmp_path, "check.json")["results"]
    assert {(row["model"], row["deployment"]): row["ok"] for row in rows} == {
        ("tiny_llama", "cpu"): True,
        ("tiny_llama", "ep2"): False,
        ("tiny_mixtral", "cpu"): True,
        ("tiny_mixtral", "ep2"): True,
    }


def test_a_broken_file_is_its_own_failure(tmp_path: Path) -> None:
    conf = tmp_path / "conf"
    write(conf, "plain", "")
    write(conf, "typo", "max_lenght: 256")
    rolecall(tmp_path, "--config-dir", str(conf), TINY, "task=check", status=1)
    plain, typo = read(tmp_path, "check.json")["results"]
    assert plain["ok"]
    assert "max_lenght" in typo["error"]


def test_a_hundred_deployments_cost_a_few_plans(tmp_path: Path) -> None:
    conf = tmp_path / "conf"
    shapes = [
        ("cpu_x1", "{}"),
        ("cpu_x2", "{tensor: 2}"),
        ("cpu_x2", "{data: 2}"),
        ("cpu_x2", "{pipeline: 2}"),
        ("cpu_x4", "{tensor: 4}"),
    ]
    sizes = product(shapes, (1, 4, 8, 16), (128, 200, 256, 384, 512))
    for number, ((devices, parallel), batch, length) in enumerate(sizes):
        body = f"parallel: {parallel}\nmax_length: {length}\nbatch: {{max_batch_size: {batch}}}"
        write(conf, f"d{number:03}", body, devices)
    check = ["--config-dir", str(conf), TINY, "task=check"]
    planning = [processor_seconds(lambda: rolecall(tmp_path, TINY, "task=plan")) for _ in range(3)]
    checking = processor_seconds(lambda: rolecall(tmp_path, *check))
    assert len(read(tmp_path, "check.json")["results"]) == 100
    assert checking < PLANS * min(planning)


ASKED = [
    *((f"deployment={file.stem}", "model=tiny_llama", "task=plan") for file in DEPLOYMENTS),
    ("deployment=tp2", "+lora=rank16", "+vision=images", "deployment.max_length=64", "task=verify"),
    ("devices@deployment.devices=cpu_x4", "deployment.lora.max_rank=8", "model=smollm2"),
    ("+deployment.lora.adapters.a=x", "~deployment.lora.adapters.a", "task.prompts=[[1,2],b]"),
]


def test_composing_many_gives_what_hydra_gives() -> None:
    register_schema()
    composer = Composer(folders())
    ours = [composer.compose(words) for words in ASKED]
    again = [composer.compose(words) for words in ASKED]
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        theirs = [hydra_compose("config", list(words)) for words in ASKED]
    assert ours == theirs
    assert again == theirs


def test_diff_tells_keys_inputs_placement_and_memory(tmp_path: Path) -> None:
    rolecall(tmp_path, TINY, "deployment=tp2", "task=diff", "task.against=dp2")
    found = read(tmp_path, "diff.json")
    assert (found["here"], found["there"]) == ("tp2", "dp2")
    assert found["keys"] == [
        {"key": "deployment.parallel.tensor", "here": 2, "there": 1},
        {"key": "deployment.parallel.data", "here": 1, "there": 2},
    ]
    changed = {row["input"]: (row["here"], row["there"]) for row in found["inputs"]}
    assert changed["host_input_row_offsets"] == (None, "uint32 [input_row_offsets_len] cpu:0")
    assert changed["data_parallel_splits"] == (None, "int64 [3] cpu:0")
    assert set(changed) - {"host_input_row_offsets", "data_parallel_splits"} == {
        *("kv.0.kv_blocks", "kv.1.kv_blocks", "kv.1.cache_lengths", "kv.1.lookup_table"),
    }
    placed = {row["what"]: (row["here"], row["there"]) for row in found["placement"]}
    assert placed["device 1: heads"] == ({"start": 2, "stop": 4}, {"start": 0, "stop": 4})
    totals = {row["what"]: (row["here"], row["there"]) for row in found["memory"]}
    plans = [plan_for(TINY, f"deployment={name}") for name in ("tp2", "dp2")]
    assert totals["device 0: total"] == tuple(plan.devices[0].total for plan in plans)


def test_diff_of_the_same_is_nothing(tmp_path: Path) -> None:
    rolecall(tmp_path, TINY, "deployment=tp2", "task=diff", "task.against=tp2")
    found = read(tmp_path, "diff.json")
    assert [found[part] for part in ("keys", "inputs", "placement", "memory")] == [[]] * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["task=diff"], "task.against: missing"),
        (["task=diff", "task.against=tp3"], "task.against: no such deployment: tp3"),
    ],
)
def test_diff_against_nothing_is_a_mistake(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    assert message in rolecall(tmp_path, TINY, *arguments, status=2).stderr
