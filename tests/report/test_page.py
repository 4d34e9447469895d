"""Pages and figures: whole, self-contained, and safe with any name."""

from html.parser import HTMLParser
from pathlib import Path

from qat.debug import LayerSqnr, TensorStatistics
from qat.report.figures import save_png, shortened, to_svg
from qat.report.page import Section, Table, render_page, write_page
from qat.report.plots import accuracy_figure, curves_figure
from qat.report.quantization import histogram_figure, layer_figure, pareto_figure, sensitivity_figure

EVIL = "a<script>alert('x')</script>&amp;$_{\\frac$\"b\""


class Reader(HTMLParser):
    """Tags, attributes that could load something, and text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href", "data", "srcset", "style")]

    def handle_data(self, data: str) -> None:
        self.text += data


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    return reader


def tensor(name: str, channels: int = 1) -> TensorStatistics:
    return TensorStatistics(name, ("x",), channels > 1, channels, 2.0, 3.0, 2.0, 31.5, 0.01, (90, 9, 0, 1), 0.75)


def all_figures(name: str) -> list[str]:
    history = [{"epoch": e, "loss": 1.0 - 0.1 * e, "metrics": {"top1": None if e == 1 else 50.0 + e}} for e in range(3)]
    return [
        to_svg(figure)
        for figure in (
            accuracy_figure([("float", 90.0, 0.0), (name, 89.0, 0.2)], "top1"),
            curves_figure({"float": history, f"QAT {name}": history}, "top1"),
            histogram_figure([tensor(name), tensor("w", 8)]),
            layer_figure([LayerSqnr(name, 30.0, 25.0), LayerSqnr("", None, 20.0)]),
            sensitivity_figure([(name, 2.0), ("other", None)], {name}, name),
            pareto_figure(
                [(90.0, 70.0, True), (80.0, 75.0, True), (70.0, 74.0, False)], (80, 75), 76, 74.5, ("x", name)
            ),
        )
    ]


def test_names_are_escaped_and_nothing_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    figures = all_figures(EVIL)
    table = Table([EVIL], [[EVIL], ["b"]], EVIL, folded=True)
    section = Section(EVIL, [EVIL], figures, [table, Table(["c"], [["d"]], EVIL)], EVIL)
    write_page(tmp_path / "deep" / "page.html", EVIL, EVIL, [section])
    reader = read((tmp_path / "deep" / "page.html").read_text(encoding="utf-8"))
    assert not {"script", "link", "iframe", "img", "object"} & set(reader.tags)
    assert reader.tags.count("svg") == len(figures)
    assert reader.tags.count("details") == 1
    assert all("//" not in link for link in reader.links)
    assert reader.text.count(EVIL) >= 8, "the name is shown as it is"


def test_what_the_charts_show() -> None:
    histograms = to_svg(histogram_figure([tensor("features.0"), tensor("conv._weight_quantizer", 8)]))
    assert "features.0" in histograms
    assert "31.5 dB, 1 % clipped" in histograms
    assert "|w| / amax of its channel" in histograms
    assert "proposed to stay float" in to_svg(sensitivity_figure([("a", 1.0)], {"a"}, "gain"))
    assert "Pareto front" in all_figures("x")[5]


def test_the_clipping_point_is_where_amax_is() -> None:
    figure = histogram_figure([tensor("a")])
    axes = figure.axes[0]
    lines = [line.get_xdata() for line in axes.lines]
    assert [list(x) for x in lines] == [[2.0, 2.0]]
    assert axes.get_xlim()[1] >= 3.0


def test_a_png_and_long_names(tmp_path: Path) -> None:
    save_png(sensitivity_figure([("layer" * 40, 1.0)], set(), "gain"), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert shortened("x" * 50 + "end", 10) == "…xxxxxxend"
    assert len(read(render_page("t", "s", [Section("only a title")])).tags) > 5
