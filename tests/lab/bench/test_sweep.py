"""gpt.py bench in the terminal: its arguments, the plan and the progress bar."""

from shakespeare.app.cli.options import Numbers


def test_a_dry_run_prints_the_plan_alone(cli):
    asked = "part0,part4,sdpa -N 256:4096*2 -d 32,64 -br 32,64,128 -bc 64,256 -t 1,2 --dry-run"
    done = cli("bench", *asked.split())
    assert done.stdout.startswith("160 cells, 10 rounds each\n") and done.stdout.count("\n") == 161
    assert "part4, SIMD auto, N 256, queries 256, d 32, batch 1" in done.stdout
    assert "Br 128, Bc 256" in done.stdout and "sdpa, N 256" in done.stdout


def test_wrong_arguments(failed):
    for arguments, message in (
        (["-N", "0"], "'0' must be a number of at least 1"),
        (["-N", "1:5000"], "more than 1000 numbers"),
        (["-br", "x"], "a range like 256:4096*2 or 1:9+2 or auto"),
        (["--mask", "both"], "'--mask': 'both' must be one of none, causal"),
        (["--rules", "window"], "rule is 'window'; it must be none, window=KEYS, softcap=BOUND"),
        (["--rules", "alibi", "--queries", "1"], "rule is 'alibi'; it must be none but on the CPU in fp32"),
        (["--show"], "--show goes with --tune only"),
        (["part1,sdpa", "-br", "64"], "-br and -bc go with part4 only"),
        (["sdpa", "--dry-run", "--save", "x.json"], "--save does not go with --dry-run"),
        (["--fail-on-regression"], "--fail-on-regression goes with --compare only"),
        (["--tune", "part4"], "CONTENDERS does not go with --tune"),
        (["--device", "cuda", "-br", "64"], "-br does not go with --device cuda"),
        (["--device", "cuda", "--threads", "2"], "-t does not go with --device cuda"),
        (["--device", "cuda", "--tune"], "--tune does not go with --device cuda"),
        (["--device", "cuda", "--load", __file__], "--device does not go with --load"),
        (["--save", "part0,sdpa"], "--save is 'part0,sdpa'; it must be a file; CONTENDERS come before"),
    ):
        assert message in failed("bench", *arguments)


def test_ranges():
    for text, numbers in (
        ("256:4096*2", (256, 512, 1024, 2048, 4096)),
        ("1:9+3,5", (1, 4, 7, 5)),
        ("2:4,auto", (2, 3, 4, None)),
        ("100:150*2", (100,)),
    ):
        assert Numbers(auto=True).convert(text, None, None) == numbers
