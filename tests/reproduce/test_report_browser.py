"""The report in a real browser: it renders, nothing overflows, nothing is loaded, and it is legible."""

import ledgers
import pytest
from browser import browser, executable

from fedhassle.reproduce.experiment import Selection, experiments, read_experiment, select
from fedhassle.reproduce.ledger import Ledger
from fedhassle.reproduce.report import content
from fedhassle.reproduce.report.html import page

pytestmark = pytest.mark.skipif(executable() is None, reason="no Chromium on this machine")

OVERFLOW = """(() => {
  document.querySelectorAll('details').forEach(d => d.open = true);
  const wide = document.documentElement.clientWidth;
  const inside = e => e.parentElement.closest('.scroll, svg') || e.closest('.skip');
  const out = [...document.body.querySelectorAll('*')].filter(e => !inside(e))
    .filter(e => e.getBoundingClientRect().right > wide + 0.5).map(e => e.tagName + '.' + e.className);
  return {page: document.documentElement.scrollWidth, wide: wide, out: out};
})()"""
OUTSIDE = """[...document.querySelectorAll('svg.chart')].flatMap(svg => {
  const box = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('text')].filter(t => t.checkVisibility()).filter(t => {
    const b = t.getBoundingClientRect();
    const across = b.left < box.left - 1 || b.right > box.right + 1;
    return across || b.top < box.top - 1 || b.bottom > box.bottom + 1;
  }).map(t => t.textContent);
})"""
CONTRAST = """(() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const channel = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const colour = text => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = text; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = c => 0.2126 * channel(c[0]) + 0.7152 * channel(c[1]) + 0.0722 * channel(c[2]);
  const behind = e => {
    for (; e; e = e.parentElement) {
      const c = colour(getComputedStyle(e).backgroundColor);
      if (c[3] > 250) return c;
    }
    return [255, 255, 255, 255];
  };
  const bad = new Set();
  for (const e of document.body.querySelectorAll('*')) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || e.closest('.skip, progress, title, desc')) continue;
    const style = getComputedStyle(e), ink = e.closest('svg') ? style.fill : style.color;
    const [a, b] = [light(colour(ink)), light(behind(e))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) bad.add(e.tagName + '.' + (e.className.baseVal ?? e.className));
  }
  return [...bad];
})()"""

WHISKERS = """[...document.querySelectorAll('.series .whisker')].map(whisker =>
  getComputedStyle(whisker).stroke === getComputedStyle(whisker.parentElement.lastElementChild).fill)"""


@pytest.fixture(scope="module")
def tab():
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module", params=["empty", "part", "whole"])
def report(request, tmp_path_factory):
    """A page of all experiments: nothing run, some of it and a broken file, everything."""
    folder = tmp_path_factory.mktemp(request.param)
    chosen = {name: read_experiment(name) for name in experiments()}
    every = select(list(chosen.values()), Selection())
    step = {"empty": 0, "part": 5, "whole": 1}[request.param]
    for name, its in every.items():
        for place, cell in enumerate(its[::step] if step else []):
            score = 0.4 + 0.003 * (place % 97) + 0.01 * cell.seed
            scores = ledgers.hassle(score) if "hassle" in cell.method else {"model": score}
            rounds = 50 if name == "ablation" and request.param == "part" else None
            ledgers.put(folder, ledgers.summary(cell, scores, rounds))
    (folder / f"{'long' * 40}.json").write_text("{")
    path = folder / "report.html"
    path.write_text(page(content.report(chosen, every, Ledger(folder))), "utf-8")
    return path


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_it_renders_and_nothing_overflows(tab, report, width, dark):
    tab.show(report, width, dark=dark)
    assert tab.complaints() == ([], [])
    assert tab.run("document.title").startswith("fedhassle")
    assert tab.run("document.querySelectorAll('section.experiment').length") == len(experiments())
    found = tab.run(OVERFLOW)
    assert found["out"] == [] and found["page"] == found["wide"] == width
    assert tab.run(OUTSIDE) == []
    assert tab.run(CONTRAST) == []


def test_a_spread_has_the_colour_of_its_series(tab, report):
    tab.show(report)
    found = tab.run(WHISKERS)
    assert all(found) and bool(found) != report.parent.name.startswith("empty")


def test_dark_is_dark(tab, report):
    shades = []
    for dark in (False, True):
        tab.show(report, dark=dark)
        shade = tab.run("getComputedStyle(document.body).backgroundColor")
        shades.append(sum(int(n) for n in shade.strip("rgb()").split(",")))
    assert shades[0] > 700 and shades[1] < 150


def test_printed_it_is_black_on_white_and_whole(tab, report):
    """Print includes what is folded up on the screen, and nothing scrolls on paper."""
    tab.show(report, dark=True, media="print")
    assert tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.run("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    assert tab.run("getComputedStyle(document.querySelector('.scroll')).overflowX") == "visible"
    height = "document.querySelector('details.made p').getBoundingClientRect().height"
    assert tab.run(height) > 0
    tab.show(report)
    assert not tab.run("document.querySelector('details.made p').checkVisibility()")


PHONE = """(() => {
  const all = (selector, of) => [...document.querySelectorAll(selector)].map(of);
  const wide = e => e.getBoundingClientRect().width;
  const box = document.querySelector('#table1 .scroll');
  const named = chart => chart.closest('figure').querySelector('.legend').checkVisibility();
  return {
    wraps: all('.tile dt', e => getComputedStyle(e).overflowWrap),
    fits: all('.tile dt', e => e.scrollWidth <= e.clientWidth),
    names: Math.max(...all('#table1 .figures tbody th', wide)) / wide(box),
    covers: all('.figures tbody th', e => e.scrollWidth > e.clientWidth).filter(over => over).length,
    charts: Math.max(...all('section > figure .chart', e => wide(e) / wide(e.parentElement))),
    named: all('section > figure .chart', named),
    attached: getComputedStyle(box).backgroundAttachment,
    images: getComputedStyle(box).backgroundImage.split('linear-gradient').length - 1,
  };
})()"""


def test_a_phone_shows_words_whole_names_of_lines_and_where_there_is_more(tab, report):
    tab.show(report, 375)
    found = tab.run(PHONE)
    assert found["fits"] == [True] * 3 and found["wraps"] == ["normal"] * 3
    assert found["names"] < 0.4  # of the width: the rest is for figures
    assert found["covers"] == 0  # no name runs into the figures beside it
    assert found["charts"] < 1.2  # all but the last column without scrolling
    assert all(found["named"]) and len(found["named"]) >= 9
    assert (found["attached"], found["images"]) == ("local, local, scroll, scroll", 4)


def test_only_the_best_is_bold(tab, report):
    tab.show(report)
    weight = "(s => [...document.querySelectorAll(s)].map(e => getComputedStyle(e).fontWeight))"
    assert set(tab.run(f"{weight}('.figures .gap')")) <= {"400"}
    assert set(tab.run(f"{weight}('.figures b')")) <= {"700"}


def test_wide_tables_scroll_by_themselves_and_by_keyboard(tab, report):
    tab.show(report, 360)
    box = "document.querySelector('#table1 .scroll')"
    assert tab.run(f"{box}.scrollWidth > {box}.clientWidth && {box}.tabIndex === 0")
    moved = f"({box}.scrollLeft = 200, {box}.querySelector('tbody th').getBoundingClientRect().left)"
    assert tab.run(moved) < 40  # the names of the rows stay in sight
