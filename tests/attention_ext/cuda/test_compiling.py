"""Without a GPU: each kernel compiles, its registers and spills are read, and it gets its arguments."""

import ctypes
import functools
import itertools
import math
import sys
from unittest.mock import Mock

import cuda_on_cpu
import pytest
import torch
from support import ROOT, naming, printed

from shakespeare.attention_ext.build import nvrtc
from shakespeare.attention_ext.cuda import driver
from shakespeare.attention_ext.cuda.kernels import EVERY, FASTEST, KERNELS, WIDEST, Gpu, choose, queries_of
from shakespeare.attention_ext.cuda.launches import RULES as BITS
from shakespeare.attention_ext.cuda.launches import Sizes
from shakespeare.attention_ext.cuda.tiles import LARGE, Queries
from shakespeare.attention_ext.parts import BuildError, Dtype
from shakespeare.attention_ext.rules import ScoreMod

# KiB for a block, by NVIDIA's guide
SHARED = {(7, 5): 64, (8, 0): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227}
GPUS = {capability: Gpu("a GPU", capability, shared * 1024, 132) for capability, shared in SHARED.items()}
WIDTHS = (32, 64, 128)
WITHOUT_BIAS = sum(BITS[name] for name in ("RULED", "SOFTCAP", "ALIBI", "DOCUMENTS"))
RULES = (0, WITHOUT_BIAS)  # none, and all but a bias and a header
MODIFIED = sum(BITS.values()) - BITS["BIAS_HIDES"]  # all; a bias is of numbers or boolean
SPILLING, WITH_RULES = 64, 256  # bytes that a kernel may spill and still keep its state in registers


def source_of(name, d, dtype=Dtype.FP32, capability=(9, 0), rules=0, queries=LARGE):
    tile = choose(name, d, dtype, GPUS[capability], queries=queries)
    return driver.source(*tile, d, dtype, capability, rules)


@functools.cache
def resources(name, d, dtype, capability, rules=0, queries=LARGE):
    return source_of(name, d, dtype, capability, rules, queries).compile()[1]


def check(name, d, dtype, capability=(9, 0), rules=0, queries=LARGE):
    """Compile a kernel; check that its state stays in registers and its products run beside the rest."""
    found = resources(name, d, dtype, capability, rules, queries)
    spilled = WITH_RULES if rules else 0 if EVERY[name].only else SPILLING
    spilled = math.inf if name == "3-spilled" else spilled
    with naming(d, dtype, capability, rules):
        assert 0 < found.registers <= 255 and found.spill_stores <= spilled and found.losses == (), found


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("name", EVERY)
def test_each_source_compiles(name):
    kernel = EVERY[name]
    for dtype in {file: dtype for dtype, file in kernel.sources.items()}.values():
        check(name, 32, dtype, rules=max(filter(kernel.takes, RULES)))


@pytest.mark.full
@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("capability", GPUS, ids=lambda c: f"sm_{c[0]}{c[1]}")
@pytest.mark.parametrize("name", EVERY)
def test_each_step_compiles_for_each_architecture(name, capability):
    kernel = EVERY[name]
    dtypes = [dtype for dtype in kernel.dtypes if kernel.runs_on(capability, dtype)]
    if not dtypes:
        pytest.skip(f"kernel {name} is not for compute capability {capability[0]}.{capability[1]}")
    for dtype in dtypes:
        every = capability == (9, 0) and dtype is not Dtype.FP16 or capability == (7, 5) and name in "45"
        most = max(filter(kernel.takes, RULES))
        for d, rules in {(32, 0), (64, most), (128, 0), (128, most)} if every else {(64, most)}:
            check(name, d, dtype, capability, rules)
    if name == "6":  # wider tiles, and columns that are filled
        for d, n in itertools.product((40, 64, 128, 192, 256), (Queries(700, 100), Queries(4096, 4096))):
            check(name, d, Dtype.BF16, queries=n)
    if name == "backward4" and capability == (9, 0):  # blocks that own queries
        for d, rules in ((136, 0), (192, 15), (256, 0), (256, 7)):
            check(name, d, Dtype.BF16, rules=rules)
    if name in ("split", "backward2", "backward3") and capability == (9, 0):  # warps that share keys
        for dtype in {Dtype.FP32, Dtype.BF16} & {*dtypes}:
            check(name, 192, dtype)
            check(name, 256, dtype)


HEADER = """
#include <algorithm>
#include <cmath>
#include <cstdint>
#include "lib/sign.inc"
#define WIDE 3
inline float grown(float x) { return std::exp2(x) + std::min(x, 2.0f) + std::abs(x) + sqrtf(x * x + 1); }
float score(float s, At at) { return SIGN * 9 * std::tanh(s / 9) - grown(at.h) * std::abs(at.i - at.j); }
float slope(float s, At) { return 1 - std::pow(std::tanh(s / 9), 2.0f); }
bool seen(At at) { return int64_t(at.i + at.b) % WIDE != std::max(at.j, 0) % WIDE; }
"""


