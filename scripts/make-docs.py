"""Write what documents copy: the command line's help, the tables of results and the README's one.

python scripts/make-docs.py

docs/use/cli.md has all options, docs/results/ a document for each processor of benchmarks/results/. The
tables of the README, docs/learn/gpu.md and the speedrun stand between `<!-- results: ... -->` and
`<!-- end of results -->`.
"""

import inspect
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import speedrun as records  # noqa: E402
from shakespeare.app.cli import COMMANDS, cli, command_of  # noqa: E402
from shakespeare.attention_ext import PARTS  # noqa: E402
from shakespeare.lab import result_files  # noqa: E402
from shakespeare.lab.bench import report  # noqa: E402
from shakespeare.lab.formats import markdown  # noqa: E402

CLI_HEAD = """\
# The command line

The options of `gpt.py`, written by `python scripts/make-docs.py`. Every command has `-h` and `--help`.
Options without a command are those of `part4 --inference`. `gpt.py` itself has:

{}

## Options of several commands

`part4` stands for all parts.

{}
"""
MARKED = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end of results -->)", re.DOTALL)
SPEEDRUN = "docs/results/speedrun.md"

README = "amd-zen-5"  # the processor of its table
GPU = "docs/learn/gpu.md"
FLASH = result_files.RESULTS / "bench_flash-nvidia-h100.json"
LADDER = result_files.RESULTS / "bench_kernels-nvidia-h200.json"
OTHERS = {"sdpa-cudnn": "cuDNN", "flash-attn-4": "FA4"}

# Figures that part 4's tables leave out.
HIDDEN = ("iqr_ms", "margin", "quiet", "all_ms", "gbps", "bandwidth_share", "scratch", "error")
# Cases of benchmarks.generation, as columns name them; others have their own names.
CASES = {
    "batch1": "batch 1, block 256",
    "batch32": "batch 32, block 256",
    "long": "batch 1, block 2048",
    "prefill": "prefill 1,024",
}


def cli_document() -> str:
    """docs/use/cli.md: options that several commands share once, with these, then each command's own."""
    context = click.Context(cli, info_name="gpt.py", terminal_width=98, **cli.context_settings)
    commands = {name: command_of(name) for name in COMMANDS if name not in PARTS or name == "part4"}
    rows = {name: option_rows(command, context) for name, command in commands.items()}
    count = Counter(row for command_rows in rows.values() for row in command_rows)
    users = {
        row: ", ".join(name for name in commands if row in rows[name]) for row in count if count[row] > 1
    }
    shared = markdown(["option", "what it does", "commands"], [(*row, users[row]) for row in users])
    lines = [CLI_HEAD.format(table(option_rows(cli, context)), shared)]
    for name, command in commands.items():
        usage = command.get_usage(click.Context(command, info_name=name, parent=context))
        lines += [f"## {name}", ""]
        lines += [] if usage.endswith(f"{name} [OPTIONS]") else [f"`{usage.removeprefix('Usage: ')}`", ""]
        lines += [inspect.cleandoc(command.help or "").replace("\b\n", ""), ""]
        lines += [command.epilog, ""] if command.epilog else []
        if name == "part4":
            lines += [f"{', '.join(PARTS)} have the same options.", ""]
        unshared = [row for row in rows[name] if count[row] == 1]
        lines += [table(unshared), ""] if unshared else []
    return "\n".join(lines).rstrip() + "\n"


def option_rows(command: click.Command, parent: click.Context) -> list[tuple[str, ...]]:
    """A command's options with their help, as cells in Markdown."""
    context = click.Context(command, info_name=command.name, parent=parent)
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    records = filter(None, (option.get_help_record(context) for option in options))
    return [(f"`{names}`".replace("|", "\\|"), text.replace("|", "\\|")) for names, text in records]


def table(rows: Any) -> str:
    """Options as a table in Markdown."""
    return markdown(["option", "what it does"], rows)


def bench(file: Path) -> list[str]:
    """All of `gpt.py bench`'s figures."""
    return [report.text(report.load(file), "md")]


def part4(file: Path) -> list[str]:
    """Part 4's times and its lead over the others."""
    run = report.load(file)
    rows = [report.row(run, result) for result in run.results if result.cell.contender == "part4"]
    return [report.header(run), "", report.table([row | dict.fromkeys(HIDDEN) for row in rows])]


