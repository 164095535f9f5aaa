"""The report in Markdown, CSV and LaTeX, and the generated tables in the documents of this repository."""

import csv
import io
import itertools
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import ledgers
import pytest
from small import call

from fedhassle.reproduce.experiment import Selection, experiments, read_experiment, select
from fedhassle.reproduce.ledger import Ledger
from fedhassle.reproduce.report import content, latex, markdown
from fedhassle.reproduce.report.csv import COLUMNS, csv_text
from fedhassle.reproduce.report.html import page
from fedhassle.reproduce.report.wording import ONE_SEED, command

ROOT = Path(__file__).parents[2]


def made(folder, *names, **selection):
    chosen = {name: read_experiment(name) for name in names or experiments()}
    return content.report(chosen, select(list(chosen.values()), Selection(**selection)), Ledger(folder))


@pytest.fixture(scope="module")
def ledger(tmp_path_factory):
    """Of the ablation a whole cell, a partial, a missing one and one of other rounds; and a broken file."""
    folder = tmp_path_factory.mktemp("ledger")
    its = {cell.key: cell for cell in select([read_experiment("ablation")], Selection())["ablation"]}
    for seed in range(3):
        ledgers.put(folder, ledgers.summary(its[f"gra-mpa-{seed}"], ledgers.hassle(0.70 + 0.01 * seed)))
    ledgers.put(folder, ledgers.summary(its["no-gra-mpa-1"], ledgers.hassle(0.654321)))
    ledgers.put(folder, ledgers.summary(its["gra-no-mpa-0"], ledgers.hassle(0.9), rounds=7))
    (folder / "broken.json").write_text("{")
    return folder


# Documents


@pytest.mark.parametrize(("page", "block"), [("results", "table1"), ("privacy", "privacy")])
def test_pages_show_the_results_as_they_stand(page, block):
    """If this fails after new results, run: fedhassle report -o docs/results.md -o docs/privacy.md."""
    text = (ROOT / f"docs/{page}.md").read_text("utf-8")
    assert f"<!-- {block} -->" in text and markdown.updated(text, made(ROOT / "results")) == text


def test_every_link_of_the_results_leads_somewhere():
    links = re.findall(r"\]\(([^)#]+)", (ROOT / "docs/results.md").read_text("utf-8"))
    assert links and [link for link in links if not (ROOT / "docs" / link).exists()] == []


# Markdown


