"""The command's options: in any place among the overrides, and their mistakes in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_command import read, rolecall

from builder.options import options_first
from models.errors import ConfigError

PLANNED = ("model=tiny_llama", "task=plan")

# What is given before or after overrides, and what Hydra is given before them.
OPTIONS = {
    "--cfg job": "--cfg job",
    "-c job --resolve -p task": "-c job --resolve -p task",
    "--cfg=job": "--cfg=job",
    "--info": "--info=all",
    "-i": "--info=all",
    "-i defaults": "-i defaults",
    "--info -cd folder": "--info=all -cd folder",
    "-cp folder -cn name": "-cp folder -cn name",
    "--run": "--run",
    "-m": "-m",
    "--experimental-rerun file": "--experimental-rerun file",
    "--help": "--help",
}


@pytest.mark.parametrize("given", OPTIONS)
def test_option_may_stand_anywhere(given: str) -> None:
    expected = [*OPTIONS[given].split(), *PLANNED]
    words = given.split()
    assert options_first([*words, *PLANNED]) == expected
    assert options_first([*PLANNED, *words]) == expected
    assert options_first([PLANNED[0], *words, PLANNED[1]]) == expected


WRONG = {
    "--foo": "--foo: no such option (on the command line); did you mean --info?",
    "--multi": "--multi: no such option (on the command line); did you mean --multirun?",
    "-x=3": "-x=3: no such option (on the command line); valid here: --cfg, --config-dir, ",
    "--cfg": "--cfg: invalid choice: 'task=plan' (choose from ",
    "--config-dir -m": "--config-dir: expected one argument (on the command line)",
    "--cfg jobs": "--cfg: invalid choice: 'jobs'",
    "-i defalts": "--info: invalid choice: 'defalts'",
    "--resolve=3": "--resolve: ignored explicit argument '3' (on the command line)",
}


@pytest.mark.parametrize("given", WRONG)
def test_wrong_option_is_one_line(given: str) -> None:
    with pytest.raises(ConfigError) as caught:
        options_first([PLANNED[0], *given.split(), PLANNED[1]])
    assert str(caught.value).startswith(WRONG[given])
    assert "\n" not in str(caught.value)


def test_command_refuses_an_unknown_option(tmp_path: Path) -> None:
    done = rolecall(tmp_path, *PLANNED, "--foo", status=2)
    assert done.stderr == f"error: {WRONG['--foo']}\n"


@pytest.mark.parametrize("option", ["--cfg job", "-i defaults", "--hydra-help", "-sc install=bash"])
def test_command_shows_the_same_wherever_the_option_stands(tmp_path: Path, option: str) -> None:
    words = option.split()
    after, before = rolecall(tmp_path, *PLANNED, *words), rolecall(tmp_path, *words, *PLANNED)
    assert after.stdout == before.stdout
    assert after.stdout
    assert not (tmp_path / "job").exists()


def test_job_is_run_again_from_its_file(tmp_path: Path) -> None:
    pickled = "+hydra.callbacks.x._target_=hydra.experimental.callbacks.PickleJobInfoCallback"
    rolecall(tmp_path, *PLANNED, pickled)
    made = read(tmp_path, "plan.json")
    file = tmp_path / "job" / ".hydra" / "config.pickle"
    rolecall(tmp_path, "--experimental-rerun", str(file))
    assert read(tmp_path, "plan.json") == made