def generation(file: Path) -> list[str]:
    """All engines in all cases, as benchmarks.generation saved them."""
    content = json.loads(file.read_text())
    machine = content["machine"]
    facts = [f"{machine['cpu']}, PyTorch {machine['torch']}, {machine['date']} UTC"]
    if content.get("busy"):
        facts.append(content["busy"])
    titles = [CASES.get(case, case) for case in content["cases"]]
    columns = content["cases"].values()
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(figures_of(column.get(name)) for column in columns)] for name in names]
    rows.sort(key=lambda row: row[0] == "memory limit")  # it comes last
    return ["  \n".join(facts), "", markdown(["", *titles], rows)]


def figures_of(figures: dict[str, float] | None) -> str:
    """Tokens per second or milliseconds, the time relative to the native engine's, and the loss."""
    if figures is None:
        return ""
    if "relative" not in figures:
        return "wrong"
    rate = f"{figures['ms']:.2f} ms" if "ms" in figures else f"{figures['tokens_per_second']:,.0f}"
    nats = f", {figures['loss']:.4f} nats" if "loss" in figures else ""
    return f"{rate} ({figures['relative']:.2f}){nats}"


PART4 = "-d 32,64,128 --mask none,causal --rounds 15"
GPT2 = "-m benchmarks.generation --cases 124M,124M-2t,124Mx8,124Mx8-2t,355M,355M-2t,355Mx8,355Mx8-2t"
GPT2 += " --engines native --peers CTranslate2,CTranslate2Int8,LlamaCpp,LlamaCppQ8 --rounds 2"
WARM = "--device cuda --dtype bf16 --tokens 16384 --columns 2048 --l2 warm -r 5"
BACKWARD = "gpt.py bench backward4,backward3,sdpa-cudnn,flash-attn-4,flash-attn-4-deterministic --backward"
BACKWARD += f" -N 4096,16384 -d 64,128 --mask none,causal {WARM}"
RULES = f"-N 16384 -d 64,128 --causal --rules none,window=1023,softcap=30,alibi,documents=1024 {WARM}"
TOKENS = "--device cuda --dtype bf16 --tokens 16384 --columns 2048 -N 512:16384*2"
LADDER_COMMAND = f"gpt.py bench kernel5,kernel6 {TOKENS} -d 64,128 --mask none --l2 warm -r 5"
FLASH_COMMAND = f"gpt.py bench kernel6,sdpa-flash,sdpa-cudnn,flash-attn-4 {TOKENS} -d 64,128,256"
FLASH_COMMAND += " --mask none,causal --l2 warm -r 5"
# The kinds of files of results: heading, the command that saves one, and what shows it.
KINDS = {
    "bench": ("The five parts", "gpt.py bench part0,part1,part2,part3,part4,sdpa", bench),
    "attention": ("Part 4", f"gpt.py bench part4,sdpa,onnx -N 128,1024,2048 {PART4}", part4),
    "attention_bf16": ("Part 4, bf16", f"gpt.py bench part0,part4,sdpa --dtype bf16 -N 1024 {PART4}", part4),
    "generation": ("Text, against other engines", "-m benchmarks.generation", generation),
    "generation_gpt2": ("Text of models of GPT-2's sizes, against other engines", GPT2, generation),
    "bench_cuda": ("Attention on the GPU", "gpt.py bench --device cuda", bench),
    "bench_backward": ("Gradients", BACKWARD, bench),
    "bench_rules": ("Rules", f"gpt.py bench part4,flex,flash-attn-4 {RULES}", bench),
    "bench_rules_backward": (
        "Gradients with rules",
        f"gpt.py bench backward4,flex,flash-attn-4,flash-attn-4-deterministic --backward {RULES}",
        bench,
    ),
    "bench_flash": ("FlashAttention's shapes", FLASH_COMMAND, bench),
    "bench_kernels": ("Kernels 5 and 6", LADDER_COMMAND, bench),
}


