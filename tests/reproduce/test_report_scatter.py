"""Scatter charts: where points and their names lie, and which results a ranking draws."""

from xml.etree import ElementTree

import ledgers
import pytest

from fedhassle.reproduce.experiment import Selection, read_experiment, select
from fedhassle.reproduce.ledger import Ledger
from fedhassle.reproduce.report import content
from fedhassle.reproduce.report.charts import LEFT, LETTER, WIDTH, Chart, Point, Series, draw_lines
from fedhassle.reproduce.report.html import page
from fedhassle.reproduce.report.plots import price_charts
from fedhassle.reproduce.report.scatter import LINE, draw_points


def chart(*series, **changes):
    return Chart(**{"id": "c", "title": "t", "x_label": "MB", "y_label": "%", "series": series, **changes})


def svg(markup):
    return ElementTree.fromstring(f"<div>{markup}</div>").find(".//svg[@role='img']")


def named(picture):
    """The boxes of the names: left, top, right, bottom."""
    found = [text for text in picture.iter("text") if "label" in text.get("class", "")]
    boxes = {}
    for text in found:
        x, y = float(text.get("x")), float(text.get("y"))
        boxes[text.text] = (x, y + 4 - LINE, x + LETTER * len(text.text), y + 4)
    return boxes


def overlap(a, b):
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def test_the_horizontal_axis_begins_at_zero_and_ends_beyond_the_last_point():
    """100 of 108 hundredths: 8 % of the way lies beyond the point at 100."""
    found = svg(draw_points(chart(Series("a", (Point(50, 1),)), Series("b", (Point(100, 2),)))))
    circle = next(found.iter("circle"))  # the mark of the first series
    assert float(circle.get("cx")) == pytest.approx(LEFT + 50 / 108 * (WIDTH - 8 - LEFT), abs=0.01)


def test_names_of_close_points_do_not_overlap_and_stay_inside():
    points = [(100, 50.0), (100, 50.4), (101, 49.8), (60, 50.1), (100, 60.0)]
    series = [Series(f"method {i}", (Point(*place),), look=f"c{i}") for i, place in enumerate(points)]
    boxes = named(svg(draw_points(chart(*series))))
    assert len(boxes) == 5
    pairs = [(a, b) for a in boxes for b in boxes if a < b]
    assert not any(overlap(boxes[a], boxes[b]) for a, b in pairs)
    assert all(left >= LEFT and right <= WIDTH - 8 for left, _, right, _ in boxes.values())


def test_a_name_without_a_free_place_is_shown_all_the_same():
    series = [Series("a long name that fills half of the picture", (Point(1, 1),))] * 9
    assert len([text for text in svg(draw_points(chart(*series))).iter("text") if "long" in text.text]) == 9


def test_a_chart_of_small_numbers_has_ticks_between_whole_ones():
    series = Series("a", (Point(0.2, 1),)), Series("b", (Point(0.4, 2),))
    texts = [text.text for text in svg(draw_points(chart(*series, least_step=0.0))).iter("text")]
    assert {"0.1", "0.2", "0.3", "0.4"} <= set(texts)
    by_round = [text.text for text in svg(draw_lines(chart(*series))).iter("text")]
    assert "0.3" not in by_round  # rounds have no halves


def test_nothing_to_draw_says_so():
    assert "not run yet" in draw_points(chart(Series("a", ())))


# Of a ranking


@pytest.fixture
def section(tmp_path):
    """FedAvg, FedProx and SAGE on one machine, HASSLE on another, and a reference."""
    experiment = read_experiment("costs")
    its = {cell.key: cell for cell in select([experiment], Selection(seeds=1))["costs"]}
    usual, other = ({"gpu": name, "cpu": "", "threads": 1} for name in ("usual", "other"))
    runs = {"fedavg": (0.5, usual), "fedprox": (0.6, usual), "sage": (0.8, usual), "hassle": (0.7, other)}
    for method, (score, hardware) in {**runs, "central": (0.9, usual)}.items():
        cell = its[f"cifar10-{method}-plain-0"]
        shown = ledgers.hassle(score) if method == "hassle" else {"model": score}
        ledgers.put(tmp_path, ledgers.summary(cell, shown, hardware=hardware, seconds=100 * score))
    its = select([experiment], Selection(seeds=1))
    return content.report({"costs": experiment}, its, Ledger(tmp_path), Selection(seeds=1))


def test_a_ranking_shows_accuracy_over_each_price_without_references(section):
    charts = price_charts(section.sections[0])
    assert [made.x_label for made in charts] == ["seconds", "MB up", "MB down"]  # Fashion-MNIST has no runs
    seconds, up, _ = charts
    places = {one.label: one.points for one in seconds.series}
    assert places == {
        "FedAvg, plain": (Point(50, 50),),
        "FedProx, plain": (Point(60, 60),),
        "SAGE, plain": (Point(80, 80),),
    }
    assert seconds.title.endswith("CIFAR-10, on usual") and up.title.endswith("CIFAR-10")
    assert [one.label for one in up.series][-2:] == ["HASSLE, plain", "SAGE, plain"]
    assert len({made.id for made in charts}) == 3
    assert page(section).count('class="chart"') >= 3
