"""The command: ``python -m benchmarks``."""

from __future__ import annotations

import argparse
import json
import platform
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import results, start_up
from benchmarks.alternate import EngineFailedError, EngineProcess, Measured, alternate
from benchmarks.catalogue import ENGINES, REFERENCES, UnavailableError, interpreter
from benchmarks.workload import Case, Workload
from builder.tables import console, print_table
from models.errors import ConfigError


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        words: Its arguments; by default the process's.

    Returns:
        0; 1 where an engine that was asked for could not be measured; 2 for a mistake.
    """
    given = _arguments(words)
    cases = tuple(Case(b, c, given.new) for c in given.context for b in given.batch)
    work = Workload(tuple(given.overrides), cases)
    given.out.mkdir(parents=True, exist_ok=True)
    try:
        return _start_up(work, given) if given.start_up else _compare(work, given)
    except (ConfigError, start_up.CommandFailedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--engines",
        nargs="+",
        choices=list(ENGINES),
        metavar="NAME",
        help=f"by default all that are installed of {', '.join(ENGINES)}",
    )
    parser.add_argument("--baseline", metavar="NAME", help="by default the first of the engines")
    parser.add_argument("--repeats", type=_positive, default=3, help="by default 3")
    parser.add_argument("--batch", type=_positive, nargs="+", default=[1, 8], help="by default 1 8")
    parser.add_argument(
        "--context", type=_positive, nargs="+", default=[512], help="by default 512"
    )
    parser.add_argument("--new", type=_positive, default=64, help="tokens, by default 64")
    parser.add_argument(
        "--overrides",
        nargs="+",
        default=["model=smollm2"],
        help="what rolecall's command line would say of the model, by default model=smollm2",
    )
    parser.add_argument(
        "--peers-python",
        type=Path,
        nargs="+",
        default=[Path(".venv-peers/bin/python")],
        help="interpreters that peers are looked for in, by default .venv-peers/bin/python",
    )
    parser.add_argument(
        "--start-up", action="store_true", help="time whole commands to their first token instead"
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks"))
    given = parser.parse_args(words)
    if given.baseline and given.baseline not in (given.engines or ENGINES):
        parser.error(f"--baseline: {given.baseline} is none of the engines")
    return given


def _positive(word: str) -> int:
    value = int(word)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _compare(work: Workload, given: argparse.Namespace) -> int:
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        processes = {}
        for name in given.engines or ENGINES:
            _tell(f"loading {name}")
            try:
                process = _started(name, work, given)
            except (UnavailableError, EngineFailedError) as error:
                missing[name] = str(error)
                _tell(f"  {error}")
                continue
            processes[name] = stack.enter_context(process)
        measured = _measured(processes, missing, work, given.repeats)
        versions = {name: process.facts["version"] for name, process in processes.items()}
    names = [name for name in processes if any(one.engine == name for one in measured)]
    baseline = given.baseline or (names[0] if names else "")
    reference = next((name for name in REFERENCES if name in names), None)
    rows = results.rows(measured, baseline, reference)
    _write(
        given,
        work,
        {
            "versions": versions,
            "missing": missing,
            "baseline": baseline,
            "reference": reference,
            "rows": [asdict(row) for row in rows],
            "measured": [asdict(one) for one in measured],
        },
    )
    out = console()
    print_table(results.table(rows, baseline, reference), out)
    for name, reason in missing.items():
        print(f"{name}: not measured: {reason}")
    return 1 if not names or (given.engines and missing) else 0


def _started(name: str, work: Workload, given: argparse.Namespace) -> EngineProcess:
    engine = ENGINES[name]
    python = interpreter(engine, given.peers_python)
    return EngineProcess(engine, python, engine.settings(work), given.out / f"{name}.log")


def _measured(
    processes: dict[str, EngineProcess], missing: dict[str, str], work: Workload, repeats: int
) -> list[Measured]:
    prompts = {case: work.prompts(case) for case in work.cases}

    def ask(name: str, case: Case, repeat: int) -> dict[str, Any] | None:
        try:
            if repeat < 0:
                return processes[name].ask(prompts[case], min(2, case.new))
            answer = processes[name].ask(prompts[case], case.new)
        except EngineFailedError as error:
            missing[name] = str(error)
            return None
        rate = answer["decode_tok_s"]
        told = f"repeat {repeat + 1}, batch {case.batch}, context {case.context}: {name}"
        _tell(f"{told}: ttft {answer['ttft_ms']:.0f} ms, decode {rate or 0:.1f} tokens/s")
        return answer

    _tell("warming up")
    for case in work.cases:
        for name in processes:
            if name not in missing:
                ask(name, case, -1)
    return alternate([n for n in processes if n not in missing], work.cases, repeats, ask)


def _start_up(work: Workload, given: argparse.Namespace) -> int:
    given_commands = start_up.commands(work, given.out)
    seconds = start_up.measure(given_commands, given.repeats, given.out, _tell)
    _write(given, work, {"commands": given_commands, "seconds": seconds})
    print_table(start_up.table(seconds, "rolecall"), console())
    return 0


def _write(given: argparse.Namespace, work: Workload, found: dict[str, Any]) -> None:
    contents = {
        "model": str(work.plan.checkpoint.path),
        "overrides": list(work.overrides),
        "machine": {"processor": _processor(), "cores": work.threads, "os": platform.platform()},
        **found,
    }
    file = given.out / ("start_up.json" if given.start_up else "results.json")
    file.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
    _tell(f"all of it: {file}")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


if __name__ == "__main__":
    # So that engines' processes, which may be stopped, end with this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
