"""The server's speed, measured by NVIDIA's AIPerf, an independent tool.

    python3 -m venv ENV && ENV/bin/pip install aiperf==0.13.0
    python -m benchmarks.load --aiperf ENV/bin/aiperf [-m shakes256] [--streams 32] [--requests 960]

The server has one core, AIPerf another. `usage` counts the tokens, because an event holds several. Both
programs' shares of their cores are printed: the one at 100 % is the bottleneck.
"""

import json
import os
import subprocess
import tempfile
import time
from datetime import datetime
from pathlib import Path

import click

from app.cli.options import file, whole
from attention_ext import processor
from benchmarks import servers
from benchmarks.servers import OWN, PROMPT, Process, cpu_seconds, start
from model import load

SAMPLE_SECONDS = 0.1


def write_tokenizer(folder: Path, model: str) -> None:
    """The model's vocabulary in Hugging Face's format, so that AIPerf downloads no other."""
    tokenizer = load(model).tokenizer
    vocabulary = {tokenizer.decoder().feed(token): token for token in range(len(tokenizer))}
    whole = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def measure(command: list[str], out: Path, server: Process) -> tuple[dict, float, float]:
    """AIPerf's figures, and the shares of a core that it and the server used during the measured requests.

    Raises click.ClickException if it fails.
    """
    samples = []  # time, AIPerf's CPU time, the server's
    with tempfile.TemporaryFile("w+") as said:
        child = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
        while child.poll() is None:
            samples.append((time.time(), cpu_seconds(child.pid), server.cpu_seconds()))
            time.sleep(SAMPLE_SECONDS)
        if child.returncode:
            said.seek(0)
            raise click.ClickException(f"AIPerf failed: {said.read()[-4000:]}")
    figures = json.loads((out / "profile_export_aiperf.json").read_text())
    begin, end = (datetime.fromisoformat(figures[f"{at}_time"]).timestamp() for at in ("start", "end"))
    first, last = (min(samples, key=lambda sample: abs(sample[0] - at)) for at in (begin, end))
    seconds = max(last[0] - first[0], 1e-9)
    return figures, (last[1] - first[1]) / seconds, (last[2] - first[2]) / seconds


@click.command()
@file("--aiperf", "AIPerf's program.", required=True, exists=True)
@whole("--requests", "Texts in all.", default=960, show_default=True)
@whole("--interval", "Event interval, ms.", least=0, default=16, show_default=True)
@servers.options
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
            figures, own, served = measure(list(map(str, command)), folder / "out", server)
        finally:
            server.end()
    click.echo(
        f"{processor.microarchitecture() or processor.name()}; {model}, {requests} texts of {tokens} tokens, "
        f"{streams} at once, load average {os.getloadavg()[0]:.1f}"
    )
    first = figures["time_to_first_token"]
    click.echo(
        f"{figures['output_token_throughput']['avg']:,.0f} tokens/s; "
        f"first token: median {first['p50']:.0f} ms, 99th of a hundred {first['p99']:.0f} ms; "
        f"share of a core: server {served:.0%}, AIPerf {own:.0%}"
    )
    if (written := figures["total_output_tokens"]["avg"]) != requests * tokens:
        raise click.ClickException(f"AIPerf counted {written:.0f} tokens, not {requests * tokens}")


if __name__ == "__main__":
    main()
