"""From answers to one table: medians over the repeats, ratios within them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rich.table import Table

from benchmarks.alternate import Measured
from benchmarks.workload import Case

COMPARED = 16
"""Tokens of each sequence that are held against the reference's."""


@dataclass(frozen=True)
class Row:
    """One engine's results of one case."""

    engine: str
    """The engine's name."""

    case: Case
    """The case."""

    ttft_ms: float
    """Time to the first prompt's first token."""

    prefill_tok_s: float
    """That prompt's tokens per second."""

    decode_tok_s: float | None
    """Tokens per second of the whole batch's decode steps; ``None`` where there is none."""

    step_ms: float | None
    """The median decode step."""

    prefill_ratio: float | None
    """How many times the baseline's prefill rate; ``None`` without a baseline."""

    decode_ratio: float | None
    """How many times the baseline's decode rate."""

    same_tokens: int | None
    """How many of the first tokens are the reference's, in the sequence with the fewest; ``None``
    without a reference."""

    compared_tokens: int
    """Out of how many."""


def rows(measured: Sequence[Measured], baseline: str, reference: str | None) -> list[Row]:
    """Every engine's results, by case, each in the order of the first case.

    A ratio is the median of the repeats' ratios: what a repeat met, both engines met.

    Args:
        measured: All answers.
        baseline: The engine that ratios are of.
        reference: The engine whose tokens are right.
    """
    if not measured:
        return []
    found: dict[tuple[Case, str | None], list[Measured]] = {}
    for one in measured:
        found.setdefault((one.case, one.engine), []).append(one)
    cases, engines = (list(dict.fromkeys(part)) for part in zip(*found, strict=True))
    return [
        _row(found[case, engine], found.get((case, baseline), []), found.get((case, reference), []))
        for case in cases
        for engine in engines
        if (case, engine) in found
    ]


def _row(own: list[Measured], base: list[Measured], right: list[Measured]) -> Row:
    compared = min(COMPARED, own[0].case.new)
    steps = [step for one in own for step in one.answer["step_ms"]]
    prefill = _median(own, "prefill_tok_s")
    assert prefill is not None
    ttft = _median(own, "ttft_ms")
    assert ttft is not None
    return Row(
        engine=own[0].engine,
        case=own[0].case,
        ttft_ms=ttft,
        prefill_tok_s=prefill,
        decode_tok_s=_median(own, "decode_tok_s"),
        step_ms=median(steps) if steps else None,
        prefill_ratio=_ratio(own, base, "prefill_tok_s"),
        decode_ratio=_ratio(own, base, "decode_tok_s"),
        same_tokens=_same(own, right[0].answer["ids"], compared) if right else None,
        compared_tokens=compared,
    )


def _median(own: list[Measured], key: str) -> float | None:
    values = [one.answer[key] for one in own]
    return None if None in values else median(values)


def _ratio(own: list[Measured], base: list[Measured], key: str) -> float | None:
    of = {one.repeat: one.answer[key] for one in base}
    ratios = [one.answer[key] / of[one.repeat] for one in own if of.get(one.repeat)]
    return median(ratios) if ratios else None


def _same(own: list[Measured], right: list[list[int]], compared: int) -> int:
    """The length of the shortest beginning that is the reference's, over repeats too."""
    return min(
        common(ids[:compared], wanted[:compared])
        for one in own
        for ids, wanted in zip(one.answer["ids"], right, strict=True)
    )


def common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count


def table(results: Sequence[Row], baseline: str, reference: str | None) -> Table:
    """The results for people.

    Args:
        results: The rows.
        baseline: The engine that ratios are of.
        reference: The engine whose tokens are right.
    """
    drawn = Table(box=None, pad_edge=False)
    for heading in ("batch", "context"):
        drawn.add_column(heading, justify="right", no_wrap=True)
    drawn.add_column("engine", no_wrap=True)
    for heading in ("ttft ms", "prefill tok/s", "decode tok/s", "step ms"):
        drawn.add_column(heading, justify="right", no_wrap=True)
    for rate in ("prefill", "decode"):
        drawn.add_column(f"{rate} x", justify="right", no_wrap=True)
    drawn.add_column("tokens", no_wrap=True)
    before = None
    for row in results:
        if before not in (None, row.case):
            drawn.add_row()
        before = row.case
        drawn.add_row(
            str(row.case.batch),
            str(row.case.context),
            row.engine,
            f"{row.ttft_ms:.1f}",
            f"{row.prefill_tok_s:.1f}",
            _cell(row.decode_tok_s, ".1f"),
            _cell(row.step_ms, ".2f"),
            _cell(row.prefill_ratio, ".2f"),
            _cell(row.decode_ratio, ".2f"),
            _tokens(row),
        )
    drawn.caption = f"x: times {baseline}; tokens: the first ones, " + (
        f"against {reference}" if reference else "with nothing to hold them against"
    )
    drawn.caption_justify = "left"
    return drawn


def _cell(value: float | None, style: str) -> str:
    return "-" if value is None else format(value, style)


def _tokens(row: Row) -> str:
    if row.same_tokens is None:
        return "-"
    if row.same_tokens == row.compared_tokens:
        return "equal"
    return f"differ after {row.same_tokens}"