def results() -> dict[str, str]:
    """The documents of docs/results/, by path. Raises ValueError for a file that is wrong."""
    documents: dict[str, str] = {}
    for kind, (title, command, lines) in KINDS.items():
        for file in sorted(result_files.RESULTS.glob(f"{kind}-*.json")):
            how = f"`python {command} --save benchmarks/results/{file.name}`:"
            section = [f"\n## {title}\n", f"{how}\n", *lines(file), ""]
            machine = json.loads(file.read_text())["machine"]
            name = machine.get("gpu", {}).get("name", machine.get("microarchitecture") or machine["cpu"])
            head = f"# {name}\n\nWritten by `python scripts/make-docs.py`.\n"
            path = f"docs/results/{file.stem.removeprefix(f'{kind}-')}.md"
            documents[path] = documents.get(path, head) + "\n".join(section)
    return documents


def speedrun() -> str:
    """The table of the speedrun's records, and the best loss of a shipped model."""
    shown = records.table(result_files.RESULTS)
    trained = {
        file.parent.name: json.loads(file.read_text()) for file in ROOT.glob("checkpoints/*/training.json")
    }
    name, best = min(trained.items(), key=lambda record: record[1]["val_loss"])
    model = f"{name}, block size {best['recipe']['block_size']}"
    return f"{shown}\n\nThe best loss of a shipped model, by other rules: {best['val_loss']:.4f} ({model}).\n"


def readme(text: str) -> str:
    """The README with its table of parts from the file."""
    run = report.load(result_files.RESULTS / f"bench-{README}.json")
    rows = [described(report.row(run, result)) for result in run.results]
    return marked(text, parts=markdown(["part", "idea", "ms", "times PyTorch (more is faster)"], rows))


def beside_others() -> str:
    """How many times as fast as the faster of cuDNN and FlashAttention-4 kernel 6 is, by d, mask and N."""
    ms: dict[tuple[str, int], dict[str, float]] = {}
    for result in report.load(FLASH).results:
        cell = result.cell
        row = f"d = {cell.d}{', causal' if cell.causal else ''}"
        ms.setdefault((row, cell.N), {})[cell.contender] = result.median or 0
    lengths = sorted({N for _, N in ms})
    rows = {row: [row] for row, _ in ms}
    for (row, _), times in ms.items():
        other = min(OTHERS, key=times.__getitem__)
        ratio = times[other] / times["kernel6"]
        rows[row].append(f"{ratio:.2f}" if ratio >= 1 else f"**{ratio:.3f}** {OTHERS[other]}")
    return markdown(["", *(f"N = {N}" for N in lengths)], rows.values())


def kernel_6_beside_5() -> str:
    """Kernel 6's TFLOP/s, and how many times kernel 5's speed that is, by d and N."""
    run = report.load(LADDER)
    rows = [report.row(run, result) for result in run.results]
    titles = dict.fromkeys(f"N = {row['N']}" for row in rows)
    lines: dict[int, list[str]] = {}
    for five, six in zip(rows[::2], rows[1::2]):
        lines.setdefault(six["d"], [f"d = {six['d']}"]).append(
            f"{six['tflops']:.0f}, {five['ms'] / six['ms']:.2f} x"
        )
    return markdown(["", *titles], lines.values())


def marked(text: str, **shown: str) -> str:
    """The text with other tables between the marks, by the marks' names."""
    return MARKED.sub(lambda marks: f"{marks[1]}{shown[marks[2]]}\n{marks[3]}", text)


def described(row: dict[str, Any]) -> list[str]:
    """A contender's cells."""
    name = row["contender"]
    part = PARTS.get(name)
    link = f"[{name}](attention_ext/csrc/cpu/{part.operator}.cpp)" if part and part.operator else name
    idea = part.summary if part else "PyTorch's `scaled_dot_product_attention`"
    return [link, idea, *(report.figure(column, row[column]) for column in ("ms", "over_sdpa"))]


def documents() -> dict[str, str]:
    """The text of every document that this script writes, by its path."""
    readme_text = readme((ROOT / "README.md").read_text())
    gpu = marked((ROOT / GPU).read_text(), flash=beside_others(), kernels=kernel_6_beside_5())
    fixed = {"README.md": readme_text, "docs/use/cli.md": cli_document(), GPU: gpu}
    return fixed | results() | {SPEEDRUN: marked((ROOT / SPEEDRUN).read_text(), speedrun=speedrun())}


if __name__ == "__main__":
    for name, text in documents().items():
        (ROOT / name).write_text(text)
