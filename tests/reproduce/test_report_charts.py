"""Charts as SVG: axes, places, and descriptions for screen readers."""

import itertools
import logging
import math
import re
from xml.etree import ElementTree

import pytest

from fedhassle.data.split.table import ClientRow
from fedhassle.reproduce.report.charts import (
    Chart,
    Point,
    Series,
    caption,
    draw_bars,
    draw_lines,
    spaced,
    tick_step,
)
from fedhassle.reproduce.report.dots_svg import draw_split_svg
from fedhassle.reproduce.report.markup import joined, number, tag


def chart(*series, **changes):
    return Chart(**{"id": "c", "title": "A & B", "x_label": "x", "y_label": "%", "series": series, **changes})


def svg(markup):
    return ElementTree.fromstring(f"<div>{markup}</div>").find(".//svg[@role='img']")


def words(element):
    return [text.text for text in element.iter("text")]


def test_elements_escape_their_text_and_attributes():
    assert tag("p", 'a < b & "c"') == "<p>a &lt; b &amp; &#34;c&#34;</p>"
    assert tag("a", tag("b", "<"), href='x"y', class_="k") == '<a href="x&#34;y" class="k"><b>&lt;</b></a>'
    assert tag("g") == "<g></g>" and tag("line") == "<line/>"
    assert tag("g", a=None, aria_label="l\0", view_box="0") == '<g aria-label="l\ufffd" viewBox="0"></g>'
    assert joined("a\0b\x1b\ud800") == "a\ufffdb\ufffd\ufffd" and joined("<", tag("i", "x")) == "&lt;<i>x</i>"
    assert [number(value) for value in (1.0, 1.25, 1.004, 3, -0.5)] == ["1", "1.25", "1", "3", "-0.5"]


@pytest.mark.parametrize(
    ("span", "step"), [(6, 1), (7, 2), (13, 5), (31, 10), (0.5, 0.1), (100, 20), (1e-3, 2e-4)]
)
def test_ticks_are_round_and_few(span, step):
    assert tick_step(span) == pytest.approx(step)


def test_labels_are_moved_apart_and_stay_inside():
    assert spaced([10, 100], 0, 200) == [10, 100]
    assert spaced([50, 51, 52], 0, 200) == [50, 66, 82]
    assert spaced([190, 195, 199], 0, 200) == [168, 184, 200]
    crowded = spaced([100.0] * 20, 0, 190)
    assert crowded == sorted(crowded) and len(set(crowded)) == 20 and crowded[-1] <= 190 + 1e-9


def test_a_higher_value_lies_higher_and_a_later_one_further_right():
    series = Series("s", (Point(0, 10), Point(1, 20), Point(2, 15)))
    drawn = draw_lines(chart(series, ticks=("a", "b", "c")))
    found = svg(drawn)
    places = [(float(c.get("cx")), float(c.get("cy"))) for c in found.iter("circle")]
    (x0, y0), (x1, y1), (x2, y2) = places
    assert x0 < x1 < x2 and x1 - x0 == pytest.approx(x2 - x1, abs=0.02)
    assert y1 < y2 < y0 and y0 - y1 == pytest.approx(2 * (y0 - y2), abs=0.02)
    assert {"a", "b", "c", "10", "20", "x", "%"} <= set(words(found)) and "s</li>" in drawn


def test_bars_begin_at_zero_and_their_heights_are_their_values():
    series = Series("s", (Point(0, 20.0), Point(1, 40.0, 2.0)), paper=(Point(0, 30.0),))
    drawn = draw_bars(chart(series, Series("t", ()), ticks=("a", "b"), from_zero=True))
    found = svg(drawn)
    low, high = [float(rect.get("height")) for rect in found.iter("rect")]
    assert high == pytest.approx(2 * low, abs=0.02) and "0" in words(found)
    assert (
        len(found.findall(".//line[@class='whisker']")) == len(found.findall(".//path[@class='paper']")) == 1
    )
    assert "t (not run)" in drawn


def test_what_has_not_run_leaves_an_empty_chart():
    for draw in (draw_lines, draw_bars):
        for ticks in ((), ("a",)):
            found = svg(draw(chart(Series("s", ()), ticks=ticks)))
            assert "not run yet" in words(found) and "s: not run yet." in found.find("desc").text


@pytest.mark.parametrize("draw", [draw_lines, draw_bars])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_points_that_are_no_numbers_are_left_out(draw, bad):
    good = (Point(0, 10.0, 1.0), Point(2, 15.0))
    broken = (good[0], Point(1, bad), Point(1, 12.0, bad), Point(bad, 12.0), good[1])
    whole, left = (chart(Series("s", points), ticks=("a", "b", "c")) for points in (good, broken))
    assert draw(left) == draw(whole) and caption(left) == caption(whole)
    assert "not run yet" in words(svg(draw(chart(Series("s", (Point(0, bad, bad),)), ticks=("a",)))))
    assert "deviation" not in caption(chart(Series("s", (Point(0, bad, bad),))))


def test_many_points_are_a_line_with_a_band():
    series = Series(
        "s", tuple(Point(t, t % 7, 0.5) for t in range(100)), paper=(Point(99, 3.0),), dashed=True
    )
    found = svg(draw_lines(chart(series)))
    assert len(found.findall(".//path[@class='line']")) == len(found.findall(".//path[@class='band']")) == 1
    assert not list(found.iter("circle")) and found.find(".//g").get("class") == "series c0 dashed"
    assert "standard deviation" in caption(chart(series)) and "the paper's" in caption(chart(series))
    assert "s: 0.00 at 0 to 1.00 at 99." in found.find("desc").text


