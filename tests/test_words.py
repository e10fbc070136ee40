"""Mistakes of composition: one line each, with its place and what would work."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from test_command import files, read, rolecall

from builder.compose import compose
from models.errors import ConfigError

DEPLOYMENTS = "valid here: b200_lora, b200_x2_dp2_ep2, b200_x8_ep8, b200_x8_ep8_tp8, base, cpu, "

# A word, what is wrong with it, and what would work. Each says "(on the command line)" between.
ON_THE_LINE = {
    # Keys.
    "deployment.batch.max_batch_sise=4": (
        "deployment.batch.max_batch_sise: unknown key",
        "did you mean deployment.batch.max_batch_size?",
    ),
    "deployment.batch={max_batch_sise: 3}": (
        "deployment.batch.max_batch_sise: unknown key",
        "did you mean deployment.batch.max_batch_size?",
    ),
    "deployment.bach.max_batch_size=3": (
        "deployment.bach: unknown key",
        "did you mean deployment.batch?",
    ),
    "task.max_tokens=3": ("task.max_tokens: unknown key", "did you mean task.max_new_tokens?"),
    "+deployment.page_size=64": (
        "deployment.page_size: unknown key",
        "did you mean deployment.kv.page_size?",
    ),
    "++deployment.foo=1": (
        "deployment.foo: unknown key",
        "valid here: artifact, batch, constants, devices, kv, lora, max_length, name, parallel, "
        "return_logits, vision",
    ),
    "max_length=3": ("max_length: unknown key", "did you mean deployment.max_length=3?"),
    "lora.max_rank=4": (
        "lora.max_rank: unknown key",
        "did you mean deployment.lora.max_rank=4?",
    ),
    "deployment.lora.adapters.billing=x": (
        "deployment.lora.adapters.billing=x: not there yet",
        "did you mean +deployment.lora.adapters.billing=x?",
    ),
    # Choices.
    "deployment=tp22": ("deployment=tp22: no such choice", "did you mean deployment=tp2?"),
    "model=tiny_lama": ("model=tiny_lama: no such choice", "did you mean model=tiny_llama?"),
    "task=genrate": ("task=genrate: no such choice", "did you mean task=generate?"),
    "+lora=rnk16": ("+lora=rnk16: no such choice", "did you mean +lora=rank16?"),
    "deployment=xyz": ("deployment=xyz: no such choice", DEPLOYMENTS),
    "deployment=5": ("deployment=5: no such choice", DEPLOYMENTS),
    "deployment=null": ("deployment=null: no such choice", DEPLOYMENTS),
    "deployment=": ("deployment=: no choice is given", DEPLOYMENTS),
    "model=tp2": (
        "model=tp2: no such model, but a choice of deployment",
        "did you mean deployment=tp2?",
    ),
    "model=/some/folder": (
        "model=/some/folder: a checkpoint, not a choice",
        "did you mean model=local model.source=/some/folder?",
    ),
    "experiment=mine": (
        "experiment=mine: no such choice",
        "valid here: fastest",
    ),
    "deployment=tp2,cpu": ("deployment=tp2,cpu: several values", "add -m to sweep over them"),
    "+deployment=tp2": ("+deployment=tp2: chosen already", "did you mean deployment=tp2?"),
    "+deployment.name=x": ("+deployment.name=x: set already", "did you mean deployment.name=x?"),
    "~deployment": ("deployment: missing", "choose one with deployment=CHOICE"),
    # Groups.
    "deploymnt=tp2": ("deploymnt=tp2: deploymnt is no key", "did you mean deployment=tp2?"),
    "+lorra=rank16": ("+lorra=rank16: lorra is no key", "did you mean +lora=rank16?"),
    "lora=rank16": ("lora=rank16: overrides a choice that no", "did you mean +lora=rank16?"),
    # A dot for a slash, a group for a key, and no "=".
    "deployment.devices=cpu_x4": (
        "deployment.devices=cpu_x4: a choice of files, written as a value",
        "did you mean devices@deployment.devices=cpu_x4?",
    ),
    "deployment/devices=cpu_x4": (
        "deployment/devices=cpu_x4: deployment/devices is no key",
        "did you mean devices@deployment.devices=cpu_x4?",
    ),
    "devices=cpu_x2": (
        "devices=cpu_x2: overrides a choice that no",
        "did you mean devices@deployment.devices=cpu_x2?",
    ),
    "+lora.rank16": ("+lora.rank16: a word without =", "did you mean +lora=rank16?"),
    "task.plan": ("task.plan: a word without =", "did you mean task=plan?"),
    "deployment.tp2": ("deployment.tp2: a word without =", "did you mean deployment=tp2?"),
    "tp2": ("tp2: a word without =", "did you mean deployment=tp2?"),
    "max_lenght": ("max_lenght: a word without =", "did you mean deployment.max_length=VALUE?"),
    "deployment.vision": (
        "deployment.vision: a word without =",
        "did you mean deployment.vision=VALUE?",
    ),
    "=3": ("=3: no key before =", "give KEY=VALUE"),
    "deployment.name=[": ("deployment.name=[: can't be read", "put a text with special"),
    # Values.
    "deployment.max_length=": (
        "deployment.max_length: no value is given",
        "it takes a whole number, or null",
    ),
    "model.source=": ("model.source: no value is given", "it takes a Hugging Face folder"),
    "deployment.devices.kind=gpuu": (
        "deployment.devices.kind: gpuu is not one of cpu, gpu, virtual",
        "did you mean gpu?",
    ),
    "deployment.batch.max_batch_size=many": (
        "deployment.batch.max_batch_size: many is not a whole number",
        "",
    ),
    "deployment.vision=maybe": ("deployment.vision: maybe is not true or false", ""),
    "task.sampling.top_p=high": ("task.sampling.top_p: high is not a number", ""),
    "deployment.parallel.stage_layers=3": (
        "deployment.parallel.stage_layers: 3 is not a list of whole numbers",
        "write 'deployment.parallel.stage_layers=[3]'",
    ),
    "deployment.parallel.stage_layers=all": (
        "deployment.parallel.stage_layers: all is not a list of whole numbers",
        "",
    ),
    "task.prompts=Hello": (
        "task.prompts: Hello is not a list of texts or lists of token ids",
        "write 'task.prompts=[\"Hello\"]'",
    ),
    "task.prompts='Say \"hello\"'": (
        "task.prompts: 'Say \"hello\"' is not a list of texts",
        r"""write 'task.prompts=["Say \"hello\""]'""",
    ),
    "deployment.constants=token_embd": (
        "deployment.constants: token_embd is not a list of texts",
        "write 'deployment.constants=[\"token_embd\"]'",
    ),
    "deployment.batch=4": (
        "deployment.batch: 4 is not a mapping of max_batch_size, max_batch_input_tokens",
        "",
    ),
    "deployment.max_length=${deployment.bach.max_batch_size}": (
        "deployment.max_length: Interpolation key 'deployment.bach.max_batch_size' not found",
        "did you mean ${deployment.batch.max_batch_size}?",
    ),
}


# The names of what differs, on the page.
ANY = re.compile("ENTRY|FILE|GROUP|KEY|NAME|OPTION|PATH|REASON|VALUES?|WHAT|WORD")


@cache
def messages_of_the_page() -> list[re.Pattern[str]]:
    page = (Path(__file__).parent.parent / "docs" / "errors.md").read_text()
    composing = page.partition("## Composing")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*) \| ", composing, re.M)
    told = [message for row in rows for message in re.findall(r"`([^`]+)`", row)]
    return [re.compile(ANY.sub(".+", re.escape(message))) for message in told]


def is_on_the_page(problem: str) -> bool:
    """Whether docs/errors.md tells a mistake, given without its place and its remedy."""
    return any(message.match(problem) for message in messages_of_the_page())


def told(*words: str, own: str | None = None) -> str:
    """The mistake, as the command words it."""
    with pytest.raises(ConfigError) as caught:
        compose(words, own)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("word", ON_THE_LINE)
def test_mistake_on_the_command_line_is_one_line(word: str) -> None:
    problem, remedy = ON_THE_LINE[word]
    message = told(word)
    assert message.startswith(problem)
    whole, place, after = message.partition(" (on the command line)")
    assert place
    assert is_on_the_page(whole)
    assert after.startswith(f"; {remedy}" if remedy else "")
    assert remedy or not after


MINE = "defaults: [base, _self_]\nname: mine\n"
KEYS = "begin it with defaults: [base, _self_]"

# The contents of my_conf/deployment/mine.yaml, the line of the mistake, and what is told.
IN_A_FILE: dict[str, tuple[str, int, str, str]] = {
    "key": (
        f"{MINE}\nmax_lenght: 256\n",
        *(4, "deployment.max_lenght: unknown key; did you mean deployment.max_length?", ""),
    ),
    "nested key": (
        f"{MINE}batch:\n  max_batch_sise: 3\n",
        *(4, "deployment.batch.max_batch_sise: unknown key", "deployment.batch.max_batch_size?"),
    ),
    "file in the defaults list": (
        "defaults:\n  - bsae\n  - _self_\nname: mine\n",
        *(2, "bsae: no such choice; did you mean base?", ""),
    ),
    "choice in the defaults list": (
        "defaults: [base, /devices@devices: cpu_x22, _self_]\nname: mine\n",
        *(1, "/devices@devices: cpu_x22: no such choice", "did you mean /devices@devices: cpu_x2?"),
    ),
    "group in the defaults list": (
        "defaults:\n- base\n- /devicess@devices: cpu_x2\n- _self_\nname: mine\n",
        *(3, "/devicess@devices: cpu_x2: no such group", "did you mean /devices@devices: cpu_x2?"),
    ),
    "choice that is overridden": (
        "defaults:\n- tp2\n- _self_\n- override /devices@devices: cpu_x22\nname: mine\n",
        *(4, "override /devices@devices: cpu_x22: no such choice", "override /devices@devices: "),
    ),
    "group that is overridden": (
        "defaults: [tp2, _self_, override /devicess@devices: cpu_x2]\nname: mine\n",
        *(1, "override /devicess@devices: cpu_x2: no such group", "override /devices@devices: "),
    ),
    "override of what is not chosen": (
        "defaults: [base, _self_, override /devices@devices: cpu_x2]\nname: mine\n",
        *(1, "override /devices@devices: cpu_x2: overrides a choice that no", "mean /devices@dev"),
    ),
    "choice that another file has made": (
        "defaults: [tp2, /devices@devices: cpu_x4, _self_]\nname: mine\n",
        *(1, "/devices@devices: cpu_x4: another file has chosen", "override /devices@devices"),
    ),
    "own file in the defaults list": ("defaults: [mine]\n", 1, "mine: comes back to this", ""),
    "defaults that are no list": ("name: x\ndefaults: base\n", 2, "defaults: base is no list", ""),
    "no entry of a list": ("defaults: [base, 3]\n", 1, "defaults: 3 is no entry", "[base, /dev"),
    "key with dots": (
        f"{MINE}devices.count: 2\n",
        *(3, "deployment.devices.count: a key with dots", "nest it: devices: {count: 2}"),
    ),
    "key with dots below another": (
        f"{MINE}batch:\n  max.size: 2\n",
        *(4, "deployment.batch.max.size: a key with dots", "nest it: max: {size: 2}"),
    ),
    "list for names": (
        f"{MINE}lora:\n  adapters: [x]\n",
        *(4, "deployment.lora.adapters: [x] is not a mapping of names to texts", ""),
    ),
    "keys for a list": (
        f"{MINE}constants: {{a: 1}}\n",
        *(3, "deployment.constants: {a: 1} is not a list of texts", ""),
    ),
    "package of all": (
        f"# @package _global_\n{MINE}",
        *(1, "# @package _global_: the keys of this file belong to deployment", "leave the line"),
    ),
    "package": ("# @package deploymnt\nname: mine\n", 1, "deploymnt: unknown key", "deployment?"),
    "type": (f"{MINE}max_length: long\n", 3, "deployment.max_length: long is not a whole", "null"),
    "nested type": (
        f"{MINE}parallel:\n  stage_layers: [a]\n",
        *(4, "deployment.parallel.stage_layers: [a] is not a list of whole numbers", ""),
    ),
    "enumeration": (
        f"{MINE}return_logits: every\n",
        *(
            3,
            "deployment.return_logits: every is not one of last_token, variable, all, or null",
            "",
        ),
    ),
    "value for a list": (
        f"{MINE}constants: token_embd\n",
        *(3, "deployment.constants: token_embd is not a list", 'write constants: ["token_embd"]'),
    ),
    "value for keys": (f"{MINE}batch: 4\n", 3, "deployment.batch: 4 is not a mapping of max_b", ""),
    "interpolation": (
        f"{MINE}max_length: ${{deployment.bach.max_batch_size}}\n",
        *(3, "deployment.max_length: Interpolation key", "${deployment.batch.max_batch_size}?"),
    ),
    "half an interpolation": (f"{MINE}max_length: ${{x\n", 3, "max_length: ${x is no interp", ""),
    "open bracket": (f"{MINE}kv: [unclosed\n", 4, "not valid YAML: while parsing a flow", ""),
    "indentation": (
        f"{MINE}batch:\n  max_batch_size: 3\n max_length: 3\n",
        *(5, "not valid YAML: while parsing", "indent the keys of one mapping alike"),
    ),
    "tab": (f"{MINE}batch:\n\tmax_batch_size: 3\n", 4, "not valid YAML:", "with spaces, not with"),
    "empty": ("", 1, "an empty file, where deployment needs keys", KEYS),
    "list": ("- a\n- b\n", 1, "a list, where deployment needs keys", KEYS),
    "text": ("hello\n", 1, "a text, where deployment needs keys", KEYS),
    "control character": (f"{MINE}\0: 3\n", 3, "not valid YAML: unacceptable character #x0000", ""),
    "key twice": (f"{MINE}max_length: 3\nmax_length: 4\n", 4, "max_length: a second time", "keep"),
}


def own_file(tmp_path: Path, contents: str) -> str:
    group = tmp_path / "my_conf" / "deployment"
    group.mkdir(parents=True)
    (group / "mine.yaml").write_text(contents)
    return "my_conf"


@pytest.mark.parametrize("name", IN_A_FILE)
def test_mistake_in_a_file_is_one_line_that_names_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    contents, line, problem, remedy = IN_A_FILE[name]
    own = own_file(tmp_path, contents)
    monkeypatch.chdir(tmp_path)
    message = told("deployment=mine", own=own)
    place = f"my_conf/deployment/mine.yaml:{line}: "
    assert message.startswith(f"{place}{problem}")
    assert is_on_the_page(message.removeprefix(place))
    assert remedy in message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("model=local",),
            "model.source: missing, conf/model/local.yaml leaves it out; "
            "write model.source=VALUE on the command line, or source: VALUE in a file of your own",
        ),
        (
            ("task=diff",),
            "task.against: missing, conf/task/diff.yaml leaves it out; "
            "write task.against=VALUE on the command line, or against: VALUE in a file of your own",
        ),
        (
            ("deployment=mine",),
            "deployment.name: missing, my_conf/deployment/mine.yaml leaves it out; "
            "write deployment.name=VALUE on the command line, or name: VALUE there",
        ),
    ],
)
def test_missing_value_names_the_file_that_leaves_it_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    own = own_file(tmp_path, "max_length: 3\n")
    monkeypatch.chdir(tmp_path)
    assert told(*words, own=own) == message


BY_COMMAND = {
    "an interpolation": (
        ["task.prompts=['${HOME}']"],
        "task.prompts: Interpolation key 'HOME' not found (on the command line); "
        "a text with ${...} in it goes into a file, for task.prompts_file",
    ),
    "a launcher": (
        ["hydra/launcher=jobli"],
        "hydra/launcher=jobli: no such choice (on the command line); "
        "did you mean hydra/launcher=joblib?",
    ),
    "a launcher with a dot": (
        ["hydra.launcher=joblib"],
        "hydra.launcher=joblib: a choice takes a slash (on the command line); "
        "did you mean hydra/launcher=joblib?",
    ),
    "a key of Hydra's": (
        ["hydra.run.dri=x"],
        "hydra.run.dri: unknown key (on the command line); did you mean hydra.run.dir?",
    ),
    "a folder": (
        ["--config-dir", "nowhere"],
        "--config-dir: Additional config directory 'HERE/nowhere' not found (on the command line)",
    ),
    "a sweep": (
        ["-m", "task=plan", "deployment.max_length=64,many"],
        "deployment.max_length: many is not a whole number, or null (on the command line)",
    ),
    "a choice of a sweep": (
        ["-m", "task=plan", "deployment=tp2,tp22"],
        "deployment=tp22: no such choice (on the command line); did you mean deployment=tp2?",
    ),
    "a file of a sweep": (
        ["-m", "task=plan", "--config-dir", "my_conf", "deployment=cpu,mine", "+lora=rank16"],
        "my_conf/deployment/mine.yaml:3: deployment.max_lenght: unknown key; "
        "did you mean deployment.max_length?",
    ),
    "a word of the second combination": (
        ["-m", "task=plan,generate", "deployment=cpu,tp22"],
        "deployment=tp22: no such choice (on the command line); did you mean deployment=tp2?",
    ),
    "a key of another task": (
        ["-m", "task=generate,plan", "task.max_new_tokens=2"],
        "task.max_new_tokens: unknown key (on the command line); "
        "task=plan has no such key, task=generate, task=verify have it",
    ),
    "a sweep of choices with a dot": (
        ["-m", "deployment.devices=cpu_x1,cpu_x2"],
        "deployment.devices=cpu_x1,cpu_x2: a choice of files, written as a value "
        "(on the command line); did you mean devices@deployment.devices=cpu_x1,cpu_x2?",
    ),
    "the other deployment": (
        ["task=diff", "task.against=tpp2"],
        "task.against: no such deployment: tpp2 (on the command line); did you mean tp2?",
    ),
    "a deployment to check": (
        ["task=check", "task.deployments=[cpu,tp22]"],
        "task.deployments: no such deployment: tp22 (on the command line); did you mean tp2?",
    ),
    "a model to check": (
        ["task=check", "task.models=[tiny_lama]"],
        "task.models: no such model: tiny_lama (on the command line); did you mean tiny_llama?",
    ),
    "a file": (
        ["--config-dir", "my_conf", "deployment=mine"],
        "my_conf/deployment/mine.yaml:3: deployment.max_lenght: unknown key; "
        "did you mean deployment.max_length?",
    ),
}


@pytest.mark.parametrize("name", BY_COMMAND)
def test_command_tells_the_line_and_exits_with_2(tmp_path: Path, name: str) -> None:
    arguments, message = BY_COMMAND[name]
    own_file(tmp_path, f"{MINE}max_lenght: 9\n")
    done = rolecall(tmp_path, "model=tiny_llama", *arguments, status=2)
    assert done.stderr == f"error: {message.replace('HERE', str(tmp_path))}\n"
    if "status.json" in files(tmp_path):
        assert read(tmp_path, "status.json")["error"] == message


def test_file_that_is_not_utf8_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = own_file(tmp_path, "")
    (tmp_path / own / "deployment" / "mine.yaml").write_bytes(b"\xff\xfe bad\n")
    monkeypatch.chdir(tmp_path)
    message = told("deployment=mine", own=own)
    assert message == ("my_conf/deployment/mine.yaml:1: not UTF-8; save the file as UTF-8 text")


def test_plugin_that_is_not_installed_names_the_extra(tmp_path: Path) -> None:
    without = (
        "import sys; sys.modules['hydra_plugins'] = None; from builder.cli import main; main()"
    )
    for word, extra in (
        ("hydra/launcher=submitit_slurm", "submitit"),
        ("hydra/sweeper=optuna", "optuna"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", without, word],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            check=False,
        )
        assert done.returncode == 2
        remedy = f"pip install 'rolecall[{extra}]'"
        assert done.stderr == f"error: {word}: not installed (on the command line); {remedy}\n"


def test_check_tells_each_files_mistake_in_its_row(tmp_path: Path) -> None:
    own = own_file(tmp_path, f"{MINE}kv: [unclosed\n")
    file = tmp_path / own / "deployment" / "twice.yaml"
    file.write_text(f"{MINE}vision: true\nvision: false\n")
    fine = tmp_path / own / "deployment" / "fine.yaml"
    fine.write_text(MINE)
    (tmp_path / own / "deployment" / "utf16.yaml").write_bytes(b"name: x\n\xff\xfe bad\n")
    rolecall(tmp_path, "--config-dir", own, "model=tiny_llama", "task=check", status=1)
    rows = read(tmp_path, "check.json")["results"]
    assert [(row["deployment"], row["error"]) for row in rows] == [
        ("fine", None),
        (
            "mine",
            "my_conf/deployment/mine.yaml:4: not valid YAML: while parsing a flow sequence, "
            "expected ',' or ']', but got '<stream end>'",
        ),
        (
            "twice",
            "my_conf/deployment/twice.yaml:4: vision: a second time in one mapping; "
            "keep one of them",
        ),
        (
            "utf16",
            "my_conf/deployment/utf16.yaml:2: not UTF-8; save the file as UTF-8 text",
        ),
    ]
