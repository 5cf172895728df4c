"""The documents are right: links, commands, options, listings and samples are those of today."""

import json
import re
import shlex

from support import ROOT, anchors, naming

from benchmarks.speedrun import main as speedrun
from shakespeare.app.cli import COMMANDS, cli, command_of
from shakespeare.lab.bench import report
from shakespeare.lab.bench.contenders import contenders
from shakespeare.model.checkpoint import SHIPPED

DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "tests/robustness/README.md"]


def matches(pattern, flags=0):
    return [(file, match) for file in DOCUMENTS for match in re.findall(pattern, file.read_text(), flags)]


def test_every_linked_file_and_heading_exists():
    links = matches(r"\]\(([^)#:]*)(?:#([^)]*))?\)")
    for file, (link, anchor) in links:
        target = file.parent / link if link else file
        with naming(file.name, link, anchor):
            assert target.exists()
            assert not anchor or anchor in anchors(target)
    assert len(links) > 60


def test_every_shown_command_is_valid():
    """The options are parsed; other tests check the output."""
    python = r"python (?:-m torch\.distributed\.run [-.\w ]+ )?(?:\.\./)?gpt\.py "
    shown = matches(rf"(?:{python}|`gpt\.py (?=[^ `]+ [^`\[A-Z]))([^\n|;`&]+)")
    assert len(shown) > 100
    for file, command in shown:
        words = shlex.split(command.replace("$part", "part1").replace("$n", "128"), comments=True)
        if words and "--help" not in words:
            with naming(file.name, command):
                command_of(words[0]).make_context("gpt.py", words[1:])


def test_every_named_option_exists():
    """Those in backquotes, of any command; --local-addr is torchrun's, --max_iters nanoGPT's."""
    known = {option for name in COMMANDS for each in command_of(name).params for option in each.opts}
    known |= {option for each in (*cli.params, *speedrun.params) for option in each.opts}
    known.update(("--help", "--local-addr", "--max_iters"))
    for file, option in matches(r"`(?:-\w+, )?(--\w[-\w]*)[^`\n]*`"):
        with naming(file.name, option):
            assert option in known


def test_a_listing_has_the_columns_and_rows_that_the_program_prints():
    titles = {"contender", *report.CASE.values(), *(title for title, _ in report.SHOWN.values())}
    blocks = matches(r"```text\n\$ python gpt\.py (?:bench|race|explain) [^\n]*\n(.*?)```", re.S)
    assert len(blocks) > 6
    explain = (ROOT / "lab/explain.py").read_text()
    for file, block in blocks:
        for label in re.findall(r"^([A-Za-z][\w /]+?) {2,}", block, re.M):
            with naming(file.name, label):
                assert label in explain
        rows = [re.split(r" \| ", line.strip("| \n")) for line in block.splitlines() if line.startswith("| ")]
        for row in rows:
            with naming(file.name, row):
                assert set(row) <= titles if row[0] == "contender" else contenders()[row[0]]


def test_a_listing_names_its_processor():
    """And so does a section with a time or a rate, or the head of its document."""
    names = r"Zen|EPYC|Xeon|NVIDIA|[HA][12]00|lavapipe|wine|qemu"
    figures = r"\d\.\d+ ms\b|\d [GT]FLOP/s|\d tokens/s"
    for file in DOCUMENTS:
        head, *sections = re.split(r"^## ", file.read_text(), flags=re.M)
        for section in sections:
            with naming(file.name, section[:60]):
                assert not re.search(figures, section) or re.search(names, head + section)


def test_a_figure_stands_in_one_document():
    """Where it is told again it is a link to the document that has it."""
    rates = {(file, rate) for file, rate in matches(r"(?<![\[\d.,])([\d.,]+ (?:tokens/s|[GT]FLOP/s))")}
    by_hand = [rate for file, rate in rates if file.parent.name != "results"]
    assert sorted(by_hand) == sorted(set(by_hand))
    links = matches(r"\[([\d.,]+) [^\]]*\]\(([^)#]*)#?[^)]*\)")
    assert len(links) > 3
    for file, (figure, link) in links:
        with naming(file.name, figure, link):
            assert figure in (file.parent / link).read_text()


def test_a_walk_is_short_and_a_section_shows_one_block_or_figure():
    for file in ROOT.glob("docs/learn/*.md"):
        assert len(file.read_text().splitlines()) <= 340, file.name
        for section in re.split(r"^#+ ", file.read_text(), flags=re.M)[1:]:
            output = re.findall(r"^```text\n\$ [^\n]+\n(.*?)^```", section, re.M | re.S)
            figures = len(re.findall(r"^!\[.*\]\(\.\./figures/", section, re.M))
            assert "".join(output).count("\n") <= 18 and figures + bool(output) <= 1, (
                file.name,
                section[:60],
            )


def test_the_lines_of_the_walk_are_the_kernels():
    """But for the change of two loops that is an exercise."""
    sources = "".join(file.read_text() for file in ROOT.glob("attention_ext/csrc/**/*.cpp"))
    walk = (ROOT / "docs/learn/attention.md").read_text()
    for block in re.findall(
        r"^```cpp\n(.*?)^```", re.sub(r"## V by rows.*?\n## ", "", walk, flags=re.S), re.M | re.S
    ):
        for line in block.splitlines():
            with naming(line):
                assert line.strip() == "..." or re.sub(r"  // .*", "", line).strip() in sources


def test_the_documents_call_python_in_one_way():
    """README makes and activates the virtual environment."""
    assert matches(r".*\.venv/bin/(?!activate).*") == []


def test_the_sample_is_what_the_command_writes(cli, extension):
    """Only the beginning is compared: rounding on another CPU may change the rest."""
    readme = (ROOT / "README.md").read_text()
    prompt = re.search(r'--inference -m (\S+) --prompt "(.*)"', readme)
    assert prompt
    common = ("part4", "--inference", "--num-samples", 1, "--max-new-tokens", 150)
    done = cli(*common, "-m", prompt[1], "--prompt", prompt[2])
    assert len(done.stdout) > 150
    assert done.stdout.rstrip("\n") in readme


def test_the_losses_are_the_records():
    text = (ROOT / "docs" / "use" / "train.md").read_text()
    for name in SHIPPED:
        record = json.loads((ROOT / "checkpoints" / name / "training.json").read_text())
        assert re.search(rf"^\| {name} \| \d+ \| {record['val_loss']:.4f} \|", text, re.M)
