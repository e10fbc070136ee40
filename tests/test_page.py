"""The page of a sweep, in a browser."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from page_rows import DEPLOYMENTS, OWN, SHARED, TRACEBACK, refused, sweep
from playwright.sync_api import Browser, Page, sync_playwright

from builder.page.matrix import matrix, ranges
from builder.page.page import as_html, breakable, duration, failures, figure
from builder.page.scale import bytes_scale, decades_scale, figures_scale
from builder.summary import JobRow
from models.role_contracts import FIELD_NAMES

ARGUMENTS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-quic"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]

PHONE, TABLET, DESKTOP = (390, 844), (960, 700), (1280, 900)
VIEWS = [
    *((size, scheme) for size in (PHONE, DESKTOP) for scheme in ("light", "dark")),
    (TABLET, "light"),
]

HOSTILE = "<script>alert('\"&')</script><img src=http://example.com/x>{{ 7*7 }}\u202e↯日本語"
LONG = "x" * 300

VISIBLE = """
elements => elements.map(e => e.checkVisibility({contentVisibilityAuto: true})
  && e.getBoundingClientRect().height > 0)
"""

TOO_WIDE = """
() => [...document.querySelectorAll("body *")].filter(e => {
  const box = e.getBoundingClientRect();
  const beyond = box.right > innerWidth + 0.5 || box.left < -0.5;
  // A cell's text stays in its cell.
  return box.width && (beyond || (e.matches("td") && e.scrollWidth > e.clientWidth + 1));
}).map(e => e.outerHTML.slice(0, 200))
"""

CELLS = """
() => [...document.querySelectorAll(".cell")].map(cell => ({
  field: cell.dataset.field,
  present: cell.dataset.present,
  deployment: cell.parentElement.dataset.deployment,
  reasons: [...cell.querySelectorAll(".reason")].map(reason => ({
    jobs: reason.dataset.jobs.split(" "),
    because: reason.querySelector(".because").textContent,
    keys: [...reason.querySelectorAll(".keys code")].map(key => key.textContent),
    inputs: [...reason.querySelectorAll("tr")].map(
      row => [...row.children].map(one => one.textContent)),
  })),
}))
"""

LEAST_CONTRAST = """
() => {
  const numbers = text => text.match(/[\\d.]+/g).map(Number);
  const linear = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const ground = e => {
    for (; e; e = e.parentElement) {
      const found = numbers(getComputedStyle(e).backgroundColor);
      if (found.length < 4 || found[3] > 0) return found;
    }
  };
  const ratio = e => {
    const style = getComputedStyle(e);
    const ink = light(numbers(e instanceof SVGElement ? style.fill : style.color));
    const paper = light(ground(e));
    return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
  };
  const written = e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
  return Math.min(...[...document.querySelectorAll("body *")].filter(written).map(ratio));
}
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = shutil.which("chromium")
    if found is None:
        pytest.fail("no Chromium: sudo apt-get install chromium (make test does it on Debian)")
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=found, args=ARGUMENTS)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write(tmp_path_factory.mktemp("page"), sweep(), "A sweep")


def _write(folder: Path, rows: tuple[JobRow, ...], title: str) -> Path:
    file = folder / "report.html"
    file.write_text(as_html(rows, title), encoding="utf-8")
    return file


@contextmanager
def shown(
    browser: Browser, file: Path, size: tuple[int, int] = DESKTOP, scheme: Any = "light"
) -> Iterator[Page]:
    """A page, which must neither complain nor ask for anything but itself."""
    width, height = size
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, has_touch=size == PHONE
    )
    page = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(f"dialog: {dialog.message}"))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    yield page
    page.wait_for_timeout(50)
    assert said == []
    # The icon is in the page itself.
    assert {url for url in asked if not url.startswith("data:")} == {file.as_uri()}
    context.close()


