"""From figures to places on an axis."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A mark of an axis."""

    at: float
    """Its place, in percent."""

    text: str
    """Its figure."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """An axis."""

    low: float
    """The figure at its left end."""

    high: float
    """The figure at its right end."""

    log: bool
    """Whether equal distances are equal ratios."""

    ticks: tuple[Tick, ...] = ()
    """Its marks."""

    def at(self, value: float) -> float:
        """The place of a figure, in percent; the nearest end for one that is outside."""
        if self.log and value <= 0:
            return 0.0
        value, low, high = (
            (math.log(figure) if self.log else figure) for figure in (value, self.low, self.high)
        )
        return round(100 * min(max((value - low) / (high - low), 0.0), 1.0), 2)


def bytes_scale(high: int) -> Scale:
    """From nothing to a number of bytes.

    Args:
        high: The bytes at the right end.
    """
    high = high or 1
    power = min(int(math.log(high, 1024)), len(_UNITS) - 1)
    unit = 1024**power
    step = _step(high / unit)
    bare = Scale(low=0, high=high, log=False)
    ticks = (index * step for index in range(int(high / unit / step + 1e-9) + 1))
    return _with_ticks(
        bare, {tick * unit: f"{tick:g} {_UNITS[power]}" if tick else "0" for tick in ticks}
    )


def figures_scale(figures: Iterable[float]) -> Scale | None:
    """From 0, or in ratios where figures are far apart; ``None`` where there is none above 0.

    Args:
        figures: What is to be drawn.
    """
    found = [figure for figure in figures if figure > 0]
    if not found:
        return None
    if max(found) > 50 * min(found):
        return decades_scale(found)
    step = _step(max(found))
    count = math.ceil(max(found) / step - 1e-9)
    bare = Scale(low=0, high=count * step, log=False)
    return _with_ticks(bare, {i * step: f"{i * step:g}" for i in range(count + 1)})


def decades_scale(figures: Iterable[float]) -> Scale:
    """Whole decades around figures, in ratios.

    Args:
        figures: What is to be drawn; those above 0 count.
    """
    logs = [math.log10(figure) for figure in figures if figure > 0]
    low = math.floor(min(logs, default=0.0))
    high = max(math.ceil(max(logs, default=0.0)), low + 1)
    every = math.ceil((high - low) / 7)
    bare = Scale(low=10.0**low, high=10.0**high, log=True)
    powers = range(high, low - 1, -every)
    return _with_ticks(bare, {10.0**power: f"{10.0**power:g}" for power in powers})


def _step(high: float) -> float:
    """The distance of three to six marks: 1, 2 or 5 of some decade."""
    rough = high / 5
    decade = 10.0 ** math.floor(math.log10(rough))
    return next(factor * decade for factor in (1, 2, 5, 10) if factor * decade >= rough * 0.999)


def _with_ticks(bare: Scale, texts: dict[float, str]) -> Scale:
    ticks = tuple(Tick(at=bare.at(value), text=text) for value, text in texts.items())
    return Scale(low=bare.low, high=bare.high, log=bare.log, ticks=ticks)