@pytest.mark.usefixtures("nvrtc", "extension")
@pytest.mark.parametrize("name", [name for name, kernel in EVERY.items() if kernel.ruled])
def test_a_bias_and_a_users_header_are_compiled_in(name, tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "sign.inc").write_text("constexpr float SIGN = 1;")
    header = tmp_path / "rules.h"  # as one of the kernels' is called
    header.write_text(HEADER)
    mod = ScoreMod(header)
    queries = Queries(4096, 4096, modified=True)
    row, tile = choose(name, 64, EVERY[name].dtypes[0], GPUS[9, 0], queries)
    settings = row, tile, 64, row.dtypes[0], (9, 0), MODIFIED & ~row.without
    source = driver.source(*settings, mod)
    assert source.compile()[1].spill_stores <= WITH_RULES
    (tmp_path / "lib" / "sign.inc").write_text("constexpr float SIGN = -1;")
    assert driver.source(*settings, ScoreMod(header)).fingerprint() != source.fingerprint()
    assert driver.source(*settings, mod).fingerprint() == source.fingerprint()


@pytest.mark.usefixtures("nvrtc", "extension")
def test_a_header_that_nvrtc_refuses_is_named_in_one_line(tmp_path):
    (tmp_path / "mine.h").write_text("#include <vector>\nfloat score(float s, At) { return s; }")
    row, tile = choose("5", 64, Dtype.FP32, GPUS[9, 0])
    source = driver.source(row, tile, 64, Dtype.FP32, (9, 0), 129, ScoreMod(tmp_path / "mine.h"))
    # `.` matches no line end
    message = r"\ANVRTC failed to compile kernel5_tf32.cu for sm_90: .*mine.h.*vector.*\Z"
    with pytest.raises(BuildError, match=message):
        source.compile()


WORK = """
#include "documents.cu"
struct Work {
    const long long* documents;
    int2* extents;
    int Nk;
};
void decode(const Work& w) { attention_documents(w.documents, w.extents, w.Nk); }
"""


