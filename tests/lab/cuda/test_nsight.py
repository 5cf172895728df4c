"""What ncu prints is read; where it is missing or may not count, one line says so."""

from __future__ import annotations

import json

import pytest
from support import naming, script

from lab.cuda import nsight

HEAD = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size",'
    '"Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"'
)


LINE = (
    '"{}","321","python3","127.0.0.1","attention_kernel1","1","7","(32, 32, 1)","(256, 1, 1)","0",'
    '"9.0","Command line profiler metrics","{}","{}","{}"'
)
# for each metric, the unit and value of two launches
FOUND = {
    "gpu__time_duration.sum": (("us", "10"), ("nsecond", "30,000")),
    nsight.METRICS["achieved occupancy"]: (("%", "40"), ("%", "80")),
    nsight.METRICS["shared load"]: (("", "1,000,000"), ("", "500000")),
    nsight.METRICS["memory read"]: (("Mbyte", "2.5"), ("byte", "500,000")),
    nsight.METRICS["SM efficiency"]: (("%", "n/a"), ("%", "n/a")),
}
LINES = [LINE.format(launch, metric, *FOUND[metric][launch]) for launch in (0, 1) for metric in FOUND]
OUTPUT = "\n".join(["==PROF== Connected to process 321 (/usr/bin/python3.12)", HEAD, *LINES])


def test_launches_are_added_and_percentages_weighted():
    found = nsight.parse(OUTPUT)
    assert found.launches == 2 and found.seconds == pytest.approx(40e-6)
    assert found.values["achieved occupancy"] == pytest.approx((40 * 10 + 80 * 30) / 40)
    assert found.values["shared load"] == 1_500_000 * 128
    assert found.values["memory read"] == pytest.approx(3e6)
    assert not {"SM efficiency", "global load"} & found.values.keys()


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """Put a shell script in the place of ncu."""

    def put(text: str) -> None:
        script(tmp_path / "ncu", text)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return put


def test_what_ncu_is_told(ncu, tmp_path):
    (tmp_path / "output").write_text(OUTPUT)
    ncu(f'printf "%s\\n" "$@" > {tmp_path}/told; cat {tmp_path}/output')
    arguments = json.dumps([[1, 1, 8, 4], "float32", False, "1"])
    assert nsight.count(arguments).launches == 2
    told = (tmp_path / "told").read_text()
    assert "--clock-control=none" in told and arguments in told and nsight.TIME in told
    compile(nsight.PROGRAM, "program", "exec")


def test_why_nothing_was_counted(ncu):
    for text, reason in (
        ("echo '==ERROR== ERR_NVGPUCTRPERM - The user lacks permission'; exit 1", "lets only root read"),
        ("echo '==ERROR== Failed to find metric x'; exit 1", "ncu ended with 1: Failed to find metric x"),
        ("echo noise >&2; exit 3", "ncu ended with 3: noise"),
        ("echo '==WARNING== No kernels were profiled.'", "No kernels were profiled"),
    ):
        ncu(text)
        with naming(text), pytest.raises(nsight.NotCounted, match=reason) as error:
            nsight.count("[]")
        assert "\n" not in str(error.value)
