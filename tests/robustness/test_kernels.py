"""The kernels, the decoder and the training step without Python: generated cases under sanitizers.

They also run for other processors.

A program prints the seed of a case that fails. `kernels SEED 1 THREADS`, `training SEED 1 THREADS` or
`decoder SEED 1` repeats the case.
"""

import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import found_program, or_skip, printed

from shakespeare.attention_ext.build import ninja, recipes, toolchain
from shakespeare.attention_ext.build.recipes import CSRC, ROOT
from shakespeare.generation.engines.native import DEFINES

pytestmark = pytest.mark.full

HERE = Path(__file__).parent
ARM = platform.machine() in ("arm64", "aarch64")
CHECKED = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
RACES = ["-fsanitize=thread"]
TRAPS = ["-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"]  # they need no runtime library
ZIG = [sys.executable, "-m", "ziglang", "c++"]
QUICKLY = ["-O0", "-fno-sanitize=all"]  # without zig's checks, whose library is compiled too
PARTS = recipes.found(CSRC, *recipes.KERNELS)
PORTABLE = [HERE / "kernels.cpp", ROOT / "model" / "csrc" / "precision.cpp", *PARTS]
BINDINGS = ("bindings.cpp",)  # for Python
WITHOUT_BINDINGS = {
    package: [path for path in recipes.found(ROOT / package / "csrc", "*.cpp") if path.name not in BINDINGS]
    for package in ("model", "generation", "training")
}
TRAINING = [HERE / "training.cpp", *WITHOUT_BINDINGS["model"], *WITHOUT_BINDINGS["training"], *PARTS]
UNCHECKED = "-fno-sanitize=address,undefined"
# The float64 reference takes most of the time: it is optimised, and not sanitized.
OF_A_SOURCE = {HERE / "kernels.cpp": ("-O2", UNCHECKED)}
DECODER = [HERE / "decoder.cpp", *WITHOUT_BINDINGS["model"], *WITHOUT_BINDINGS["generation"], *PARTS]


def run(*command: str | Path) -> str:
    """Run a command and return its stdout. If the command fails, the test fails and shows its output."""
    race = "halt_on_error=1"  # the racing case is then the last one printed
    stack = "detect_stack_use_after_return=0"  # GCC 13 misaligns vectors on that stack
    return printed(*command, TSAN_OPTIONS=race, ASAN_OPTIONS=stack)


def flags(compiler: str | Path) -> list[str]:
    """The extension's flags but for the processor, the optimisation and PyTorch."""
    shipped = toolchain.flags([str(compiler)])
    return [flag for flag in shipped if flag != toolchain.NATIVE and not flag.startswith(("-O", "-D"))]


