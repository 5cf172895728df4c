"""The pictures of a run."""

import pytest
from support import bench_run

from shakespeare.lab.bench import contenders, report

plots = pytest.importorskip("shakespeare.lab.bench.plots", exc_type=ValueError)


def test_pictures(tmp_path, cli):
    report.save(bench_run(br=(16, 32), bc=(16, 32)), tmp_path / "run.json")
    cli("bench", "--load", "run.json", "--plot", "pictures")
    names = {file.name for file in (tmp_path / "pictures").iterdir()}
    expected = ("time", "tiles", "roofline", "memory")
    assert names == {f"{name}.{form}" for name in expected for form in ("svg", "png")}
    svg = (tmp_path / "pictures" / "time.svg").read_text()
    assert svg.startswith("<?xml")
    cli("bench", "--load", "run.json", "--plot", "again")
    assert (tmp_path / "again" / "time.svg").read_text() == svg


def test_pictures_show_the_runs_figures():
    figure = plots.time(bench_run())
    assert len(figure.axes) == 2  # 1 and 2 threads
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert set(lines) == {"part0", "part4", "PyTorch SDPA"}
    assert lines["part4"].get_xdata().tolist() == [64, 128]
    assert lines["part4"].get_ydata() == pytest.approx([1.0045, 2.009])
    looks = {(line.get_marker(), line.get_linestyle()) for line in lines.values()}
    assert len(looks) == 3  # the lines can be told apart without colour
    assert plots.tiles(bench_run()) is None
    names = contenders.contenders()
    assert len({tuple(plots.look(name).values()) for name in names}) == len(names)


def test_a_users_file_is_a_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def attention(q, k, v, causal, scale): ...")
    figure = plots.time(bench_run(names=("part4", "mine.py")))
    assert [line.get_label() for line in figure.axes[0].lines] == ["part4", "mine.py"]
