"""The server's speed, measured by NVIDIA's AIPerf, an independent tool.

    python3 -m venv ENV && ENV/bin/pip install aiperf==0.13.0
    python benchmarks/load.py --aiperf ENV/bin/aiperf [-m shakes256] [--streams 32] [--requests 960]

The server has one core, AIPerf another. `usage` counts the tokens, because an event holds several. Both
programs' shares of their cores are printed: the one at 100 % is the bottleneck.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
# A script's own folder comes first on the path; a file there could hide a package of its name.
sys.path[:] = [str(ROOT), *(folder for folder in sys.path if folder != str(ROOT / "benchmarks"))]

from attention_ext import processor  # noqa: E402
from benchmarks.servers import OWN, TICKS, Process, start  # noqa: E402
from model import load as load_model  # noqa: E402

CORES = sorted(os.sched_getaffinity(0))
PROMPT = "ROMEO:"
SAMPLE_SECONDS = 0.1


def write_tokenizer(folder: Path, model: str) -> None:
    """The model's vocabulary in Hugging Face's format, so that AIPerf downloads no other."""
    tokenizer = load_model(model).tokenizer
    vocabulary = {tokenizer.decoder().feed(token): token for token in range(len(tokenizer))}
    whole = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def session_seconds(session: int) -> float:
    """CPU time so far of all processes of a session."""
    total = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[3]) == session:
            total += int(fields[11]) + int(fields[12])
    return total / TICKS


@dataclass
class Load:
    """AIPerf's export, and samples of (time, its CPU time, the server's CPU time) while it ran."""

    figures: dict
    samples: list[tuple[float, float, float]]

    def figure(self, name: str, statistic: str = "avg") -> float:
        """One of AIPerf's figures."""
        return self.figures[name][statistic]

    def shares(self) -> tuple[float, float]:
        """The shares of a core that AIPerf and the server used during the measured requests."""
        begin, end = (
            datetime.fromisoformat(self.figures[f"{at}_time"]).timestamp() for at in ("start", "end")
        )
        first = min(self.samples, key=lambda sample: abs(sample[0] - begin))
        last = min(self.samples, key=lambda sample: abs(sample[0] - end))
        seconds = max(last[0] - first[0], 1e-9)
        return (last[1] - first[1]) / seconds, (last[2] - first[2]) / seconds


def measure(command: list[str], out: Path, server: Process) -> Load:
    """Run AIPerf. Raises click.ClickException if it fails."""
    samples = []
    with tempfile.TemporaryFile("w+") as said:
        child = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
        while child.poll() is None:
            samples.append((time.time(), session_seconds(child.pid), server.cpu_seconds()))
            time.sleep(SAMPLE_SECONDS)
        if child.returncode:
            said.seek(0)
            raise click.ClickException(f"AIPerf failed: {said.read()[-4000:]}")
    return Load(json.loads((out / "profile_export_aiperf.json").read_text()), samples)


@click.command()
@click.option("--aiperf", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-m", "--model", default="shakes256", show_default=True)
@click.option("--streams", type=click.IntRange(1, 512), default=32, show_default=True)
@click.option("--requests", type=click.IntRange(1), default=960, show_default=True)
@click.option("--tokens", type=click.IntRange(2), default=240, show_default=True, help="Tokens of each text.")
@click.option("--interval", type=click.IntRange(0), default=16, show_default=True, help="Event interval, ms.")
@click.option("--core", type=click.IntRange(0), default=CORES[0], help="Server's.  [default: first]")
@click.option("--client-core", type=click.IntRange(0), default=CORES[-1], help="AIPerf's.  [default: last]")
def main(
    aiperf: Path,
    model: str,
    streams: int,
    requests: int,
    tokens: int,
    interval: int,
    core: int,
    client_core: int,
) -> None:
    """Print AIPerf's figures."""
    os.sched_setaffinity(0, {client_core})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(folder, model)
        (folder / "prompts.jsonl").write_text(json.dumps({"text": PROMPT}) + "\n")
        server = start(OWN, model, streams, core, folder)
        try:
            options = {"include_usage": True, "interval_ms": interval}
            command = [aiperf, "profile", "--model", model, "--url", f"http://127.0.0.1:{server.port}"]
            command += ["--endpoint-type", "completions", "--streaming", "--use-server-token-count"]
            command += ["--tokenizer", folder, "--input-file", folder / "prompts.jsonl"]
            command += ["--custom-dataset-type", "single_turn", "--concurrency", streams]
            command += ["--request-count", requests, "--warmup-request-count", streams]
            command += ["--extra-inputs", json.dumps({"max_tokens": tokens, "stream_options": options})]
            command += ["--ui", "none", "--no-gpu-telemetry", "--artifact-dir", folder / "out"]
            load = measure(list(map(str, command)), folder / "out", server)
        finally:
            server.end()
    aiperf_share, server_share = load.shares()
    click.echo(
        f"{processor.microarchitecture() or processor.name()}; {model}, {requests} texts of {tokens} tokens, "
        f"{streams} at once, load average {os.getloadavg()[0]:.1f}"
    )
    first = [load.figure("time_to_first_token", which) for which in ("p50", "p99")]
    click.echo(
        f"{load.figure('output_token_throughput'):,.0f} tokens/s; first token: median {first[0]:.0f} ms, "
        f"99th of a hundred {first[1]:.0f} ms; "
        f"share of a core: server {server_share:.0%}, AIPerf {aiperf_share:.0%}"
    )
    if (written := load.figure("total_output_tokens")) != requests * tokens:
        raise click.ClickException(f"AIPerf counted {written:.0f} tokens, not {requests * tokens}")


if __name__ == "__main__":
    main()
