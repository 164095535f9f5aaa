"""The dot picture of a split."""

import itertools
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from PIL import Image

from fedhassle.data.split import dots
from fedhassle.data.split.draw import split
from fedhassle.data.split.split import Split
from fedhassle.data.split.table import table
from fedhassle.errors import UserError

Y = np.array([0] * 6 + [1] * 6)
# Client 1: 4 labels of class 0; client 2: of class 1, 1 with a label, 3 without; client 3: 2 of each.
SPLIT = Split(
    (np.array([0, 1, 2, 3]), np.array([6]), np.array([], int)),
    (np.array([], int), np.array([7, 8, 9]), np.array([4, 5, 10, 11])),
)
ROWS = table(SPLIT, Y, 2)


@pytest.fixture
def draw(monkeypatch, tmp_path):
    """Draws rows, with or without class names, and returns the axes."""
    drawn = []
    honest = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (drawn.append(self), honest(self, *a, **k)))

    def drawn_axes(rows, class_names=None):
        dots.draw_split(rows, tmp_path / "dots.png", "three clients", class_names)
        return drawn[-1].axes[0]

    return drawn_axes


@pytest.fixture
def axes(draw):
    """The axes of the picture of the split above."""
    return draw(ROWS)


def areas(axes, gid):
    """Area by (client, class)."""
    (found,) = [collection for collection in axes.collections if collection.get_gid() == gid]
    places = [(int(x), int(y)) for x, y in found.get_offsets()]
    return dict(zip(places, found.get_sizes(), strict=True))


def test_areas_count_samples(axes):
    whole, labelled = areas(axes, "unlabelled"), areas(axes, "labelled")
    one = whole[1, 0] / 4
    assert whole == pytest.approx({(1, 0): 4 * one, (2, 1): 4 * one, (3, 0): 2 * one, (3, 1): 2 * one})
    assert labelled == pytest.approx({(1, 0): 4 * one, (2, 1): one})
    assert areas(axes, "outline") == pytest.approx(whole)


def test_the_largest_dot_nearly_fills_its_cell(axes):
    points = axes.get_position().width * axes.get_figure().get_figwidth() * 72
    diameter = max(areas(axes, "unlabelled").values()) ** 0.5
    assert 0.8 < diameter / (points / 3) < 1


def test_unlabelled_is_transparent_and_labelled_filled(axes):
    alphas = {c.get_gid(): set(c.get_facecolor()[:, 3]) for c in axes.collections if len(c.get_facecolor())}
    assert alphas["labelled"] == {1.0}
    assert max(alphas["unlabelled"]) < 0.4
    words = [text.get_text() for text in axes.get_legend().get_texts()]
    assert words[:2] == ["labelled", "unlabelled"]


def test_kinds_are_marked_under_the_axis(axes):
    bars = {patch.get_gid(): patch for patch in axes.patches}
    assert set(bars) == {"kind full", "kind partial", "kind unlabelled"}
    for k, kind in enumerate(("full", "partial", "unlabelled"), start=1):
        bar = bars[f"kind {kind}"]
        assert bar.get_x() < k < bar.get_x() + bar.get_width()
        assert bar.get_width() < 1
        assert bar.get_facecolor() == to_rgba(dots.COLOURS[kind])
    assert axes.get_title(loc="left") == "three clients"


def class_labels(axes):
    return [label.get_text() for label in axes.get_yticklabels()]


@pytest.mark.parametrize("names", [["a $5 cat", "a $6 dog"], ["", "W" * 24], ["0", "one"]])
def test_class_names_stand_beside_the_axes_and_inside_the_page(draw, names):
    axes = draw(ROWS, names)
    assert class_labels(axes) == names
    figure = axes.get_figure()
    assert axes.yaxis.get_tightbbox(figure.canvas.get_renderer()).x0 > 0.1 * figure.dpi


