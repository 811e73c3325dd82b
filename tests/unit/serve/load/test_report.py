"""Reports: JSON that is read again, CSV, HdrHistogram's log, a page that needs nothing else."""

from __future__ import annotations

import csv
import io
import json
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hdrh.histogram import HdrHistogram
from hdrh.log import HistogramLogReader
from rich.console import Console

from compress.errors import ServerError
from serve.cli.main import main
from serve.load.figures.compare import compare
from serve.load.figures.server_side import Breakdown, ModelTime, ServerUse
from serve.load.report.overlay import overlaid
from serve.load.report.page import page
from serve.load.report.report import Found, LoadReport, Trial, describe_machine, read_report, write_text
from serve.load.report.terminal import csv_text, hlog_text, print_comparisons, print_report
from tests.load_servers import at_once, result_of, served

pytestmark = pytest.mark.clock

TOLD = Breakdown(
    (
        ModelTime("m", 100, 200, 0, 9.0, 0.0, 0.0, 0.0, 0.0),
        ModelTime("m_network", 100, 200, 40, 8.0, 3.0, 0.5, 4.0, 0.5, {4: 20, 6: 20}),
    ),
    10.0,
)
TRIALS = (
    Trial(100.0, True, (), "peak", 3.0, 100.0, 9.0),
    Trial(70.0, True, (), "bracket", 3.0, 70.0, 9.0),
    Trial(91.0, False, ("p99<20ms: 30 ms",), "bracket", 1.0, 80.0, 30.0),
    Trial(70.0, True, (), "confirm", 3.0, 70.0, 9.0),
)


def rich_report() -> LoadReport:
    seconds = [np.random.default_rng(number).lognormal(2, 0.5, 300) for number in range(8)]
    open_run = result_of(
        seconds, rate=300.0, concurrency=0, arrivals="poisson", breakdown=TOLD, server=ServerUse(1.5, 10**8, 3), errors=7,
        accuracy=0.9, labelled=100, invalid=("the generator <itself> was late",), started=1.7e9,
    )  # fmt: skip
    found = Found(70.0, 91.0, 100.0, 3, 0.004, 0.006, 0.01, "kept up to 70/s", TRIALS)
    return LoadReport((open_run,), "m & n at home", "server", "p99<20ms,errors<0.1%", (("errors<0.1%: 0.3%",),), found,
                      "kept up to 70/s", 2.5, describe_machine())  # fmt: skip


def sweep() -> LoadReport:
    runs = tuple(
        result_of([np.random.default_rng(c).lognormal(1 + c / 8, 0.3, 100 * c)] * 6, concurrency=c)
        for c in (1, 2, 4, 8)
    )
    return LoadReport(runs, "sweep", objective="p99<20ms,errors<0.1%", broken=((), (), (), ("p99<20ms: 30 ms",)))


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    for number, report in enumerate((rich_report(), sweep())):
        path = tmp_path / f"{number}.json"
        write_text(path, json.dumps(report.to_dict()))
        assert read_report(path) == report
    data = rich_report().to_dict()
    assert data["cost_of_a_million"] == [pytest.approx(2.5 / 3600 / 300 * 1e6)]
    assert data["machine"]["cores"] > 0


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"kind": "serve load", "schema_version": 1}', '{"kind": "serve load"}']
)
def test_what_is_no_report(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ServerError, match="can't read"):
        read_report(tmp_path / "x.json")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="can't write"):
        write_text(tmp_path / "none" / "x.json", "new")


def test_the_table_of_seconds() -> None:
    rows = list(csv.DictReader(io.StringIO(csv_text(sweep()))))
    assert len(rows) == 4 * 6
    assert [int(row["successes"]) for row in rows if row["run"] == "3"] == [800] * 6
    assert rows[0]["load"] == "1 at a time"


@pytest.mark.parametrize("report", [rich_report(), sweep()])
def test_hdr_histograms_own_tools_read_the_log(report: LoadReport, tmp_path: Path) -> None:
    path = tmp_path / "load.hlog"
    path.write_text(hlog_text(report))
    whole = HdrHistogram(1, 2**42, 3)
    reader = HistogramLogReader(str(path), whole)
    count = 0
    while (histogram := reader.get_next_interval_histogram()) is not None:
        count += histogram.get_total_count()
    reader.close()
    assert count == sum(run.count for run in report.runs)