@pytest.fixture(scope="session")
def link(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Compile and link: link(command, sources, *objects). All workers share what a command compiles.

    options: more flags of a source.
    """
    own = tmp_path_factory.mktemp("programs")

    def link(command: list[str], sources: list[Path], *objects: Path, options=OF_A_SOURCE) -> Path:
        command = [*command, "-std=c++17", "-g1", *flags(command[0]), *DEFINES]
        includes = (f"-I{CSRC}", f"-I{ROOT}")
        compiled = [
            ninja.Object(source, tuple(command), (*includes, *options.get(source, ()))) for source in sources
        ]
        program = Path(tempfile.mkdtemp(dir=own)) / sources[0].stem
        ninja.build(shared / "objects", compiled, command, [*map(str, objects), "-pthread"], program)
        return program

    return link


def sanitized(command: list[str], flags: list[str], tmp_path: Path) -> list[str]:
    """The command with the sanitizers' flags. Skips the test if such programs cannot be built or run."""
    source, program = tmp_path / "empty.cpp", tmp_path / "empty"
    source.write_text("int main() { return 0; }\n")
    for attempt in ([*command, *flags, str(source), "-o", str(program)], [str(program)]):
        done = subprocess.run(attempt, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"{' '.join(command)} has no {' '.join(flags)} here: {done.stderr.strip()[:200]}")
    return [*command, *flags]


def run_cases(count: int, *command: str | Path) -> None:
    """Run a program of cases, and check that it tried `count` cases and found none wrong."""
    out = run(*command)
    assert out.startswith(f"{count} cases, 0 wrong"), out


def processor_has(flag: str) -> bool:
    try:
        return flag in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def processors() -> list[str]:
    """Values of -march that this machine runs, one for each width of the portable vectors."""
    wider = {"x86-64": "sse2", "x86-64-v3": "avx2", "x86-64-v4": "avx512vl"}
    return [name for name, flag in wider.items() if processor_has(flag)] or ["native"]


@pytest.fixture
def native() -> list[str]:
    """The extension's compiler, for this processor, with little optimisation."""
    with or_skip():
        return [*toolchain.find_compiler(), toolchain.NATIVE, "-O1"]


def with_helpers(simd: str, link, command: list[str], tmp_path: Path, target: str = "host") -> Path:
    """The program of the kernels' cases over one of the SIMD helpers. Skips the test if there is no ispc."""
    objects = []
    if simd == "ispc":
        ispc = toolchain.find_ispc()
        if ispc is None:
            pytest.skip("there is no ispc")
        objects = [tmp_path / "simd.o"]
        run(ispc, CSRC / recipes.ISPC_SOURCE, f"--target={target}", "-O3", "--pic", "-o", objects[0])
    own, options = recipes.HELPERS[simd]
    # The sanitizers check the helpers. The kernels are compiled with them for the portable helpers, below.
    kernels = {**dict.fromkeys(PORTABLE, (UNCHECKED,)), **OF_A_SOURCE}
    sources = [*PORTABLE, *recipes.found(CSRC, *own)]
    return link([*command, *options], sources, *objects, options=kernels)


def test_amx_where_there_is_none(native, link, full, tmp_path):
    """Tile registers in memory. A machine with AMX runs the real ones in the tests below."""
    if not processor_has("avx512_bf16"):
        pytest.skip("the processor has no AVX-512 for bfloat16")
    command = [*sanitized(native, CHECKED, tmp_path), "-DEMULATED_AMX"]
    count = 20000 if full else 500
    run_cases(count, link(command, PORTABLE), "700000", str(count), "3")


@pytest.mark.parametrize("target", ["off", "host", "sse4-i32x4", "avx2-i32x8"])
def test_scalar_loops_and_ispc(target, native, link, full, tmp_path):
    needs = {"sse4-i32x4": "sse4_1", "avx2-i32x8": "avx2"}.get(target)
    if target != "host" and not (full and processor_has(needs or "")):
        pytest.skip("only in the full set, on a processor that has it")
    command = sanitized(native, CHECKED, tmp_path)
    count = 20000 if full else 500
    simd = "off" if target == "off" else "ispc"
    run_cases(count, with_helpers(simd, link, command, tmp_path, target), "100000", str(count))


@pytest.mark.parametrize("march", processors())
@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_the_code_that_is_shipped(compiler, march, link, full):
    """Without sanitizers the instructions are others. The guard pages still detect accesses out of bounds."""
    if not full:
        pytest.skip("only in the full set")
    command = [found_program(compiler), "-O3", f"-march={march}"]
    run_cases(30000, link(command, PORTABLE), "200000", "30000")


PROGRAMS = {  # of generated cases: sources, and how many cases in part and in full for memory and for races
    "kernels": (PORTABLE, (800, 40000), (100, 6000)),
    "training": (TRAINING, (30, 3000), (10, 200)),
    "decoder": (DECODER, (20, 1000), (20, 300)),
}


@pytest.mark.parametrize("races", [False, True], ids=["memory", "races"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_case_is_wrong_or_out_of_bounds_or_races(name, races, native, link, full, tmp_path):
    sources, *counts = PROGRAMS[name]
    command = sanitized(native, RACES if races else CHECKED, tmp_path)
    count = counts[races][full]
    threads = [] if name == "decoder" else ["16" if races else "3"]  # the decoder's are drawn for each model
    run_cases(count, link(command, sources), "300000" if races else "0", str(count), *threads)


@pytest.mark.parametrize("compiler", ["gcc", "clang for the Apple M1", "zig for the Apple M1"])
def test_aarch64(compiler, link, full):
    """gcc: without the dot products of bytes. zig brings its own libraries, so it needs no cross compiler."""
    if ARM:
        pytest.skip("this processor is one, so the other tests are about it")
    if compiler.startswith("clang") and not full:
        pytest.skip("only in the full set")
    name = "qemu-aarch64" if shutil.which("qemu-aarch64") else "qemu-aarch64-static"
    emulator = [found_program(name), "-cpu", "max"]
    if compiler.startswith("zig"):
        pytest.importorskip("ziglang")
        command = [*ZIG, "-target", "aarch64-linux-musl", "-mcpu=apple_m1"]
    elif compiler == "gcc":
        command = [found_program("aarch64-linux-gnu-g++"), "-march=armv8-a", *TRAPS]
    else:
        found_program("aarch64-linux-gnu-g++")  # its package has the libraries that clang needs too
        command = [found_program("clang++"), "--target=aarch64-linux-gnu", "-mcpu=apple-m1"]
    command += ["-O3", "-static"]
    program = link(command, PORTABLE)
    count = 2000 if full else 60
    run_cases(count, *emulator, program, "400000", str(count))
    run_cases(count // 10, *emulator, program, "500000", str(count // 10), "16")
    if full:
        run_cases(100, *emulator, link(command, DECODER), "600000", "100")
        run_cases(50, *emulator, link(command, TRAINING), "900000", "50", "3")


@pytest.mark.parametrize("target, cpu", [("aarch64-macos", "apple_m1"), ("x86_64-macos", "haswell")])
def test_programs_for_a_mac_compile_and_link(target, cpu, link, full):
    """With the headers and libraries of the package ziglang. Linux cannot run the programs."""
    pytest.importorskip("ziglang")
    if cpu != "apple_m1" and not full:
        pytest.skip("only in the full set")
    command = [*ZIG, "-target", target, f"-mcpu={cpu}"]
    for sources in ([*PARTS, *recipes.found(CSRC, *recipes.PROGRAM)], PORTABLE, DECODER):
        program = link([*command, *QUICKLY, "-Wall", "-Wextra", "-Wpedantic", "-Werror"], sources)
        assert program.read_bytes()[:4] == b"\xcf\xfa\xed\xfe"  # a 64-bit program of macOS


@pytest.mark.parametrize("compiler", ["g++", "clang++", "clang++ -stdlib=libc++"])
def test_no_compiler_warns(compiler, full, tmp_path):
    """For all sources without torch and Python. libc++ is the library of macOS."""
    command = [found_program(compiler.split()[0]), *compiler.split()[1:]]
    if compiler == "clang++" and not full:
        pytest.skip("only in the full set")
    probe = tmp_path / "probe.cpp"
    probe.write_text("#include <vector>\n")
    if subprocess.run([*command, "-fsyntax-only", probe], capture_output=True).returncode != 0:
        pytest.skip(f"{compiler} finds no library")
    sources = [path for path in CSRC.rglob("*.cpp") if path.parent.name != "bindings"]
    sources += [path for paths in WITHOUT_BINDINGS.values() for path in paths]
    sources += HERE.glob("*.cpp")
    warnings = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only", f"-I{CSRC}", f"-I{ROOT}"]
    command += ["-std=c++17", toolchain.NATIVE, *flags(command[0]), *DEFINES, *warnings]
    with ThreadPoolExecutor(toolchain.jobs()) as pool:
        list(pool.map(lambda source: run(*command, source), sources))