@pytest.mark.parametrize(("size", "scheme"), VIEWS)
def test_page_fits_and_can_be_read(
    browser: Browser, file: Path, size: tuple[int, int], scheme: str
) -> None:
    with shown(browser, file, size, scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
        assert page.evaluate(TOO_WIDE) == []
        assert page.evaluate(LEAST_CONTRAST) >= 4.5
        for number in (0, 8, 24):
            page.locator(".cell summary").nth(number).click()
        page.check("#every")
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
        assert page.evaluate(TOO_WIDE) == []
        assert all(page.locator(".because").evaluate_all(VISIBLE))


def test_page_forbids_requests_and_scripts(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert "content=\"default-src 'none'; style-src 'sha256-" in text
    assert "<script" not in text
    assert " style=" not in text
    # The icon's own namespace is the one address, and asks for nothing.
    assert set(re.findall(r"https?://[^'\"]+", text)) == {"http://www.w3.org/2000/svg"}
    assert len(text.encode()) < 1_000_000


def test_every_cell_carries_its_reason(browser: Browser, file: Path) -> None:
    with shown(browser, file) as page:
        cells = page.evaluate(CELLS)
    found = {
        (job, cell["field"]): (cell, reason)
        for cell in cells
        for reason in cell["reasons"]
        for job in reason["jobs"]
    }
    planned = [row for row in sweep() if row.contract is not None]
    assert len(found) == 16 * len(planned)
    for row in planned:
        assert row.contract is not None
        assert [field["name"] for field in row.contract["fields"]] == list(FIELD_NAMES)
        for field in row.contract["fields"]:
            cell, reason = found[row.job, field["name"]]
            assert cell["deployment"] == row.deployment
            assert cell["present"] == ("yes" if field["present"] else "no")
            assert reason["because"] == field["because"]
            assert reason["keys"] == field["keys"]
            times = [re.search(r" ×(\d+)$", one[0]) for one in reason["inputs"]]
            assert sum(int(n[1]) if n else 1 for n in times) == len(field["leaves"])
            if len(field["leaves"]) == 1:
                (leaf,) = field["leaves"]
                shape = f"[{', '.join(map(str, leaf['shape']))}]"
                path, dtype, *others = reason["inputs"][0]
                assert (path, others[:2]) == (leaf["path"], [shape, leaf["device"]])
                assert dtype.startswith(leaf["dtype"])


def test_models_that_agree_share_a_row() -> None:
    rows = matrix(sweep())
    assert list(dict.fromkeys(row.deployment for row in rows)) == list(DEPLOYMENTS)
    shared = next(row for row in rows if row.deployment == "cpu")
    assert [job.model for job in shared.jobs] == ["tiny_llama", "tiny_idefics3"]
    reasons = {cell.field: cell.reasons for cell in shared.cells}
    assert len(reasons["tokens"]) == 1
    assert len(reasons["token_positions"]) == 2


@pytest.mark.parametrize("size", [PHONE, DESKTOP])
def test_cells_open_by_tap_and_by_keyboard(
    browser: Browser, file: Path, size: tuple[int, int]
) -> None:
    with shown(browser, file, size) as page:
        cell = page.locator(".cell[data-field=signals]").first
        assert not cell.locator(".because").is_visible()
        (cell.locator("summary").tap if size == PHONE else cell.locator("summary").click)()
        assert cell.locator(".because").is_visible()
        following = page.locator(".cell[data-field=kv]").first
        page.keyboard.press("Tab")
        assert following.locator("summary").evaluate("e => e === document.activeElement")
        page.keyboard.press("Enter")
        assert following.locator(".because").first.is_visible()
        assert cell.locator(".because").is_visible()


def test_paper_has_everything(browser: Browser, file: Path) -> None:
    with shown(browser, file, scheme="dark") as page:
        assert not any(page.locator(".because").evaluate_all(VISIBLE))
        page.emulate_media(media="print")
        # An A4 page between its margins.
        page.set_viewport_size({"width": 690, "height": 1000})
        assert all(page.locator(".because, .inputs td, pre").evaluate_all(VISIBLE))
        assert page.evaluate("document.documentElement.scrollWidth") <= 690
        assert page.evaluate(TOO_WIDE) == []
        colours = page.evaluate(
            "(s => [s.color, s.getPropertyValue('--ground')])(getComputedStyle(document.body))"
        )
        assert colours == ["rgb(0, 0, 0)", "#fff"]


def test_head_says_how_many_ended_how(browser: Browser, file: Path) -> None:
    statuses = [row.status for row in sweep()]
    with shown(browser, file) as page:
        assert page.locator("h1").inner_text() == "A sweep"
        counts = page.locator(".counts").inner_text()
        assert "36 jobs" in counts
        for status in set(statuses):
            assert f"{statuses.count(status)} {status}" in counts
        assert SHARED in page.locator(".facts").inner_text()
        longest = page.locator(".longest li").all_inner_texts()
        assert len(longest) == 5
        most = max(row.seconds.get("compile", 0) for row in sweep())
        assert longest[0].startswith(f"{most:.1f} s")
        ids = page.locator("section").evaluate_all("all => all.map(one => one.id)")
        assert ids == ["failures", "contracts", "memory", "verified", "speed", "jobs"]


def test_failures_have_a_line_and_the_whole_text(browser: Browser, file: Path) -> None:
    grouped = failures(sweep())
    assert sum(len(one.jobs) for one in grouped) == sum(
        row.status in ("error", "failed", "killed", "interrupted") for row in sweep()
    )
    with shown(browser, file) as page:
        assert page.locator(".failure").count() == len(grouped)
        twice = page.locator(".failure", has_text="it differs")
        assert twice.locator("a").all_inner_texts() == [
            "tiny_deepseek_v3 on tp2",
            "tiny_deepseek_v3 on dp2",
        ]
        long = page.locator(".failure", has_text="a kernel failed")
        assert OWN in long.locator("a").inner_text()
        assert long.locator(".summary").inner_text() == TRACEBACK.split("\n")[0]
        assert long.locator("pre").text_content() == TRACEBACK
        assert not long.locator("pre").is_visible()
        long.locator("summary").click()
        assert long.locator("pre").is_visible()


def test_refused_jobs_say_why_in_the_matrix(browser: Browser, file: Path) -> None:
    told = [row for row in sweep() if refused(row)]
    assert told
    with shown(browser, file) as page:
        texts = page.locator(".row .none").all_text_contents()
    for row in told:
        assert row.error is not None
        assert any(row.error.strip() in text for text in texts)


def test_plots_have_their_numbers(browser: Browser, file: Path) -> None:
    with shown(browser, file) as page:
        memory = page.locator("#memory").inner_text()
        assert "h100 has 79.6 GiB; the line is at the 71.7 GiB" in memory
        for name in ("weights", "KV pages", "signals", "exchange", "scratch", "LoRA", "vision"):
            assert name in memory
        limit = page.locator("#memory .limit").first
        assert limit.get_attribute("x1") == "90.0%"
        verified = page.locator("#verified .entry", has_text="tp2").filter(has_text="fail")
        assert "0.003" in verified.inner_text()
        # Thirty times the tolerance, between 0.01 and 100 times of it.
        scale = decades_scale([0.01, 30])
        assert verified.locator(".cross").get_attribute("x") == f"{scale.at(30)}%"
        assert "not a number" in page.locator("#verified").inner_text()
        speed = page.locator("#speed .entry", has_text="cpu_variable_logits").first
        assert "3 prompts" in speed.inner_text()
        assert "18.0 ms" in speed.inner_text()
        assert "9.00 to 27.0" in speed.inner_text()


def test_table_has_every_job(browser: Browser, file: Path) -> None:
    with shown(browser, file) as page:
        rows = page.locator("table.jobs tbody tr").all_inner_texts()
        assert len(rows) == 36
        assert all(row.status in text for row, text in zip(sweep(), rows, strict=True))
        assert OWN in rows[5]
        assert "24.40" in rows[0]


def test_parts_without_data_are_left_out(browser: Browser, tmp_path: Path) -> None:
    waiting = tuple(row for row in sweep() if row.status == "not run")
    with shown(browser, _write(tmp_path, waiting, "Waiting")) as page:
        ids = page.locator("section").evaluate_all("all => all.map(one => one.id)")
        assert ids == ["jobs"]
        assert "3 not run" in page.locator(".counts").inner_text()
    with shown(browser, _write(tmp_path, (), "None")) as page:
        assert page.locator("section").count() == 0
        assert "0 jobs" in page.locator(".counts").inner_text()


@pytest.mark.parametrize("size", [PHONE, DESKTOP])
def test_hostile_text_is_text(browser: Browser, tmp_path: Path, size: tuple[int, int]) -> None:
    first = sweep()[0]
    assert first.contract is not None
    fields = [{**field, "because": HOSTILE + LONG} for field in first.contract["fields"]]
    named = {"model": HOSTILE + LONG, "deployment": LONG + HOSTILE, "overrides": (LONG, HOSTILE)}
    rows = (
        replace(first, **named, contract={**first.contract, "fields": fields}),
        replace(sweep()[2], **named, status="failed", error=HOSTILE + LONG + "\n" + LONG),
        replace(first, **named, contract=None, status="error", error=f"\ud800{LONG}{HOSTILE}"),
        replace(first, job="3"),
    )
    with shown(browser, _write(tmp_path, rows, HOSTILE + LONG), size) as page:
        assert page.locator("script, img").count() == 0
        assert page.locator("h1").text_content() == HOSTILE + LONG
        assert page.locator(".because").first.text_content() == HOSTILE + LONG
        assert page.locator(".failure .summary").first.text_content() == HOSTILE + LONG
        for state in (False, True):
            page.locator("#every").set_checked(state)
            assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
            assert page.evaluate(TOO_WIDE) == []


def test_scales() -> None:
    assert bytes_scale(4 * 2**30).at(2**30) == 25
    assert [tick.text for tick in bytes_scale(3 * 2**20).ticks] == ["0", "1 MiB", "2 MiB", "3 MiB"]
    assert bytes_scale(0).at(0) == 0
    even = figures_scale([3.0, 47.0])
    assert even is not None
    assert (even.low, even.high, even.log) == (0, 50, False)
    assert even.at(60) == 100
    far = figures_scale([0.5, 47.0])
    assert far is not None
    assert (far.low, far.high, far.log) == (0.1, 100, True)
    assert figures_scale([0.0]) is None
    decades = decades_scale([1e-12, 1.0])
    assert decades.at(1e-6) == 50
    assert decades.at(0) == 0
    assert len(decades.ticks) <= 8


def test_words() -> None:
    assert ranges([3, 0, 1, 2]) == "0–3"
    assert ranges(range(1, 60, 2)) == "1, 3, … 59"
    assert [figure(value) for value in (1234.5, 42.42, 4.2, 0.0042)] == [
        *("1,234", "42.4", "4.20", "0.0042")
    ]
    assert [duration(value) for value in (0.4, 42, 125)] == ["0.40 s", "42.0 s", "2 min 5 s"]
    assert breakable("a_<b>") == "a_<wbr>&lt;b&gt;"