def test_a_long_class_name_is_cut(draw):
    assert class_labels(draw(ROWS, ["x" * 25, "y" * 24])) == ["x" * 23 + "…", "y" * 24]


@pytest.mark.parametrize("names", [None, ["0", "1"]])
def test_classes_without_names_keep_their_numbers(draw, names):
    axes = draw(ROWS, names)
    assert axes.get_yticks().tolist() == [0, 1]
    box = axes.get_position()
    assert box.x0 * axes.get_figure().get_figwidth() == pytest.approx(dots.LEFT)


@pytest.mark.parametrize(("clients", "classes"), [(5, 21), (200, 5)])
def test_names_that_would_crowd_are_left_out(draw, clients, classes):
    y = np.arange(2100) % classes
    made = split(y, clients=clients, labels={"partial": clients, "share": 0.3})
    shown = class_labels(draw(table(made, y, classes), [f"name {m}" for m in range(classes)]))
    assert shown
    assert not any("name" in label for label in shown)


# How eyes without one kind of cone see linear RGB (Machado and others, 2009).
BLINDNESS = {
    "red": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "green": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "none": np.eye(3),
}


@pytest.mark.parametrize("blindness", BLINDNESS)
def test_colours_stay_apart_for_colour_blind_readers(blindness):
    linear = np.array([to_rgba(colour)[:3] for colour in dots.COLOURS.values()]) ** 2.2
    seen = np.clip(linear @ np.transpose(BLINDNESS[blindness]), 0, 1) ** (1 / 2.2)
    for one, other in itertools.combinations(seen, 2):
        assert np.linalg.norm(one - other) > 0.25


@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (20, 10), (100, 10), (20, 100), (400, 5)])
def test_cells_are_square_and_pages_stay_pages(clients, classes, tmp_path):
    y = np.repeat(np.arange(classes), 2000 // classes)
    made = split(y, clients=clients, labels={"partial": clients, "share": 0.3})
    dots.draw_split(table(made, y, classes), tmp_path / "dots.png", "any")
    width, height = Image.open(tmp_path / "dots.png").size
    assert max(width, height) < 160 * 28
    figure, axes, cell = dots._canvas(clients, classes)
    box = axes.get_position()
    assert box.width * figure.get_figwidth() == pytest.approx(cell * clients)
    assert box.height * figure.get_figheight() == pytest.approx(cell * classes)
    assert cell >= 0.05


def test_ticks_thin_out():
    assert dots.ticks(1, 5, cell=0.4, apart=0.3) == [1, 2, 3, 4, 5]
    assert dots.ticks(1, 12, cell=0.1, apart=0.3) == [5, 10]
    assert dots.ticks(1, 3, cell=0.01, apart=0.3) == [1]


def test_svg_is_xml(tmp_path):
    dots.draw_split(ROWS, tmp_path / "dots.svg", "three clients")
    root = ElementTree.parse(tmp_path / "dots.svg").getroot()
    assert root.tag.endswith("svg")


def test_a_failed_picture_leaves_nothing(tmp_path, monkeypatch):
    def break_off(self, path, **settings):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", break_off)
    with pytest.raises(UserError, match=r"dots\.png cannot be written: disk full"):
        dots.draw_split(ROWS, tmp_path / "dots.png", "three clients")
    assert list(tmp_path.iterdir()) == []


def test_a_dollar_in_the_title_is_a_dollar(tmp_path):
    dots.draw_split(ROWS, tmp_path / "dots.SVG", "a$_$b.npz, $^$")
    assert "a$_$b.npz, $^$" in (tmp_path / "dots.SVG").read_text("utf-8")


def test_other_formats_and_no_clients_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"ends in \.png or \.svg, got 'dots\.pdf'"):
        dots.draw_split(ROWS, tmp_path / "dots.pdf", "three clients")
    with pytest.raises(UserError, match="at least one client"):
        dots.draw_split([], tmp_path / "dots.png", "none")
