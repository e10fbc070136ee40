"""Mistakes of composition in words: one line each, with its place and what would work."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import yaml
from hydra.errors import (
    HydraException,
    MissingConfigException,
    OverrideParseException,
    SearchPathException,
)
from omegaconf.errors import OmegaConfBaseException

from builder.key_words import explain_key
from builder.loading import Request, values
from builder.origin import CompositionError, Origin, mistake
from builder.provenance import origins
from builder.suggest import EXTRAS, added, did_you_mean, known_choices, nearest, word_like
from builder.yaml_lines import YamlFile, text_of

MISTAKES = (
    HydraException,
    OmegaConfBaseException,
    yaml.YAMLError,
    # What Hydra and OmegaConf raise for files and defaults lists that are something else.
    ValueError,
    OSError,
    RecursionError,
)
"""What a mistake in a file or on the command line raises while a configuration is composed."""

_NOT_MADE = "overrides a choice that no defaults list makes"


def explain(error: BaseException, request: Request) -> CompositionError:
    """Words an error of composition.

    Args:
        error: What Hydra, OmegaConf or the YAML reader raised.
        request: What was asked.
    """
    if isinstance(error, CompositionError):
        return error
    try:
        return _of_sweep(error, request) or _explain(error, request)
    except Exception:  # noqa: BLE001 - what finds no words must not hide the mistake
        return _other(error, request)


def _of_sweep(error: BaseException, request: Request) -> CompositionError | None:
    """The mistake of the first job of a sweep that can't be composed."""
    if "Ambiguous value" in str(error):
        # Without -m.
        return None
    try:
        for job in request.combinations():
            try:
                job.composer.compose(job.overrides)
            except MISTAKES as mistaken:
                return _explain(mistaken, job)
    except HydraException:
        # A search that chooses as it goes: what is typed has to do.
        return None
    return None


def _explain(error: BaseException, request: Request) -> CompositionError:
    causes = _causes(error)
    for word in request.overrides:
        if word.startswith("="):
            return mistake(Origin(override=word), f"{word}: no key before =", "give KEY=VALUE")
    for cause in causes:
        if isinstance(cause, yaml.MarkedYAMLError):
            return _not_yaml(cause, request)
        if isinstance(cause, yaml.reader.ReaderError):
            return _unprintable(cause, request)
        if isinstance(cause, UnicodeDecodeError):
            return _not_utf8(request) or _other(error, request)
        if isinstance(cause, MissingConfigException) and cause.missing_cfg_file is not None:
            return _no_choice(cause.missing_cfg_file, request)
        if isinstance(cause, OverrideParseException):
            return _unreadable(error, request)
        if isinstance(cause, SearchPathException):
            return mistake(Origin(override="--config-dir"), f"--config-dir: {cause}")
    for cause in causes:
        if isinstance(cause, OmegaConfBaseException) and cause.full_key is not None:
            return explain_key(cause, str(error), request)
    return _of_choice(str(error), request) or _of_defaults(request) or _other(error, request)


def check_choices(key: str, names: Iterable[str], group: str, request: Request) -> None:
    """Refuses a value of a key that is no choice of a group.

    Args:
        key: The key.
        names: Its values.
        group: The group.
        request: What was asked.

    Raises:
        CompositionError: If there is one.
    """
    choices = request.composer.choices(group)
    for name in names:
        if name not in choices:
            origin = origins(request).get(key, Origin())
            raise mistake(origin, f"{key}: no such {group}: {name}", did_you_mean(name, choices))


def check_hydra_words(words: Sequence[str]) -> None:
    """Refuses a choice of Hydra's that is written as a key: Hydra takes it, and fails later.

    Args:
        words: The words of a command line.

    Raises:
        CompositionError: If there is one.
    """
    for word in words:
        found = re.fullmatch(r"\+*hydra\.(launcher|sweeper)=(\w+)", word)
        if found is not None:
            meant = f"did you mean hydra/{found[1]}={found[2]}?"
            raise mistake(Origin(override=word), f"{word}: a choice takes a slash", meant)


