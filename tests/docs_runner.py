"""Runs the commands of a page in a folder as its reader would have it.

A block of ``sh`` has the commands that a person types; one of ``yaml`` that starts with ``# PATH``
is a file. Nothing is added to a command: the programs' names are found on a path of the test's own.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from urllib.request import urlopen

from conftest import REFERENCE, one_process
from max.driver import accelerator_count
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

from builder.compose import compose
from builder.serving import max_command
from builder.sources import fetch

REPOSITORY = Path(__file__).parent.parent
PAGES = [
    "README.md",
    *(str(page.relative_to(REPOSITORY)) for page in sorted((REPOSITORY / "docs").glob("*.md"))),
]
"""The pages whose commands are run, each in a folder of its own."""

NOT_RUN = {
    "make test": "it runs this test",
    "make gpu-compile": "it compiles for minutes per deployment",
    "make gpu-check": "it needs accelerators",
    "python tests/reference/make_reference.py tiny_mistral": "it needs PyTorch and transformers",
    "python -m pytest tests/test_families.py -k tiny_mistral": "the test run has it",
    "rolecall --config-dir my_conf -m experiment=on_slurm task=plan model=tiny_llama "
    "deployment=cpu,tp2": "it needs a Slurm cluster",
    "max generate --custom-architectures models.architectures --model-path my_model --devices cpu "
    "--quantization-encoding float32 --max-batch-size 4 --max-new-tokens 8 "
    '--no-enable-prefix-caching --prompt "Hello"': "tests/test_serve.py runs it",
}
"""Commands that are not run, and why; of ``make`` it is seen that the target can be made."""

_SUPPORT = "rolecall --config-dir my_conf {} 'task.prompts=[{}]'"
_VLM = (
    "rolecall model=local model.source=my_vlm {} "
    "'task.prompts=[{{prompt: \"{}\", images: [parcel.png]}}]'"
)
COMPILING = (
    _SUPPORT.format(
        "model=mine deployment=support", '{prompt: "Where is my parcel?", adapter: returns}'
    ),
    _SUPPORT.format(
        "deployment=support model=tiny_llama", "{prompt: [5, 6, 7], adapter: returns}, [5, 6, 7]"
    ),
    _VLM.format("deployment=vision", "What is this?"),
    _VLM.format("+vision=images", "Before <image> and after"),
    "rolecall model=tiny_mistral deployment=tp2 task=verify",
    "rolecall task=bench",
    "rolecall task=bench task.cold_compile=true",
    "rolecall model=two_layer_llama deployment=h100_x2_tp2 task=compile",
)
"""Commands that take a minute and more, most of them compiling what no other test does: run until
they compile."""

REACHED_COMPILING = 86

LIMIT = 300
"""Seconds that one command may take, compiling for the first time."""

PLANNER = f"""
import json, os, signal, sys

import builder.cli, builder.resolve, builder.steps, builder.tasks.compile, builder.tasks.generate
import builder.tasks.check, builder.tasks.diff, builder.tasks.plan, builder.tasks.verify

def stop(*_, **__):
    raise SystemExit({REACHED_COMPILING})