def rows(text):
    """The rows of the tables in a text of Markdown."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_a_table_in_markdown(ledger):
    (section,) = made(ledger, "ablation").sections
    text = markdown.block(section)
    assert rows(text) == [
        ["GRA", "MPA", "SM", "UM", "EM"],
        ["---", "---", "--:", "--:", "--:"],
        ["✗", "✗", "— (57.85)", "— (61.07)", "— (61.86)"],
        [
            *("✗", "✓", "63.43 <sub>1 of 3 seeds</sub> (65.04)"),
            *("64.43 <sub>1 of 3 seeds</sub> (65.98)", "65.43 <sub>1 of 3 seeds</sub> (66.47)"),
        ],
        [
            *("✓", "✗", "88.00 <sub>7 rounds instead of 200, 1 of 3 seeds</sub> (62.11)"),
            "89.00 <sub>7 rounds instead of 200, 1 of 3 seeds</sub> (64.09)",
            "90.00 <sub>7 rounds instead of 200, 1 of 3 seeds</sub> (64.54)",
        ],
        [
            *("✓", "✓", "69.00 ± 1.00 (66.34)", "70.00 ± 1.00 (67.14)"),
            "71.00 ± 1.00 (67.79)",  # no best, as long as others have not run
        ],
    ]
    assert "4 of 12 runs are done." in text and "`fedhassle reproduce ablation`" in text


BOLD = "Bold: the best of a column in which everything has run"


def test_every_format_says_what_bold_is_and_on_which_seeds(ledger):
    """Of two cells, with seed 1 in common; and of none."""
    (section,) = made(ledger, "ablation", only=("gra-mpa", "no-gra-mpa")).sections
    text, table = markdown.block(section), latex.table(section)
    assert "**71.00** ± 1.00 <sub>best on seed 1</sub> (67.79)" in text
    assert f"{BOLD}, on the seeds that all have in common." in text and BOLD in table
    assert r"\textbf{71.00} $\pm$ 1.00 \\" in table and "(67.79, +3.21)" in table
    (alone,) = made(ledger, "ablation").sections
    assert "Bold" not in markdown.block(alone) + latex.table(alone)


def test_results_of_a_single_seed_name_it(ledger):
    (section,) = made(ledger, "communication").sections
    assert "| HASSLE | 70.00 <sub>seed 0</sub> | 1.000 |" in markdown.block(section)
    assert "from seed 0." in latex.table(section)
    (section,) = made(ledger, "ablation").sections
    assert "from seed 0" not in latex.table(section)


def test_the_warning_about_one_seed_occurs_once_and_only_if_needed(ledger, tmp_path):
    """GRA on seed 1 alone; then on the three seeds of both; bytes do not differ from run to run."""
    its = {cell.key: cell for cell in select([read_experiment("ablation")], Selection())["ablation"]}
    its |= {
        cell.key: cell for cell in select([read_experiment("communication")], Selection())["communication"]
    }
    assert "differ by about 2 points" in ONE_SEED
    for write in (markdown.markdown, page):
        assert write(made(ledger, "ablation")).count(ONE_SEED) == 1
    assert markdown.blocks(made(ledger))[markdown.FINDINGS].endswith(f"|\n\n{ONE_SEED}")
    for seed, name in itertools.product(range(3), ("gra-mpa", "no-gra-mpa")):
        ledgers.put(tmp_path, ledgers.summary(its[f"{name}-{seed}"], ledgers.hassle(0.6 + 0.01 * seed)))
    for key in ("fedavg-0", "rscfed-0"):
        ledgers.put(tmp_path, ledgers.summary(its[key], {"model": 0.5}))
    for write in (markdown.markdown, page):
        text = write(made(tmp_path, "ablation", "communication"))
        assert ONE_SEED not in text and "the spread over seeds is unknown" in text


def test_the_whole_report_in_markdown(ledger):
    text = markdown.markdown(made(ledger))
    assert text.startswith(markdown.OWN) and "broken.json" in text
    titles = [read_experiment(name).title for name in experiments()]
    assert all(f"\n## {markdown.escaped(title)}" in text for title in titles)
    widths = [len(row) for row in rows(text)]
    assert set(widths) <= {2, 3, 4, 5, 6, 7, 8, 10, 13}  # no row is broken by what stands in it


@pytest.mark.parametrize("nasty", ["a|b", "*a*", "_a_", "`a`", "<b>", "[a](b)", "a\nb", "\\", "# a"])
def test_markdown_shows_any_text(nasty):
    text = markdown.escaped(nasty)
    assert "\n" not in text and not re.search(r"(?<!\\)(\\\\)*[|*_`<\[]", text)


def test_only_the_marked_blocks_of_another_document_are_updated(ledger, tmp_path):
    mine = "# Mine\n\n<!-- ablation -->\nold\n<!-- /ablation -->\n\nmy <!-- table1 --> words\n"
    path = tmp_path / "mine.md"
    path.write_text(mine)
    words = ("report", "ablation", "--results", ledger, "-o", path)
    assert call(*words)[0] == 0
    text = path.read_text("utf-8")
    assert text.startswith("# Mine\n\n<!-- ablation -->\n\n| GRA") and "old" not in text
    assert text.endswith("<!-- /ablation -->\n\nmy <!-- table1 --> words\n")
    assert call(*words)[0] == 0 and path.read_text("utf-8") == text


def test_findings_are_those_of_the_whole_paper(ledger):
    """A report on a part leaves them as they are."""
    text = "<!-- table1 -->\nold\n<!-- /table1 -->\n<!-- findings -->\nold\n<!-- /findings -->\n"
    assert "\nold\n" not in markdown.updated(text, made(ledger))
    part = markdown.updated(text, made(ledger, "table1"))
    assert part.endswith("<!-- findings -->\nold\n<!-- /findings -->\n") and "FedAvg" in part


NARROWED = [
    ("--only", "gra-mpa"),
    ("--methods", "hassle"),
    ("--seeds", 1),
    ("--rounds", 7),
    ("method.epochs=1",),
]


@pytest.mark.parametrize("words", NARROWED, ids=lambda words: words[0])
def test_a_part_or_other_settings_never_replace_a_whole_table(words, ledger, tmp_path):
    """Neither alone, where nothing is written, nor beside a table that is whole."""
    mine = tmp_path / "mine.md"
    table = "<!-- ablation -->\nwhole\n<!-- /ablation -->\n"
    mine.write_text(table)
    code, _, err = call("report", "ablation", *words, "--results", ledger, "-o", mine)
    assert code == 2 and "ablation" in err and "nothing was written" in err
    assert mine.read_text() == table


def test_blocks_that_are_not_updated_are_named(ledger, tmp_path):
    mine = tmp_path / "mine.md"
    blocks = [f"<!-- {name} -->\nold\n<!-- /{name} -->\n" for name in ("ablation", "gamma", "findings")]
    mine.write_text("".join(blocks))
    words = ("ablation", "gamma", "--only", "gra-mpa,0,0.0001,0.001,0.01,0.1", "--results", ledger)
    assert call("report", *words, "-o", mine)[0] == 2
    code, out, _ = call("report", "ablation", "--results", ledger, "-o", mine)
    assert code == 0 and f"report   {mine}\nkept     findings: " in out
    text = mine.read_text("utf-8")
    assert text.count("\nold\n") == 2 and text.startswith("<!-- ablation -->\n\n| GRA")


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["LF", "CRLF"])
def test_a_text_keeps_its_line_ends(end, ledger, tmp_path):
    mine = tmp_path / "mine.md"
    lines = ["# Mine", "<!-- ablation -->", "old", "<!-- /ablation -->", ""]
    mine.write_bytes(end.join(lines).encode())
    assert call("report", "ablation", "--results", ledger, "-o", mine)[0] == 0
    text = mine.read_bytes().decode()
    assert (
        "old" not in text
        and "| GRA |" in text
        and text.startswith(f"# Mine{end}<!-- ablation -->{end}{end}|")
    )
    assert text.count("\n") == text.count(end) > 10 and text.count("\r") == (
        0 if end == "\n" else text.count(end)
    )
    assert call("report", "ablation", "--results", ledger, "-o", mine)[0] == 0
    assert mine.read_bytes().decode() == text


def test_a_document_without_marks_is_left_alone(ledger, tmp_path):
    path = tmp_path / "mine.md"
    path.write_text("# Mine\n")
    code, _, err = call("report", "ablation", "--results", ledger, "-o", path)
    assert code == 2 and "nothing was written" in err and "<!-- NAME -->" in err
    assert path.read_text() == "# Mine\n"


def test_a_report_in_markdown_is_overwritten(ledger, tmp_path):
    for names in (("ablation",), ("gamma",)):
        assert call("report", *names, "--results", ledger, "-o", tmp_path / "r.md")[0] == 0
    assert "γ" in (tmp_path / "r.md").read_text("utf-8") and "GRA" not in (tmp_path / "r.md").read_text(
        "utf-8"
    )


# CSV


def test_csv_holds_every_value_in_full(ledger):
    report = made(ledger, "ablation")
    lines = list(csv.DictReader(io.StringIO(csv_text(report))))
    assert tuple(lines[0]) == COLUMNS and len(lines) == 12
    found = {(line["cell"], line["metric"]): line for line in lines}
    for result in report.sections[0].results:
        for measurement in result.measurements:
            line = found[result.name, measurement.metric]
            assert line["status"] == result.status and int(line["seeds"]) == len(result.runs)
            assert float(line["paper"]) == pytest.approx(100 * measurement.paper)
            if measurement.ours is None:
                assert line["mean"] == line["std"] == line["difference"] == line["rounds"] == ""
            else:
                assert float(line["mean"]) == pytest.approx(100 * measurement.ours.mean, rel=1e-14)
    whole = found["gra-mpa", "accuracy.EM"]
    assert float(whole["mean"]) == pytest.approx(71) and float(whole["std"]) == pytest.approx(1)
    assert float(whole["difference"]) == pytest.approx(71 - 67.79) and whole["unit"] == "%"
    assert whole["choices"] == "gra=gra mpa=mpa" and whole["rounds"] == whole["rounds_wanted"] == "200"
    other = found["gra-no-mpa", "accuracy.EM"]
    assert (other["status"], other["rounds"], other["difference"]) == ("other rounds", "7", "")
    assert other["command"] == "fedhassle reproduce ablation --only gra-no-mpa --rounds 7"


def test_csv_has_no_noise_in_the_last_bits(tmp_path):
    """100 · (0.0615 + 0.1700 + 0.4630) / 3 is 23.150000000000002 in binary."""
    for seed, score in enumerate((0.0615, 0.1700, 0.4630)):
        cell = select([read_experiment("ablation")], Selection(only=(f"gra-mpa-{seed}",)))["ablation"][0]
        ledgers.put(tmp_path, ledgers.summary(cell, ledgers.hassle(score)))
    text = csv_text(made(tmp_path, "ablation", only=("gra-mpa",)))
    (line,) = [row for row in csv.DictReader(io.StringIO(text)) if row["metric"] == "accuracy.EM"]
    assert (line["mean"], line["difference"]) == ("23.15", "-44.64")
    assert max(len(word.partition(".")[2]) for word in (line["mean"], line["std"], line["paper"])) <= 10


def test_csv_has_bytes_in_megabytes(tmp_path):
    (cell,) = select([read_experiment("communication")], Selection(only=("hassle",)))["communication"]
    ledgers.put(tmp_path, ledgers.summary(cell, ledgers.hassle(0.5)))
    lines = csv.DictReader(io.StringIO(csv_text(made(tmp_path, "communication", only=("hassle",)))))
    assert [(line["metric"], float(line["mean"]), line["unit"]) for line in lines] == [
        ("accuracy", 50.0, "%")
    ] + [
        (f"bytes_{way}.{kind}", number, "MB")
        for way in ("up", "down")
        for kind, number in (("full", 1.0), ("partial", 2.0), ("unlabelled", 3.0))
    ]


# LaTeX


def test_a_table_in_latex(ledger):
    (section,) = made(ledger, "ablation").sections
    lines = latex.table(section).splitlines()
    assert r"\begin{tabular}{llrrr}" in lines and r"GRA & MPA & SM & UM & EM \\" in lines
    whole = " & ".join(rf"{value}.00 $\pm$ 1.00" for value in (69, 70, 71))
    place = lines.index(rf"$\surd$ & $\surd$ & {whole} \\")
    small = r"\scriptsize"
    assert lines[place + 1] == (
        rf" &  & {small}(66.34, +2.66) & {small}(67.14, +2.86) & {small}(67.79, +3.21) \\"
    )
    place = lines.index(r"$\surd$ & $\times$ & 88.00* & 89.00* & 90.00* \\")
    assert lines[place + 1].endswith(rf"{small}(64.54) \\")  # not compared, but marked
    assert any(line.endswith(rf"{small}(66.47, $-$1.04) \\") for line in lines)


def test_every_row_in_latex_has_every_column(ledger):
    text = latex.latex(made(ledger))
    for table in text.split(r"\begin{tabular}")[1:]:
        columns = len(re.match(r"\{(l*r*)\}", table)[1])
        body = [line for line in table.splitlines() if line.endswith(r"\\")]
        for line in body:
            cells = re.split(r"(?<!\\)&", line)
            spans = [int(n) - 1 for n in re.findall(r"\\multicolumn\{(\d+)\}", line)]
            assert len(cells) + sum(spans) == columns, line
    floats = re.findall(r"\\begin\{(table\*?)\}.*?\\end\{(table\*?)\}", text, re.DOTALL)
    assert len(floats) == len(experiments()) and all(begun == ended for begun, ended in floats)


def test_no_table_in_latex_is_wider_than_the_text(ledger):
    """Each shrinks to the line if it has to; one that would shrink much takes both columns of a page."""
    tables = latex.latex(made(ledger)).split(r"\begin{table")[1:]
    fitting = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%" + "\n" + r"\begin{tabular}"
    for table in tables:
        columns = len(re.search(r"\\begin\{tabular\}\{(l*r*)\}", table)[1])
        assert fitting in table and r"\end{tabular}}" in table
        assert table.startswith("*}") == (columns >= 6)
        for line in table.splitlines():  # our figure and the paper's are not in one line
            assert not ("scriptsize" in line and re.search(r"\d\.\d\d(\}| \$\\pm|\*| &)", line.split("(")[0]))


@pytest.mark.parametrize(
    ("heading", "shown"),
    [
        ("MB up, full", "MB up, full"),
        ("MB down, unlabelled", r"\shortstack[r]{MB down,\\{}unlabelled}"),
        ("unlabelled clients = 5", r"\shortstack[r]{unlabelled clients\\{}= 5}"),
        ("an option, [x] of a line", r"\shortstack[r]{an option,\\{}[x] of a line}"),
        ("a word too long_for it", r"a word too long\_for it"),
    ],
)
def test_long_headings_in_latex_have_two_lines(heading, shown):
    assert latex.stacked(heading) == shown


NASTY = r"50 % of $5 & #1_a^b~{c}\end <d> | “é” ✓ λ 漢" + "\0[x]*"


def test_latex_shows_any_text():
    shown = latex.escaped(NASTY)
    assert shown == (
        r"50 \% of \$5 \& \#1\_a\textasciicircum{}b\textasciitilde{}\{c\}\textbackslash{}end $<$d$>$ $|$ "
        r"?é? $\surd$ $\lambda$ ??[x]*"
    )
    assert latex.ended([latex.escaped("[x]"), "1"]) == r"{}[x] & 1 \\"


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex on this machine")
def test_latex_compiles(ledger, tmp_path):
    body = latex.latex(made(ledger))
    begin = r"\documentclass{article}\usepackage{booktabs,graphicx}\begin{document}"
    text = begin + body + latex.escaped(NASTY)
    (tmp_path / "r.tex").write_text(text + r"\end{document}", "utf-8")
    command = ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "r.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    said = done.stdout.decode(errors="replace")
    assert done.returncode == 0 and "Overfull" not in said, said[-2000:]


# The command


def test_the_command_writes_what_the_suffix_says(ledger, tmp_path):
    files = [tmp_path / f"deep/r.{suffix}" for suffix in ("html", "md", "csv", "tex")]
    flags = [word for file in files for word in ("-o", file)]
    code, out, err = call("report", "ablation", "--results", ledger, *flags)
    assert (code, err) == (0, "")
    assert "4 of 12 runs are done" in out and "skipped" in out and out.count("report   ") == 4
    starts = [file.read_text("utf-8").partition("\n")[0] for file in files]
    assert starts[:2] == ["<!DOCTYPE html>", markdown.OWN] and starts[2].startswith("experiment,source")
    assert starts[3].startswith("% Made by")


def test_the_default_output_is_report_html(ledger, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call("report", "gamma", "--results", ledger)[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_report_selects_cells_like_reproduce(ledger, tmp_path):
    words = ("--only", "gra-no-mpa", "--rounds", "7", "--seeds", "1", "-o", tmp_path / "r.csv")
    assert call("report", "ablation", "--results", ledger, *words)[0] == 0
    lines = list(csv.DictReader((tmp_path / "r.csv").open(encoding="utf-8")))
    assert {line["cell"] for line in lines} == {"gra-no-mpa"}
    assert {line["status"] for line in lines} == {"done"} and {line["rounds"] for line in lines} == {"7"}
    assert lines[0]["command"] == "fedhassle reproduce ablation --only gra-no-mpa --seeds 1 rounds=7"


def test_a_missing_ledger_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mine = "<!-- ablation -->\nkept\n<!-- /ablation -->\n"
    (tmp_path / "mine.md").write_text(mine)
    code, _, err = call("report", "ablation", "--results", "typo", "-o", "mine.md")
    assert code == 2 and "there is no ledger at typo" in err and "--results" in err
    assert (tmp_path / "mine.md").read_text() == mine


def test_a_folder_of_a_run_gets_the_commands_for_runs(tmp_path):
    code, _, err = call("report", tmp_path)
    assert code == 2 and f"federation report {tmp_path}" in err and "fedhassle compare" in err


# The commands that it names


def made_by(line):
    """The keys of the cells that a command line makes."""
    program, command, name, *words = shlex.split(line)
    assert (program, command) == ("fedhassle", "reproduce")
    given = {key.removeprefix("--"): value for key, value in zip(words[::2], words[1::2], strict=True)}
    selection = Selection(
        *(tuple(filter(None, given.get(key, "").split(","))) for key in ("only", "methods")),
        int(given["seeds"]) if "seeds" in given else None,
    )
    return {cell.key for cell in select([read_experiment(name)], selection)[name]}


@pytest.mark.parametrize(
    ("names", "selection"),
    [
        (["table1"], {"only": ("fmnist-10%",), "methods": ("hassle", "fedavg"), "seeds": 1}),
        (["table1"], {"only": ("cifar10-10%-sage-1",)}),
        (["table1"], {"only": ("fmnist-fedavg",), "seeds": 5}),
        (["table1", "ablation"], {"only": ("cifar10-10%", "gra-mpa"), "methods": ("hassle", "sage")}),
        (["ratio"], {}),  # whose choices 0, 1 and 2 look like seeds
        (["ratio"], {"only": ("0-1", "4"), "seeds": 2}),
        (["communication"], {"seeds": 1}),
    ],
)
def test_the_command_of_a_result_makes_exactly_its_cells(names, selection, tmp_path):
    chosen = {name: read_experiment(name) for name in names}
    wanted = select(list(chosen.values()), Selection(**selection))
    report = content.report(chosen, wanted, Ledger(tmp_path), Selection(**selection))
    assert len(report.sections) == len(names)
    for section in report.sections:
        its = wanted[section.experiment.name]
        assert made_by(command(section)) == {cell.key for cell in its}
        for result in section.results:
            expected = {cell.key for cell in its if cell.name == result.name}
            assert made_by(command(section, result)) == expected


# Other settings than the paper's


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """A ledger of the whole ablation with one epoch, as if it confirmed every claim; and all its texts."""
    folder = tmp_path_factory.mktemp("changed")
    selection = Selection(changes=("method.epochs=1",))
    scores = {"no-gra-no-mpa": 0.6, "no-gra-mpa": 0.65, "gra-no-mpa": 0.66, "gra-mpa": 0.7}
    for cell in select([read_experiment("ablation")], selection)["ablation"]:
        ledgers.put(folder, ledgers.summary(cell, ledgers.hassle(scores[cell.name])))
    files = [folder / f"r.{suffix}" for suffix in ("html", "md", "csv", "tex")]
    flags = [word for file in files for word in ("-o", file)]
    words = ("ablation", "method.epochs=1", "threads=1", "--results", folder)
    code, out, err = call("report", *words, *flags)
    assert (code, err) == (0, "") and "12 of 12 runs are done" in out
    return folder, {file.suffix[1:]: file.read_text("utf-8") for file in files}


@pytest.mark.parametrize("suffix", ["html", "md", "tex"])
def test_runs_with_changed_settings_are_not_compared_with_the_paper(suffix, changed):
    text = changed[1][suffix].replace(r"\_", "_")
    assert "Changed settings: method.epochs=1." in text
    assert "70.00" in text and "67.79" not in text  # EM of ours and of the paper
    assert "confirmed" not in text and "claims hold" not in text


def test_csv_has_the_changed_settings_in_a_column(changed):
    lines = list(csv.DictReader(io.StringIO(changed[1]["csv"])))
    assert {line["changes"] for line in lines} == {"method.epochs=1"}
    assert {line["paper"] + line["difference"] for line in lines} == {""}
    assert all(line["command"].endswith(" method.epochs=1 threads=1") for line in lines)


def test_the_terminal_names_changed_settings_too(changed):
    code, out, _ = call("reproduce", "ablation", "method.epochs=1", "--results", changed[0])
    assert code == 0 and "67.79" not in out
    assert "Changed settings: method.epochs=1." in out


@pytest.mark.parametrize("words", [["threads=1", "device=cpu"], ["--rounds", "200"]])
def test_settings_that_make_the_same_runs_change_nothing(words, ledger, tmp_path):
    assert call("report", "ablation", *words, "--results", ledger, "-o", tmp_path / "r.md")[0] == 0
    text = (tmp_path / "r.md").read_text("utf-8")
    assert "Changed" not in text and "(67.79)" in text and "so far" in text


def test_a_file_with_the_name_of_a_shipped_experiment_is_not_taken_for_it(ledger, tmp_path):
    shipped = ROOT / "fedhassle/reproduce/experiments/ablation.toml"
    (tmp_path / "ablation.toml").write_text(shipped.read_text("utf-8") + "\n", "utf-8")
    same = made(ledger, str(tmp_path / "ablation.toml")).sections[0]
    text = shipped.read_text("utf-8").replace('data = "cifar10"', 'data = "fmnist"')
    (tmp_path / "ablation.toml").write_text(text, "utf-8")
    other = made(ledger, str(tmp_path / "ablation.toml")).sections[0]
    assert same.paper is not None and other.paper is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-o", "report.pdf"], "a report ends in one of .html, .md, .csv, .tex, got 'report.pdf'"),
        (["nosuch"], "unknown experiment 'nosuch'"),
        (["ablation", "--only", "gre"], "--only 'gre' matches no cell"),
        (["ablation", "method.gama=1"], "unknown setting|gama"),
        (["ablation", "-o", "missing.html/r.csv"], "cannot be written"),
    ],
)
def test_mistakes_are_one_line_errors(words, message, ledger, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "missing.html").write_text("a file, no folder")
    code, _, err = call("report", *words, "--results", ledger)
    assert code == 2 and re.search(message.replace(".", r"\."), err) and "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["missing.html"]