def _causes(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _not_yaml(error: yaml.MarkedYAMLError, request: Request) -> CompositionError:
    mark, problem = error.problem_mark, str(error.problem)
    assert mark is not None
    origin = Origin(file=request.composer.typed(mark.name), line=mark.line + 1)
    if twice := re.match("found duplicate key (.*)", problem):
        return mistake(origin, f"{twice[1]}: a second time in one mapping", "keep one of them")
    remedy = None
    if "<block end>" in problem or "mapping values" in problem:
        remedy = "indent the keys of one mapping alike"
    elif "'\\t'" in problem:
        remedy = "indent with spaces, not with tabs"
    told = ", ".join(filter(None, (error.context, problem)))
    return mistake(origin, f"not valid YAML: {told}", remedy)


def _unprintable(error: yaml.reader.ReaderError, request: Request) -> CompositionError:
    """A control character, which YAML has no place for."""
    before = Path(error.name).read_text(encoding="utf-8")[: error.position]
    origin = Origin(file=request.composer.typed(error.name), line=before.count("\n") + 1)
    return mistake(origin, f"not valid YAML: {str(error).splitlines()[0]}")


def _not_utf8(request: Request) -> CompositionError | None:
    """A file in another encoding: the error names none."""
    for file in request.files():
        line = file.undecodable()
        if line is not None:
            origin = Origin(file=file.name, line=line)
            return mistake(origin, "not UTF-8", "save the file as UTF-8 text")
    return None


def _unreadable(error: BaseException, request: Request) -> CompositionError:
    """A word that is no override."""
    for word in request.overrides:
        if request.composer.parse_word(word) is not None:
            continue
        origin = Origin(override=word)
        if "=" not in word:
            remedy = word_like(request.composer, word, known_choices(request))
            return mistake(origin, f"{word}: a word without =", remedy)
        lines = [line for line in str(error).splitlines() if "Error parsing override" not in line]
        remedy = "put a text with special characters in quotes of its own, 'KEY=\"TEXT\"'"
        return mistake(origin, f"{word}: can't be read: {lines[0]}", remedy)
    return _other(error, request)


def _no_choice(config_path: str, request: Request) -> CompositionError:
    """A file that does not exist, named on the command line or in a defaults list."""
    for override in request.parsed():
        group, key = override.key_or_group, override.get_key_element()
        for name in values(override):
            if f"{group}/{name}" == config_path:
                problem, remedy = _absent(group, name, f"{key}={{}}", request)
                origin = Origin(override=override.input_line)
                return mistake(origin, f"{key}={name}: {problem}", remedy)
    group, _, name = config_path.rpartition("/")
    if name == request.composer.primary:
        return mistake(Origin(override="--config-name"), f"--config-name {name}: no such file")
    for file in request.files():
        for entry in file.defaults():
            if entry.config_path == config_path:
                origin = Origin(file=file.name, line=entry.line)
                if not request.composer.is_group(group):
                    return _no_group(origin, entry.text, group, request)
                before, _, after = entry.text.rpartition(name)
                form = f"{before}{{}}{after}"
                problem, remedy = _absent(group, name, form, request)
                return mistake(origin, f"{entry.text}: {problem}", remedy)
    problem, remedy = _absent(group, name, f"{group}={{}}", request)
    return mistake(Origin(), f"{group}={name}: {problem}", remedy)


def _absent(group: str, name: str, form: str, request: Request) -> tuple[str, str]:
    """What is wrong with a choice, and what would work in its place."""
    choices = request.composer.choices(group)
    if group in ("hydra/launcher", "hydra/sweeper"):
        if name in EXTRAS:
            return "not installed", f"pip install 'rolecall[{EXTRAS[name]}]'"
        choices = tuple({*choices, *EXTRAS})
    if not name:
        return "no choice is given", did_you_mean(name, choices, form)
    if group == "model" and ("/" in name or name.endswith(".gguf")):
        return "a checkpoint, not a choice", f"did you mean model=local model.source={name}?"
    if nearest(name, choices) is None:
        for other in request.composer.groups():
            if name in request.composer.choices(other):
                meant = f"{added(other, known_choices(request))}={name}"
                return f"no such {group}, but a choice of {other}", f"did you mean {meant}?"
    return "no such choice", did_you_mean(name, choices, form)


def _no_group(origin: Origin, text: str, group: str, request: Request) -> CompositionError:
    """An entry of a defaults list whose group does not exist."""
    before, _, after = text.partition(group)
    remedy = did_you_mean(group, request.composer.groups(), f"{before}{{}}{after}")
    return mistake(origin, f"{text}: no such group", remedy)


def _of_choice(text: str, request: Request) -> CompositionError | None:
    """A choice of a group that exists, made in a way that is none."""
    if found := re.search(r"Ambiguous value for argument '(.*)'", text):
        key, _, given = found[1].partition("=")
        remedy = "add -m to sweep over them"
        if not request.composer.is_group(key.lstrip("+")):
            remedy += f", or write a list as {key}=[{given}]"
        return mistake(Origin(override=found[1]), f"{found[1]}: several values", remedy)
    if "Config group override must be" in text:
        for override in request.parsed():
            group, value = override.key_or_group, override.value()
            if request.composer.is_group(group) and not isinstance(value, str | list | dict):
                word = str(override.input_line)
                remedy = did_you_mean(str(value), request.composer.choices(group), f"{group}={{}}")
                return mistake(Origin(override=word), f"{word}: no such choice", remedy)
    if found := re.search(r"Multiple values for (\S+)\. .*: (\S+)'", text):
        return _twice(found[1], found[2], request)
    if found := re.search(r"An item is already at '([^']+)'", text):
        for override in request.parsed():
            if override.is_add() and override.key_or_group == found[1]:
                word = str(override.input_line)
                meant = f"did you mean {word.removeprefix('+')}?"
                return mistake(Origin(override=word), f"{word}: set already", meant)
    if found := re.search(r"Could not override '([^']+)'\.(?: No match|\nDid you mean)", text):
        return _not_made(found[1], text, request)
    return None


def _twice(key: str, name: str, request: Request) -> CompositionError | None:
    """A choice that is made twice, once as ``name``."""
    group = key.split("@")[0]
    for override in request.parsed():
        word, is_group = str(override.input_line), request.composer.is_group(override.key_or_group)
        if isinstance(override.value(), list) and is_group:
            return mistake(Origin(override=word), f"{word}: chooses {key} twice", "name one")
        if override.is_add() and override.key_or_group == group:
            meant = f"did you mean {key}={override.get_value_string()}?"
            return mistake(Origin(override=word), f"{word}: chosen already", meant)
    for file in request.files():
        for entry in file.defaults():
            if entry.config_path == f"{group}/{name}":
                origin = Origin(file=file.name, line=entry.line)
                meant = f"did you mean override {entry.text}, at the end of the list?"
                return mistake(origin, f"{entry.text}: another file has chosen already", meant)
    return None


def _not_made(key: str, text: str, request: Request) -> CompositionError | None:
    """An override of a choice that is not made."""
    group = key.split("@")[0]
    parent = re.match(r"In '([^']+)'", text)
    file = None if parent is None else request.composer.file(parent[1])
    for entry in () if file is None else file.defaults():
        if file and entry.text.startswith("override ") and f"{group}/" in entry.config_path:
            origin = Origin(file=file.name, line=entry.line)
            if not request.composer.is_group(group):
                return _no_group(origin, entry.text, group, request)
            meant = f"did you mean {entry.text.removeprefix('override ')}?"
            return mistake(origin, f"{entry.text}: {_NOT_MADE}", meant)
    for override in request.parsed():
        if override.key_or_group == group:
            word, given = str(override.input_line), override.get_value_string()
            same = [one for one in known_choices(request) if one.split("@")[0] == group]
            meant = f"did you mean {same[0] if same else f'+{key}'}={given}?"
            return mistake(Origin(override=word), f"{word}: {_NOT_MADE}", meant)
    return None


def _of_defaults(request: Request) -> CompositionError | None:
    """A defaults list that is none, or comes back to its own file."""
    for file in request.files():
        found = file.find("defaults")
        if found is not None:
            node, line = found
            entries = node.value if isinstance(node, yaml.SequenceNode) else [node]
            for entry in entries:
                if entry is node or not _is_entry(entry):
                    origin = Origin(file=file.name, line=max(line, entry.start_mark.line + 1))
                    kind = "list" if entry is node else "entry of a defaults list"
                    problem = f"defaults: {text_of(entry)} is no {kind}"
                    form = "write a list such as [base, /devices@devices: cpu_x2, _self_]"
                    return mistake(origin, problem, form)
        for default in file.defaults():
            if file.config_path in _named(default.config_path, request):
                origin = Origin(file=file.name, line=default.line)
                return mistake(origin, f"{default.text}: comes back to this file", "leave it out")
    return None


def _is_entry(node: yaml.Node) -> bool:
    if isinstance(node, yaml.MappingNode):
        pairs = node.value
        return (
            len(pairs) == 1
            and isinstance(pairs[0][1], yaml.SequenceNode | yaml.ScalarNode)
            and not pairs[0][1].tag.endswith((":int", ":float", ":bool"))
        )
    return isinstance(node, yaml.ScalarNode) and node.tag.endswith(":str")


def _named(config_path: str, request: Request) -> set[str]:
    """The files that a file names, and those that they name."""
    found, waiting = set(), [config_path]
    while waiting:
        one = waiting.pop()
        file: YamlFile | None = None if one in found else request.composer.file(one)
        found.add(one)
        waiting += [] if file is None else [entry.config_path for entry in file.defaults()]
    return found


def _other(error: BaseException, request: Request) -> CompositionError:
    """What has no words of its own: Hydra's, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = " ".join(line for line in lines if "hydra.cc" not in line) or type(error).__name__
    parent = re.search(r"^In '?(\S+?)'?: |defined in (\S+)$", told)
    file = None if parent is None else request.composer.file(parent[1] or parent[2])
    if parent is not None and file is not None:
        return mistake(Origin(file=file.name, line=1), told.removeprefix(parent[0]))
    for word in request.overrides:
        if word in told or f"'{word.lstrip('+~').partition('=')[0]}'" in told:
            return mistake(Origin(override=word), told)
    return mistake(Origin(), told)
