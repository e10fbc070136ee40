"""The pages say what is true: their commands run, their links lead somewhere, their names exist."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from docs_runner import COMPILING, NOT_RUN, PAGES, REPOSITORY, Page, PageRun, Planner

from builder.loading import config_folder
from builder.reference import COMMAND, render

INDENTED_COMMAND = re.compile(r" {4,}(rolecall|max|make|python|pip|curl) ")


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planner]:
    made = Planner(tmp_path_factory.mktemp("planner"))
    yield made
    made.process.communicate(timeout=60)
    assert made.process.returncode == 0


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_runs(page: str, tmp_path: Path, planner: Planner) -> None:
    run = PageRun(tmp_path, planner)
    for block in Page(page).blocks:
        if block.file is not None:
            run.write(block.file, block.text)
        else:
            run.commands(block.commands)


def all_commands() -> list[str]:
    return [c.text for page in PAGES for block in Page(page).blocks for c in block.commands]


def test_commands_that_are_not_run_are_on_a_page() -> None:
    assert {*NOT_RUN, *COMPILING} <= set(all_commands())


def test_a_command_is_in_a_block_that_is_run() -> None:
    for page in PAGES:
        lines = (REPOSITORY / page).read_text().splitlines()
        assert not [line for line in lines if INDENTED_COMMAND.match(line)], page


def test_ci_runs_a_command_of_its_page() -> None:
    (job,) = (b for b in Page("docs/checking.md").blocks if b.file and ".github" in b.file)
    steps = yaml.safe_load(job.text)["jobs"]["check"]["steps"]
    (command,) = (step["run"] for step in steps if "rolecall" in step.get("run", ""))
    assert command in [c.text for b in Page("docs/checking.md").blocks for c in b.commands]


def every_page() -> list[Path]:
    return [*REPOSITORY.glob("*.md"), *sorted((REPOSITORY / "docs").glob("*.md"))]


def test_links_lead_somewhere() -> None:
    lost = []
    for page in every_page():
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            path = (page.parent / target).resolve()
            if not path.exists():
                lost.append((page.name, target))
    assert not lost


def test_every_page_is_in_the_index() -> None:
    index = (REPOSITORY / "docs" / "README.md").read_text()
    for page in (REPOSITORY / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index


def test_choices_that_are_named_exist() -> None:
    for page in every_page():
        text = page.read_text()
        written = set(re.findall(r"^# my_conf/(\w+/\w+)\.yaml$", text, re.MULTILINE))
        for group, choice in re.findall(r"\b(model|deployment|task)=(\w+)\b(?![.=])", text):
            ours = config_folder() / group / f"{choice}.yaml"
            assert ours.is_file() or f"{group}/{choice}" in written or choice.isupper(), (
                page.name,
                f"{group}={choice}",
            )


def test_keys_that_are_named_exist() -> None:
    known = set(re.findall(r"`((?:model|deployment|task)\.[\w.]+)`", render()))
    parts = {key.rsplit(".", end)[0] for key in known for end in range(key.count(".") + 1)}
    for page in every_page():
        for key in re.findall(r"\b(?:model|deployment|task)(?:\.[a-z_]+)+\b", page.read_text()):
            # Names of a user's own, the files of configurations, and a mistake that is shown.
            if key.startswith("deployment.lora.adapters.") or key == "model.safetensors":
                continue
            assert key in known | parts | MISTAKEN, (page.name, key)


MISTAKEN = {"deployment.max_lenght", "deployment.page_size"}


def test_the_reference_is_fresh() -> None:
    page = (REPOSITORY / "docs" / "reference.md").read_text()
    assert page == render(), f"docs/reference.md is stale; refresh it with: {COMMAND}"


def test_every_key_and_choice_is_described() -> None:
    cells = [line.split(" | ") for line in render().splitlines() if line.startswith("| `")]
    assert len(cells) > 80
    assert not [row for row in cells if not row[-1].strip(" |")]


def test_the_readme_is_short() -> None:
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= 170


# docs/errors.md


def raised() -> Iterator[tuple[str, list[str]]]:
    """Where each ``ConfigError`` is made, and its first line in pieces between its values."""
    for folder in ("builder", "models"):
        for file in sorted((REPOSITORY / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                is_error = isinstance(node, ast.Call) and ast.unparse(node.func) == "ConfigError"
                if is_error and isinstance(node.args[0], ast.Constant | ast.JoinedStr):
                    yield f"{file.relative_to(REPOSITORY)}:{node.lineno}", _pieces(node.args[0])


def _pieces(message: ast.Constant | ast.JoinedStr) -> list[str]:
    parts = message.values if isinstance(message, ast.JoinedStr) else [message]
    told = "".join(str(p.value) if isinstance(p, ast.Constant) else "\0" for p in parts)
    return told.split("\n")[0].split("\0")


def test_every_error_has_a_line_on_its_page() -> None:
    page = (REPOSITORY / "docs" / "errors.md").read_text()
    messages = [message.replace("'", "") for message in re.findall(r"`([^`\n]+)`", page)]
    found = list(raised())
    assert len(found) > 120
    missing = []
    for where, pieces in found:
        words = [re.escape(piece.replace("'", "").strip(" ")) for piece in pieces]
        pattern = re.compile(r".*?".join(words).rstrip("\\ ;:"))
        if not any(pattern.match(message) for message in messages):
            missing.append(f"{where}: {'...'.join(pieces)}")
    assert not missing, "docs/errors.md has no line for\n" + "\n".join(missing)


def test_make_knows_its_targets() -> None:
    for target in ("run", "test", "lint", "bench", "gpu-check", "gpu-compile"):
        command = ["make", "--dry-run", target]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=False)
        assert done.returncode == 0, target
