"""The cells of a sweep: which contender is timed at which size, tile, mask and number of threads."""

import importlib.util
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from shakespeare.attention_ext import AUTO, PARTS, SIMD, extension, tiles
from shakespeare.attention_ext.cuda.kernels import MOST_SPLIT
from shakespeare.attention_ext.parts import DEVICES, Dtype, check_dtype, is_file, one_of, resolve_simd
from shakespeare.lab import machine
from shakespeare.lab.bench.contenders import SPLIT, contenders
from shakespeare.lab.traffic import Case

L2 = ("warm", "cold")  # what the L2 cache holds before a call: what the last call left, or other data


@dataclass(frozen=True)
class Cell:
    """One contender at one case: q is (batch, heads, queries, d), k and v are (batch, heads, N, d).

    simd, br, bc: None if the contender has none. threads: threads of the CPU. device: one of DEVICES. l2: one
    of L2 on CUDA, else None.
    """

    contender: str
    simd: str | None
    N: int
    queries: int
    d: int
    batch: int
    heads: int
    causal: bool
    br: int | None
    bc: int | None
    threads: int
    dtype: str = Dtype.FP32.value
    device: str = "cpu"
    l2: str | None = None

    @property
    def by_amx(self) -> bool:
        """Whether AMX computes this on a processor that has it; assumed for PyTorch's SDPA."""
        if self.device != "cpu" or self.dtype != Dtype.BF16:
            return False
        if self.contender != "part4":
            return self.contender == "sdpa"
        return resolve_simd(self.simd or "auto") == AUTO and self.queries >= extension.size("amx.BLOCK")

    @property
    def inputs(self) -> tuple:
        """Equal for cells that have the same q, k, v and mask."""
        return self.N, self.queries, self.d, self.batch, self.heads, self.causal, self.dtype, self.device

    @property
    def group(self) -> tuple:
        """Equal for cells that are compared with each other."""
        return *self.inputs, self.threads, self.l2

    @property
    def flops(self) -> float:
        """Useful floating-point operations of one call."""
        return self.case().flops

    @property
    def memory(self) -> int:
        """Bytes of q, k, v and the output, and of their float64 copies that verify the output.

        On CUDA the copies of k and v are slices.
        """
        B, H, Nq, Nk, d = self.batch, self.heads, self.queries, self.N, self.d
        copies = 2 * 8 if self.device == "cpu" else 0
        return B * H * d * (Nq * (2 * 4 + 4 * 8) + Nk * (2 * 4 + copies))

    @property
    def least_traffic(self) -> float:
        """Bytes of q, k, v and the output, which each move through memory once."""
        rows = 2 * self.queries + 2 * self.N
        return float(self.batch * self.heads * self.d * rows * Dtype(self.dtype).bytes)

    def case(self, heads: int | None = None, threads: int | None = None) -> Case:
        """The call, for lab.traffic. heads: by default all of the batch. threads: by default the cell's."""
        tile = {"br": self.br, "bc": self.bc} if self.br and self.bc else {}
        return Case(
            self.queries,
            self.N,
            self.d,
            heads=heads or self.batch * self.heads,
            causal=self.causal,
            threads=threads or self.threads,
            dtype=Dtype(self.dtype),
            **tile,
        )


def plan(
    names: Sequence[str],
    *,
    lengths: Sequence[int] = (1024,),
    widths: Sequence[int] = (32,),
    queries: int | None = None,
    batch: int = 1,
    heads: int = 4,
    masks: Sequence[bool] = (False,),
    br: Sequence[int | None] = (None,),
    bc: Sequence[int | None] = (None,),
    threads: Sequence[int] = (1,),
    simds: Sequence[str] = ("auto",),
    dtype: str = Dtype.FP32.value,
    device: str = "cpu",
    l2s: Sequence[str] = L2,
) -> list[Cell]:
    """The cells of a sweep: every contender at every length, width, mask and number of threads.

    queries: by default as many as keys. br, bc: tiles of the tiled parts, None for the tuned one. simds:
    names from SIMD. dtype: that of the inputs. device: one of DEVICES; on a GPU there is no choice of tiles,
    threads and simds, and on CUDA every contender is timed with each of l2s, from L2. Raises ValueError
    naming the wrong argument.
    """
    one_of("device", device, DEVICES)
    choices = (("contender", names, known_on(device)), ("simd", simds, SIMD), ("l2", l2s, L2))
    for what, chosen, known in choices:
        for name in chosen:
            if name not in known and not is_file(name):
                where = "" if device == "cpu" else f"on {DEVICES[device]} "
                raise ValueError(f"{what} is {name!r}; {where}it must be one of {', '.join(known)}")
        if len(set(chosen)) < len(chosen) or not chosen:
            raise ValueError(f"{what} is {','.join(chosen)!r}; it must name one or more, each once")
    for name in names:
        taken = contenders()[name].dtypes.get(device, ())
        if name in PARTS or is_file(name):
            check_dtype(name, dtype, device)
        elif dtype not in taken:
            raise ValueError(f"dtype is {dtype!r}; contender {name!r} takes {' and '.join(taken)} only")
    if device != "cpu":
        threads = (1,)
    cells = []
    cases = itertools.product(lengths, widths, masks, threads, l2s if device == "cuda" else (None,), names)
    for N, d, causal, count, l2, name in cases:
        part = PARTS.get(name) if device == "cpu" else None
        tiled = part is not None and part.tiled
        if causal and queries not in (None, 1, N):
            raise ValueError(
                f"queries is {queries}; with a causal mask it must be 1 or N={N}: PyTorch's mask differs"
            )
        shape = (N, queries or N, d, batch, heads, causal and queries != 1)  # one query sees all keys
        tried = itertools.product(br, bc) if tiled else ((None, None),)
        for simd, (rows, columns) in itertools.product(simds if part and part.operator else (None,), tried):
            if tiled:
                rows_of_all, helpers = batch * heads * (queries or N), resolve_simd(simd or "auto")
                tuned = tiles.tile(helpers, count, d, N, shape[-1], rows_of_all)
                rows, columns = rows or tuned[0], columns or tuned[1]
            cells.append(Cell(name, simd, *shape, rows, columns, count, dtype, device, l2))
    return list(dict.fromkeys(cells))


def known_on(device: str) -> tuple[str, ...]:
    """The contenders on a device of DEVICES."""
    return tuple(name for name, contender in contenders().items() if device in contender.dtypes)


def default_names(dtype: str, device: str, queries: int | None = None) -> tuple[str, ...]:
    """The contenders by default; on CUDA all that are installed, each once.

    queries: as in plan(); SPLIT is for few. Raises ValueError if no contender takes the dtype.
    """
    # on a GPU part4 is one of the kernels, and sdpa one of the backends
    without = {"onnx"} if device == "cpu" else {"part4", "sdpa"}
    if queries is None or queries > MOST_SPLIT:
        without.add(SPLIT)
    taken = tuple(
        name
        for name, each in contenders().items()
        if name not in without
        and dtype in each.dtypes.get(device, ())
        and (each.package is None or importlib.util.find_spec(each.package))
    )
    if not taken:
        raise ValueError(f"dtype is {dtype!r}; no part takes it on {DEVICES[device]}")
    return taken


def check_memory(cells: Sequence[Cell], available: int | None = None) -> None:
    """Raise ValueError if a cell's inputs and outputs need more memory than is available, in bytes."""
    for cell in cells:
        sizes = f"N={cell.N}, queries={cell.queries}, d={cell.d}, heads={cell.heads}, batch={cell.batch}"
        machine.check_memory(sizes, cell.memory, available)