def test_nothing_is_drawn_over_columns_that_have_no_point():
    """No line leads from a point across the plot to its name: it would look like results."""
    series = [Series(name, (Point(0, y, 1.0),)) for name, y in (("SM", 60.0), ("UM", 61.0))]
    drawn = draw_lines(chart(*series, ticks=("a", "b", "c")))
    found = svg(drawn)
    places = [line for line in found.iter("line") if line.get("class") == "whisker"]
    assert len(places) == 2 and not found.findall(".//path[@class='line']") and "lead" not in drawn
    assert all(float(line.get("x1")) < 280 for line in places)  # in the first third
    assert drawn.index("SM</li>") < drawn.index("UM</li>") < drawn.index('role="img"')  # named above it


@pytest.mark.parametrize("count", [2, 3, 12])
def test_points_and_spreads_of_a_column_lie_beside_each_other(count):
    series = [Series(str(i), (Point(1, 60.0, 3.0),), (Point(1, 61.0),), f"c{i}") for i in range(count)]
    found = svg(draw_lines(chart(*series, ticks=tuple("abcdef"))))
    whiskers = [group.find("line[@class='whisker']") for group in found.iter("g")]
    places = [float(one.get("x1")) for one in whiskers]
    (middle,) = [float(text.get("x")) for text in found.iter("text") if text.text == "b"]
    column = (680 - 8 - 56) / 6
    assert places == sorted(set(places)) and sum(places) / count == pytest.approx(middle, abs=0.02)
    assert min(b - a for a, b in itertools.pairwise(places)) > 4
    assert places[-1] - places[0] < 0.6 * column  # nearer to their own column than to the next


def numbers(found):
    """The numbers beside the axis on the left."""
    return [float(text.text) for text in found.iter("text") if text.get("text-anchor") == "end"]


@pytest.mark.parametrize("draw", [draw_lines, draw_bars])
def test_an_empty_chart_has_the_axis_of_what_it_will_show(draw):
    found = svg(draw(chart(Series("s", ()), ticks=("a",), limits=(0.0, 100.0))))
    assert numbers(found) == [0, 20, 40, 60, 80, 100]


@pytest.mark.parametrize("ticks", [(), ("a", "b", "c")])
def test_a_spread_does_not_reach_where_no_value_can_be(ticks):
    losses = (Point(0, 3.0, 0.2), Point(1, 0.3, 0.5), Point(2, 0.2, 0.1))
    assert min(numbers(svg(draw_lines(chart(Series("s", losses), ticks=ticks))))) < 0
    found = svg(draw_lines(chart(Series("s", losses), ticks=ticks, limits=(0.0, math.inf))))
    assert min(numbers(found)) == 0
    (base,) = {float(line.get("y1")) for line in found.iter("line") if line.get("class") == "axis"}
    lows = [float(line.get("y1")) for line in found.iter("line") if line.get("class") == "whisker"]
    lows += [
        float(y)
        for band in found.findall(".//path[@class='band']")
        for y in re.findall(r",([\d.]+)", band.get("d"))
    ]
    assert lows and max(lows) <= base + 0.05
    below = svg(draw_lines(chart(Series("s", (Point(0, -2.0), Point(1, 1.0))), limits=(0.0, math.inf))))
    assert min(numbers(below)) <= -2  # what was measured is shown, whatever it should be


@pytest.mark.parametrize("last", [2, 3, 4, 7])
def test_there_is_no_half_of_a_round(last):
    rounds = [str(t) for t in range(1, last + 1)]
    series = Series("s", tuple(Point(t, 70.0 + t) for t in range(1, last + 1)))
    found = svg(draw_lines(chart(series)))
    beneath = [text.text for text in found.iter("text") if text.get("text-anchor") == "middle"][:-2]
    assert beneath == rounds


@pytest.mark.parametrize("value", [0.0, 5.0, -3.0, 1e-9, 1e12])
def test_equal_values_have_axes_too(value):
    found = svg(draw_lines(chart(Series("s", (Point(1, value), Point(2, value))))))
    assert "nan" not in ElementTree.tostring(found, "unicode").lower()


def test_names_too_long_for_their_place_are_tilted():
    series = Series("s", tuple(Point(i, 1.0) for i in range(9)))
    level = draw_bars(chart(series, ticks=tuple("abcdefghi"), from_zero=True))
    tilted = draw_bars(chart(series, ticks=("a long name indeed",) * 9, from_zero=True))
    assert "rotate(-30" in tilted and "rotate(-30" not in level


def test_dots_of_a_split_are_as_large_as_their_samples():
    def client(name, kind, labelled, unlabelled):
        return ClientRow(name, kind, sum(labelled), sum(unlabelled), 1, 1, 1, labelled, unlabelled)

    rows = [client("one", "full", (100, 0), (0, 0)), client("two", "partial", (25, 0), (75, 400))]
    found = svg(draw_split_svg(rows, "s", "<t>", ("<cat>", "dog")).partition("</ul>")[2])
    radii = [(float(c.get("r")), c.get("class")) for c in found.iter("circle")]
    one = radii[0][0] / 10
    expected = [(10, "pale"), (10, None), (10, "pale"), (5, None), (20, "pale")]
    assert radii == [(pytest.approx(n * one, abs=0.02), look) for n, look in expected]
    assert {"<cat>", "dog", "client", "1", "2"} <= set(words(found))
    assert found.find("title").text == "<t>" and "1 partial: 25 labelled and 475 unlabelled" in found[1].text
    assert len(re.findall("rect", ElementTree.tostring(found, "unicode"))) == 2


def test_matplotlib_builds_its_font_cache_silently(caplog):
    log = logging.getLogger("matplotlib.font_manager")
    log.warning("Matplotlib is building the font cache; this may take a moment.")
    log.warning("findfont: Font family 'x' not found.")
    assert [record.getMessage() for record in caplog.records] == ["findfont: Font family 'x' not found."]