class Page(HTMLParser):
    """Collects what a page refers to, and that its tags close."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.figures = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br", "path", "use", "rect", "line", "image"):
            self.open.append(tag)
        self.figures += tag == "svg"
        self.references += [
            value or "" for name, value in attrs if name in ("src", "href") and not (value or "").startswith("#")
        ]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def read(text: str) -> Page:
    found = Page()
    found.feed(text)
    assert not found.open
    return found


def test_the_page_needs_nothing_else_and_shows_every_plot() -> None:
    text = page(rich_report())
    found = read(text)
    assert found.references == []
    assert found.figures == 5  # percentiles, search, breakdown, batches, seconds
    for words in (
        "m &amp; n at home",
        "&lt;itself&gt;",
        "kept up to 70/s",
        "m_network",
        "timeout",
        "seed",
        "a million",
    ):
        assert words in text
    assert read(page(sweep())).figures == 6  # percentiles, the sweep, and each run's seconds
    assert "not kept: p99" in page(sweep())


def test_reports_laid_over_each_other_keep_their_names() -> None:
    both = overlaid([("before", sweep()), ("after", sweep())])
    text = page(both, names=["before", "after"])
    assert read(text).figures > 5
    assert "before, 8 at a time" in text
    assert "after, 8 at a time" in text


def test_a_comparison_has_its_page() -> None:
    before, after = LoadReport((sweep().runs[0],), "a"), LoadReport((sweep().runs[0],), "b")
    comparisons = compare(before, after, allowed=0.05)
    text = page(overlaid([("a", before), ("b", after)]), names=["a", "b"], comparisons=comparisons)
    assert "After over before" in text
    assert "no worse" in text


def test_the_tables_in_the_terminal() -> None:
    text = io.StringIO()
    console = Console(file=text, width=140)
    print_report(rich_report(), console)
    print_report(sweep(), console)
    print_comparisons(compare(sweep(), sweep(), allowed=0.05), 0.05, console)
    for words in ("invalid", "m_network", "5.00", "8 at a time", "p99<20ms: 30 ms", "after/before", "accuracy"):
        assert words in text.getvalue()


def command(*words: str | Path) -> int:
    """The exit code."""
    with pytest.raises(SystemExit) as ended:
        main([*map(str, words)])
    return int(ended.value.code or 0)


def test_the_command_writes_what_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / f"load.{ending}" for ending in ("json", "html", "csv", "hlog")]
    with served(at_once) as server:
        words = ["load", server.url, "--model", "m", "--duration", "0.5", "--warmup", "0.1", "--processes", "0"]
        words += ["--max-lateness-ms", "100000"]  # a busy machine is no matter here
        assert command(*words, "--rate", "100", "--output", *files) == 0
        assert command(*words, "--rate", "50,100", "--slo", "p50<0.001us") == 3
    assert all(path.stat().st_size > 100 for path in files)
    assert "throughput" in capsys.readouterr().out
    assert command("load", "report", files[0], "--output", tmp_path / "again.html") == 0
    assert command("load", "report", files[0], files[0], "--output", tmp_path / "both.html") == 0
    assert (tmp_path / "again.html").is_file()
    assert (tmp_path / "both.html").is_file()


@pytest.mark.parametrize(
    ("more", "code"),
    [
        (["--rate", "200"], 4),
        (["--rate", "200", "--slo", "p50<0.001us"], 4),
        (["--rate", "200", "--max-lateness-ms", "100000"], 0),
    ],
)
def test_a_run_that_is_invalid_says_why_and_does_not_end_well(
    more: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(at_once) as server:
        words = ["load", server.url, "--model", "m", "--duration", "0.5", "--warmup", "0", "--processes", "0"]
        late = [] if "--max-lateness-ms" in more else ["--max-lateness-ms", "0.000001"]
        assert command(*words, *more, *late) == code
    told = capsys.readouterr().out
    assert ("invalid: this run: the generator itself was late" in " ".join(told.split())) == (code == 4)


def test_the_exit_code_tells_a_ci_what_became_slower(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "before.json", tmp_path / "after.json", tmp_path / "short.json"]
    generator = np.random.default_rng(0)
    for path, scale, seconds in zip(files, (1.0, 1.5, 1.0), (10, 10, 2), strict=True):
        run = result_of([scale * generator.lognormal(2, 0.2, 300) for _ in range(seconds)])
        write_text(path, json.dumps(LoadReport((run,), "m").to_dict()))
    assert command("load", "compare", files[0], files[1], "--output", tmp_path / "page.html") == 1
    assert "worse (by more than 5%)" in capsys.readouterr().out
    assert command("load", "compare", files[0], files[1], "--max-regression", "80%") == 0
    assert command("load", "compare", files[0], files[2]) == 0
    assert "undecided" in capsys.readouterr().out
    assert command("load", "compare", files[0], files[2], "--strict") == 1
    assert "After over before" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["load", "http://127.0.0.1:1", "--model", "m", "--output", "x.pdf"], "no kind of file"),
        (["load", "http://127.0.0.1:1", "--model", "m", "--output", "/no/where/x.json"], "no such folder"),
        (["load", "compare", "only-one.json"], "two results"),
        (["load", "compare", "--ab", "http://127.0.0.1:1"], "two URLs"),
        (["load", "compare", "a", "b", "--max-regression", "much"], "no share"),
        (["load", "report", "/no/where.json"], "can't read"),
    ],
)
def test_mistakes_end_with_three_lines(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert says in error
    assert len(error.strip().splitlines()) == 3
