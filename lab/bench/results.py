"""The results of a sweep: one for each cell, and the run that holds them."""

from dataclasses import dataclass, field
from typing import ClassVar

from shakespeare.lab.bench.cell import Cell
from shakespeare.lab.timing import Samples


@dataclass
class Result(Samples):
    """The result of a cell. status: 'ok', 'wrong' or 'skipped'; `note` has the reason.

    error: the largest difference from float64, at error_at. scratch: most bytes of PyTorch's allocator beyond
    the output; None for another allocator. traffic: bytes into Run.cache in one call, by the part's count, or
    None. reading: seconds of a launch on a GPU that only reads the traffic.
    """

    cell: Cell
    status: str = "ok"
    note: str | None = None
    error: float | None = None
    error_at: tuple[int, ...] | None = None
    scratch: int | None = None
    traffic: float | None = None
    reading: float | None = None

    fewest: ClassVar[int] = 6  # interval() needs as many for its confidence


@dataclass
class Run:
    """A sweep's results and its machine.

    peaks: FLOP/s by threads. bandwidths: bytes per second from beyond the cache of `cache` bytes, a core's
    own last one, by threads. amx_peaks: AMX's in bfloat16, if used. busy: why the figures are not firm.
    complete: False if the run was stopped. On a GPU: cache is L2 (0: unknown), threads are 1, tensor_peaks is
    the peak of a product of large matrices by dtype, sequential is part1 on one core, for
    lab.bench.gpu_bench.smaller() cells.
    """

    machine: dict
    rounds: int
    min_time: float
    cache: int
    peaks: dict[int, float] = field(default_factory=dict)
    bandwidths: dict[int, float] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    amx_peaks: dict[int, float] = field(default_factory=dict)
    busy: str | None = None
    complete: bool = False
    tensor_peaks: dict[str, float] = field(default_factory=dict)
    sequential: list[Result] = field(default_factory=list)

    def peak(self, cell: Cell) -> float:
        """The peak of the instructions that compute a cell; on a GPU, of those that can compute it."""
        if cell.device == "cuda" and cell.dtype in self.tensor_peaks:
            return self.tensor_peaks[cell.dtype]
        amx = self.amx_peaks.get(cell.threads)
        return amx if amx and cell.by_amx else self.peaks[cell.threads]
