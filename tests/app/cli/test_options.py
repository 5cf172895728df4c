"""The lists of numbers that options take, and what a dry run of bench prints."""

from shakespeare.app.cli.options import Numbers, TileSize


def test_a_dry_run_prints_the_plan_alone(cli):
    asked = "part0,part4,sdpa -N 256:4096*2 -d 32,64 -br 32,64,128 -bc 64,256 -t 1,2 --dry-run"
    done = cli("bench", *asked.split())
    assert done.stdout.startswith("160 cells, 10 rounds each\n") and done.stdout.count("\n") == 161
    assert "part4, SIMD auto, N 256, queries 256, d 32, batch 1" in done.stdout
    assert "Br 128, Bc 256" in done.stdout and "sdpa, N 256" in done.stdout


def test_contenders_decide_what_goes_together(cli):
    done = cli("bench", "sdpa,part0", "--backward", "--dtype", "bf16", "--dry-run")
    assert done.stdout.startswith("2 cells")


def test_ranges():
    for text, numbers in (
        ("256:4096*2", (256, 512, 1024, 2048, 4096)),
        ("1:9+3,5", (1, 4, 7, 5)),
        ("2:4,auto", (2, 3, 4, None)),
        ("100:150*2", (100,)),
    ):
        assert Numbers(auto=True).convert(text, None, None) == numbers
    assert [TileSize().convert(text, None, None) for text in ("auto", "AUTO", "64")] == [None, None, 64]