for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if not child:
        signal.alarm({LIMIT})
        os.chdir(job["folder"])
        out = os.open(job["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.argv = ["rolecall", *job["words"]]
        assert builder.steps.Job.compile and builder.tasks.compile.compile_virtual
        builder.steps.Job.compile = builder.tasks.compile.compile_virtual = stop
        sys.exit(builder.cli.main())
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps(status), flush=True)
"""
"""Runs the command for what only plans, or up to where it compiles: importing takes most of that
time, so it is done once. What computes has a process of its own."""

_PLANS = re.compile(r"^rolecall .*(\btask=(plan|check|diff)\b|--help|--cfg)")
"""What the planner runs, beside what is refused."""


@dataclass(frozen=True)
class Command:
    """One command of a page."""

    text: str
    """As it is typed, without its comment."""

    status: int
    """The exit status that the page tells."""


@dataclass(frozen=True)
class Block:
    """One block of a page: a file, or commands."""

    text: str
    file: str | None = None
    commands: list[Command] = field(default_factory=list)


class Page:
    """What of a page is run, in order."""

    def __init__(self, name: str) -> None:
        text = (REPOSITORY / name).read_text()
        self.blocks: list[Block] = []
        for language, body in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.M | re.S):
            named = re.match(r"(?:# @.*\n)?# (\S+)\n", body)
            if language == "sh":
                self.blocks.append(Block(body, commands=_commands(body)))
            elif language == "yaml" and named:
                self.blocks.append(Block(body, file=named[1]))
            else:
                raise AssertionError(f"{name}: a block of {language} that is no command or file")


def _commands(body: str) -> list[Command]:
    found = []
    for line in re.sub(r"\\\n\s*", "", body).splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        told = re.search(r"#.* exit status (\d+)$|# exit status (\d+)$", line)
        status = int(told[1] or told[2]) if told else 0
        found.append(Command(re.sub(r"\s+# [^'\"]*$", "", line), status))
    return found


_run_before: set[str] = set()
"""Commands of other pages: what they wrote isn't looked at, so they aren't run twice."""


class Planner:
    """A process that runs commands which only plan.

    Args:
        folder: Where it keeps what they say.
    """

    def __init__(self, folder: Path) -> None:
        self._said = folder / "said.txt"
        pipe = subprocess.PIPE
        words = [sys.executable, "-c", PLANNER]
        self.process = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True)

    def run(self, text: str, folder: Path) -> tuple[int, str]:
        """The exit status of a command, and what it said."""
        said = str(self._said)
        job = {"words": shlex.split(text, comments=True)[1:], "folder": str(folder), "out": said}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline()), self._said.read_text()


class PageRun:
    """A folder in which a page's commands are run.

    Args:
        folder: A new folder.
        planner: What runs commands that only plan.
    """

    def __init__(self, folder: Path, planner: Planner) -> None:
        self.folder = folder / "work"
        self.folder.mkdir()
        self._planner = planner
        self._bin = _programs(folder / "bin")
        _prepare(self.folder)

    def write(self, file: str, text: str) -> None:
        """Writes a file of the page."""
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def commands(self, commands: Sequence[Command]) -> None:
        """Runs the commands of a block; a server that it starts is stopped at its end."""
        with ExitStack() as servers:
            for command in commands:
                if command.text in NOT_RUN:
                    _dry_run(command.text)
                elif command.text == "make run":
                    _make_run()
                elif "task=serve" in command.text and command.status == 0:
                    servers.enter_context(self._server(command.text))
                else:
                    self._run(command)

    def _run(self, command: Command) -> None:
        is_shared = not re.search(r"--config-dir|hydra\.|outputs/|\.txt", command.text)
        if is_shared and command.text in _run_before:
            return
        wanted = REACHED_COMPILING if command.text in COMPILING else command.status
        needs_accelerators = "devices.kind=gpu" in command.text
        if needs_accelerators:
            if accelerator_count():
                return  # "make gpu-check" runs them.
            wanted = 2
        needs_ray = "hydra/launcher=ray" in command.text and find_spec("ray") is None
        if needs_ray:
            wanted = 2
        status, said = None, ""
        if wanted in (2, REACHED_COMPILING) or _PLANS.match(command.text):
            status, said = self._planner.run(command.text, self.folder)
        if status is None or (status == REACHED_COMPILING != wanted):
            status, said = self._process(command.text)
        told = f"{command.text}\n{said}"
        assert status == wanted, told
        assert "Traceback" not in said, told
        assert not needs_accelerators or "this machine has none" in said, told
        assert not needs_ray or "pip install 'rolecall[ray]'" in said, told
        if is_shared:
            _run_before.add(command.text)

    def _process(self, text: str) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", "-c", text],
            cwd=self.folder,
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        return done.returncode, done.stdout

    @contextmanager
    def _server(self, text: str) -> Iterator[None]:
        """Starts a server, asks it once, and stops it in the end."""
        words = ["sh", "-c", f"exec {text}"]
        with (
            # The pages' servers have one port, and several test runs one machine.
            one_process("the port of the pages' servers"),
            subprocess.Popen(words, cwd=self.folder, env=self._environment()) as process,
        ):
            try:
                self._ask(process, text)
                yield
            finally:
                process.send_signal(signal.SIGINT)
                status = process.wait(60)
            assert status == 0, text

    def _ask(self, process: subprocess.Popen[bytes], text: str) -> None:
        began = time.monotonic()
        while not (ready := list(self.folder.glob("outputs/**/server.json"))):
            assert process.poll() is None, text
            assert time.monotonic() < began + LIMIT, text
            time.sleep(0.2)
        said = json.loads(ready[0].read_text())
        with urlopen(f"{said['address']}/models", timeout=10) as answer:
            assert said["model"] in answer.read().decode()

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "PATH": f"{self._bin}:{os.environ['PATH']}"}


def _dry_run(text: str) -> None:
    if text.startswith("make "):
        words = ["make", "--dry-run", *text.split()[1:]]
        done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, check=False)
        assert done.returncode == 0, text


def _make_run() -> None:
    """Runs the main job as a newcomer does, in the environment of ``make test``."""
    if not (REPOSITORY / ".venv" / ".installed").is_file():
        # Another environment runs the tests; making one takes minutes.
        _dry_run("make run")
        return
    done = subprocess.run(
        ["make", "run"], cwd=REPOSITORY, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "smollm2 on cpu" in done.stdout


def _programs(folder: Path) -> Path:
    """The programs that pages name, whichever environment the test runs in."""
    folder.mkdir()
    command = [sys.executable, "-m", "builder"]
    programs = {"rolecall": command, "python": [sys.executable], "max": max_command()}
    for name, words in programs.items():
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return folder


def _prepare(folder: Path) -> None:
    """What a page's reader has: models of theirs, adapters, a picture."""
    for name, source in _models(folder.parent.parent).items():
        (folder / name).symlink_to(source)
    (folder / "smollm2.gguf").symlink_to(fetch(compose().model))
    (folder / "adapters").mkdir()
    for name, source in (("billing", "all"), ("returns", "some")):
        (folder / "adapters" / name).symlink_to(REFERENCE / "tiny_llama_adapters" / source)
    Image.new("RGB", (9, 9), (200, 120, 40)).save(folder / "parcel.png")


@cache
def _models(folder: Path) -> dict[str, Path]:
    """A tiny Llama and a tiny Idefics3, with a tokenizer each."""
    text, vlm = folder / "my_model", folder / "my_vlm"
    shutil.copytree(REFERENCE / "tiny_llama", text)
    shutil.copytree(REFERENCE / "tiny_idefics3", vlm)
    special = ["<unk>", "<s>", "</s>"]
    names = [*special, *(f"t{token}" for token in range(3, 256))]
    words = Tokenizer(models.WordLevel({w: at for at, w in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(text / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": 512,
        "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
    }
    (text / "tokenizer_config.json").write_text(json.dumps(settings))
    places = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    marks = ["<image>", "<s>", "</s>", "<fake_token_around_image>", "<global-img>", *places]
    letters = [*map(chr, range(32, 127)), "\n"]
    characters = Tokenizer(models.BPE({c: at for at, c in enumerate([*marks, *letters])}, []))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters.add_special_tokens(marks)
    characters.save(str(vlm / "tokenizer.json"))
    return {"my_model": text, "my_vlm": vlm}
