"""The GPU's counts of one call, through Nsight Compute (ncu): the homework's table.

ncu runs a separate program, which calls the kernel once to warm up and once to be counted.
"""

import csv
import shutil
import subprocess
import sys
from dataclasses import dataclass

from lab.command import run

LAUNCHES = 16  # most launches to count; kernel 1 has one for each tile of keys
SECONDS = 300  # time that ncu may take; it runs each launch several times
OPTIONS = (
    "--clock-control=none",  # the clocks are left as they are for others
    *("--profile-from-start=off", "--kernel-name=regex:attention_", f"--launch-count={LAUNCHES}", "--csv"),
)

# ncu's metrics by their names here. Those that end in .sum are added over launches. The others are
# percentages: their mean is taken, with the launches weighted by time.
TIME = "gpu__time_duration.sum"
METRICS = {
    "achieved occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "SM efficiency": "smsp__cycles_active.avg.pct_of_peak_sustained_elapsed",
    "shared load": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "shared store": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    "global load": "l1tex__t_bytes_pipe_lsu_mem_global_op_ld.sum",
    "global store": "l1tex__t_bytes_pipe_lsu_mem_global_op_st.sum",
    "local load": "l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum",
    "local store": "l1tex__t_bytes_pipe_lsu_mem_local_op_st.sum",
    "L2 read": "lts__t_sectors_srcunit_tex_op_read.sum",
    "memory read": "dram__bytes_read.sum",
    "memory write": "dram__bytes_write.sum",
}
BYTES = {"shared load": 128, "shared store": 128, "L2 read": 32}  # bytes of a wavefront or of a sector
UNITS = {
    **{"nsecond": 1e-9, "usecond": 1e-6, "msecond": 1e-3, "second": 1.0},
    **{"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0},
    **{"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12},
}

PROGRAM = """
import json, sys, torch
from attention_ext import attention
(B, H, Nq, Nk, d), dtype, causal, kernel = json.loads(sys.argv[1])
q, k, v = (torch.randn(B, H, N, d, device="cuda", dtype=getattr(torch, dtype)) for N in (Nq, Nk, Nk))
def call():
    attention("part4", q, k, v, causal=causal, kernel=kernel)
    torch.cuda.synchronize()
call()
torch.cuda.profiler.start()
call()
torch.cuda.profiler.stop()
"""


class NotCounted(Exception):
    """Nothing was counted; the message is the reason in one line."""


@dataclass(frozen=True)
class Counted:
    """The GPU's counts.

    launches: those of the call, at most LAUNCHES. seconds: their time. values: bytes or percent, by the names
    of METRICS, without those that this GPU does not count.
    """

    launches: int
    seconds: float
    values: dict[str, float]


def count(arguments: str) -> Counted:
    """The GPU's counts of a call. arguments: JSON for PROGRAM. Raises NotCounted."""
    tool = shutil.which("ncu")
    if tool is None:
        raise NotCounted("ncu (Nsight Compute) was not found on PATH")
    metrics = ",".join((TIME, *METRICS.values()))
    line = [tool, *OPTIONS, f"--metrics={metrics}", sys.executable, "-c", PROGRAM, arguments]
    try:
        code, out, err = run(line, SECONDS, LC_ALL="C")
    except subprocess.TimeoutExpired:
        raise NotCounted(f"ncu took more than {SECONDS} s") from None
    except OSError as error:
        raise NotCounted(f"{tool}: {error.strerror}") from None
    if code or '"Metric Name"' not in out:
        raise NotCounted(complaint(f"{out}\n{err}", code))
    return parse(out)


def complaint(output: str, code: int) -> str:
    """One line on why ncu failed."""
    if "ERR_NVGPUCTRPERM" in output:
        return "the driver lets only root read the GPU's counters (ERR_NVGPUCTRPERM)"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("==ERROR==").strip() for line in lines if line.startswith("==ERROR==")]
    last = lines[-1] if lines else "no output"
    return f"ncu ended with {code}: {(errors or [last])[0]}"


def parse(output: str) -> Counted:
    """Parse the output of ncu --csv: a line for each metric of each launch, between other lines.

    Raises NotCounted if it has no launch.
    """
    lines = output.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    launches: dict[str, dict[str, float]] = {}
    for row in csv.DictReader(line for line in lines[start:] if line.startswith('"')):
        values = launches.setdefault(row["ID"], {})
        try:
            value = float(row["Metric Value"].replace(",", ""))
        except ValueError:  # n/a
            continue
        values[row["Metric Name"]] = value * UNITS.get(row["Metric Unit"], 1.0)
    if not launches:
        raise NotCounted("ncu saw no kernel")
    seconds = sum(each.get(TIME, 0.0) for each in launches.values())
    values = {}
    for name, metric in METRICS.items():
        found = [(each[metric], each.get(TIME, 0.0)) for each in launches.values() if metric in each]
        if not found:
            continue
        total = sum(value for value, _ in found)
        if metric.endswith(".sum"):
            values[name] = total * BYTES.get(name, 1)
        else:
            weights = sum(weight for _, weight in found)
            values[name] = sum(v * w for v, w in found) / weights if weights else total / len(found)
    return Counted(len(launches), seconds, values)