def test_extents_are_each_keys_document(tmp_path):
    """documents.cu on the CPU, for numbers that grow and others."""
    (tmp_path / "documents.cu").write_text((nvrtc.SOURCES / "documents.cu").read_text())
    (tmp_path / "work.h").write_text(WORK)
    sizes = {"FORMAT": 0, "THREADS": 32, "BLOCKS": 1, "SHARED_BYTES": 0}
    cuda_on_cpu.build(tmp_path, "work.h", sizes)
    run = ctypes.CDLL(tmp_path / "emulator.so").run
    generator = torch.Generator().manual_seed(0)
    for Nk in (1, 31, 32, 33, 100):
        documents = torch.randint(0, 6, (3, Nk), generator=generator) * 2**40 - 2**41
        documents[:2] = documents[:2].sort().values
        found = torch.zeros(3, 1 + Nk, 2, dtype=torch.int32)
        work = (ctypes.c_int64 * 3)(documents.data_ptr(), found.data_ptr(), Nk)
        assert run(work, 3 * -(-Nk // 32), 0) == 0
        for numbers, (first, *keys) in zip(documents, found.tolist()):
            grow = bool((numbers[1:] >= numbers[:-1]).all())
            assert first == [not grow, 0]
            same = (numbers[:, None] == numbers).int()
            ends = torch.stack([same.argmax(1), Nk - same.flip(1).argmax(1)], 1)
            assert keys == ends.tolist() or not grow


@pytest.mark.full
@pytest.mark.usefixtures("nvrtc")
def test_only_the_spilling_state_spills():
    for d in WIDTHS:
        spilled, kept = (resources(name, d, Dtype.FP32, (9, 0)) for name in ("3-spilled", "3"))
        assert spilled.spill_stores > 4 * d > 0 == kept.spill_stores, d
        assert spilled.registers < kept.registers, d


def test_the_source_is_kept_and_found_where_no_other_can_write(nvrtc, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    source = source_of("2", 32)
    code = source.make()
    assert code[:4] == b"\x7fELF"
    before, after = caplog.messages
    assert before == "Compiling kernel2.cu for sm_90..." and after.startswith("Compiled in")
    assert source.make() == code and len(caplog.messages) == 2
    assert source_of("2", 33).path() != source.path()
    tmp_path.chmod(0o777)
    with pytest.raises(BuildError, match="can be written by everybody"):
        source.make()


def test_ptxas_report():
    log = """ptxas info    : Compiling entry function 'f' for 'sm_90'
    32 bytes stack frame, 52 bytes spill stores, 44 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 1024 bytes smem"""
    assert nvrtc.parse(log) == nvrtc.Resources(64, 32, 52, 44, 1024)
    waits = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    assert nvrtc.parse(f"{log}\n{waits}").losses == (waits,)


def test_a_missing_package_is_one_sentence(monkeypatch):
    monkeypatch.setattr(nvrtc.metadata, "version", Mock(side_effect=nvrtc.metadata.PackageNotFoundError))
    with pytest.raises(BuildError, match=r"^CUDA kernels need .* cuda.core is missing; pip install"):
        nvrtc.versions()


def test_the_table():
    for name, kernel in EVERY.items():
        assert name == kernel.name
        assert all((nvrtc.SOURCES / file).is_file() for file in kernel.sources.values())
        for d in range(1, WIDEST + 1):
            assert d <= kernel.padded(d) < d + kernel.multiple
            for dtype in kernel.dtypes:
                queries = (Queries(1), Queries(3), Queries(9), Queries(700, 30), Queries(4096, 4096))
                tiles = [tile for n in queries for tile in kernel.tiles(kernel.padded(d), dtype, n, (9, 0))]
                assert tiles
                assert all(tile.shared > 0 < tile.br for tile in tiles)
    for dtype in Dtype:
        fastest = next(name for name in FASTEST if dtype in KERNELS[name].dtypes)
        assert choose(None, 64, dtype, GPUS[9, 0])[0].name == fastest
        assert choose(None, 64, dtype, GPUS[7, 5], Queries(1, few=True))[0].name == "split"
        assert choose("backward", 64, dtype, GPUS[7, 5])[0].name == "backward1"
        assert choose("backward", 64, dtype, GPUS[8, 0])[0].name == f"backward{2 + (dtype != Dtype.FP32)}"
    for d, rules, name in ((128, 0, "4"), (128, 191, "4"), (128, 81, "3"), (256, 0, "4"), (256, 191, "4")):
        assert choose("backward", d, Dtype.FP16, GPUS[9, 0], rules=rules)[0].name == f"backward{name}"
    for dtype, name in ((Dtype.FP32, "4"), (Dtype.FP16, "5"), (Dtype.BF16, "3")):
        for d in range(1, WIDEST + 1):
            assert choose(None, d, dtype, GPUS[7, 5])[0].name == name, d
    for H, N, d, name, br in ((4, 1024, 32, "5", 64), (4, 1024, 64, "6", 128), (512, 2048, 128, "6", 192)):
        queries = queries_of(Sizes(H, N, N), Dtype.BF16, GPUS[9, 0])  # few, some, many tiles
        row, tile = choose(None, d, Dtype.BF16, GPUS[9, 0], queries)
        assert (row.name, tile.br) == (name, br)
    with pytest.raises(ValueError, match="no kernel takes d = 64 on this GPU, of compute capability 7.0"):
        choose(None, 64, Dtype.FP32, Gpu("a GPU", (7, 0), 96 * 1024, 80))


@pytest.mark.full
@pytest.mark.usefixtures("extension")
def test_every_kernel_gets_its_arguments():
    if torch.cuda.is_available():
        pytest.skip("a driver is here, which the stand-in cannot replace; the other tests run the kernels")
    said = printed(sys.executable, ROOT / "tests" / "launcher_process.py", PYTHONPATH=str(ROOT))
    assert int(said.split()[0]) > 1000


@pytest.mark.full
@pytest.mark.usefixtures("extension")
def test_calls_without_pytorch_have_the_same_arguments():
    if torch.cuda.is_available():
        pytest.skip("a driver is here, which the stand-in cannot replace")
    said = printed(sys.executable, ROOT / "tests" / "calls_process.py", PYTHONPATH=str(ROOT))
    assert int(said.split()[0]) > 300


def test_a_handle_of_memory_reaches_another_process_whole(nvrtc, monkeypatch):
    bound = driver.bindings()
    handle = bytes(range(1, bound.CU_IPC_HANDLE_SIZE + 1))
    arrived = []

    def give(address):
        given = bound.CUipcMemHandle()
        ctypes.memmove(given.getPtr(), handle, len(handle))
        return bound.CUresult.CUDA_SUCCESS, given

    def take(given, flags):
        arrived.append(ctypes.string_at(given.getPtr(), len(handle)))
        return bound.CUresult.CUDA_SUCCESS, bound.CUdeviceptr(4096)

    monkeypatch.setattr(bound, "cuIpcGetMemHandle", give)
    monkeypatch.setattr(bound, "cuIpcOpenMemHandle", take)
    memory = object.__new__(driver.Memory)
    memory.address, memory._free = 4096, lambda address: (bound.CUresult.CUDA_SUCCESS,)
    assert driver.address_of(memory.handle()) == 4096 and arrived == [handle]
    driver.address_of.cache_clear()
