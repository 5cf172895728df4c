"""Many texts in files: the same bytes for any number of workers, after kills, full disks and restarts."""

import contextlib
import errno
import fcntl
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import tiny
from bulk_jobs import SIZE, SLOW, TEXTS, TOKENS, Death, asking, check, files, here, processes, rows, run
from support import ROOT

from shakespeare import generate, load
from shakespeare.attention_ext.cuda import driver
from shakespeare.generation.many import shards, stores, workers
from shakespeare.generation.many.jobs import MANIFEST, BulkError, Job, Prompts
from shakespeare.generation.many.shards import Task
from shakespeare.generation.many.workers import VISIBLE, Order, visible_gpus
from shakespeare.generation.sampling import Sampling
from shakespeare.model.checkpoint import save
from shakespeare.model.files import UNFINISHED, locked


def test_two_processes_write_the_same_bytes(job, expected, model, tmp_path):
    """Text i has the seed plus i."""
    states = []
    run(job, tmp_path, processes(2), progress=lambda now: states.append(now.texts))
    manifest = check(tmp_path, expected)
    assert states[0] == 0 and states[-1] == TEXTS and manifest["workers_lost"] == []
    (machine,) = manifest["machines"]
    assert machine.keys() >= {"engine", "processor", "instructions"} and "torch" not in machine
    usual = {"new_tokens": TOKENS, "finish_reason": "length"}
    for i in (0, 17, TEXTS - 1):
        text = generate(load(str(model)), max_new_tokens=TOKENS, seed=5 + i)
        assert rows(tmp_path)[i] == usual | {"index": i, "seed": 5 + i, "text": text}


def test_texts_that_begin_and_end_together_are_the_same(settings, model):
    """Up to 16 tokens fit the window with a prompt of one token, 11 with one of six."""
    checkpoint = load(str(model))
    for prompt, tokens in itertools.product(("a", "abcdef"), (0, 1, 11, 12, 16, 17)):
        ids = checkpoint.tokenizer.encode(prompt)
        scribe = shards.Scribe(asking(settings, ids=ids, max_new_tokens=tokens))
        data, _ = scribe.write(Task("", 3, 5))
        for i, line in enumerate(data.decode().splitlines(), 3):
            text = generate(checkpoint, prompt, tokens, seed=5 + i)
            row = {"index": i, "seed": 5 + i, "text": text, "new_tokens": tokens, "finish_reason": "length"}
            assert line == json.dumps(row, ensure_ascii=False), (prompt, tokens)


def test_an_eos_token_ends_texts(settings, model, tmp_path):
    """Of a prompt that all texts share, and of lines."""
    save(tmp_path, tiny.gpt(eos_token_id=(3,)), tiny.VOCABULARY, {})
    ending = replace(settings, model=str(tmp_path), fingerprint=shards.fingerprint(load(tmp_path)))
    assert ending.fingerprint != settings.fingerprint
    scribes = [shards.Scribe(asking(ending, max_new_tokens=12, ignore_eos=each)) for each in (True, False)]
    lines = [json.dumps({"id": i, "prompt": ""}).encode() for i in range(9)]
    for task in Task("", 0, 9), Task("", 0, 9, lines):
        whole, cut = (map(json.loads, scribe.write(task)[0].splitlines()) for scribe in scribes)
        for text, line in zip(whole, cut, strict=True):
            assert line["text"] == text["text"].partition("b")[0] and line["new_tokens"] == len(line["text"])
            assert line["finish_reason"] == ("stop" if "b" in text["text"] else "length")


def test_workers_share_each_of_the_visible_gpus(job, tmp_path, monkeypatch):
    """No GPU is needed to see which one a process would take."""
    monkeypatch.setattr(driver, "count", lambda: 3)
    assert visible_gpus(None) == ["0", "1", "2"] and visible_gpus(2) == ["0", "1"]
    monkeypatch.setenv(VISIBLE, "5,GPU-7,6")
    assert visible_gpus(2) == ["5", "GPU-7"]
    with pytest.raises(BulkError, match="--gpus is 4; this process may use 3"):
        visible_gpus(4)
    with workers.here("cuda", 4, 2) as opened:
        made = opened(Order(job.settings, SIZE, str(tmp_path)), 9)
    assert [worker.gpu for worker in made] == ["5", "GPU-7", "5", "GPU-7"]
    with workers.here("cuda", 2, 2) as opened:
        manifest = run(job, tmp_path, opened)
    devices = {shard["device"].partition(" GPU ")[2] for shard in manifest["shards"].values()}
    assert devices == {"5", "GPU-7"} and manifest["complete"]


@pytest.mark.full
@pytest.mark.parametrize("stop", [(), ("a", "bc")])
def test_the_cuda_engine_writes_the_same_texts(emulated, monkeypatch, settings, model, tmp_path, stop):
    emulated(monkeypatch, 32, (2,))
    for device, engine in (("cpu", "native"), ("cuda", "cuda")):
        chosen = replace(settings, engine=replace(settings.engine, device=device, br=None, bc=None))
        manifest = run(Job(asking(chosen, max_new_tokens=9, stop=stop), 11, 8), tmp_path / device)
        (machine,) = manifest["machines"]
        assert manifest["request"]["device"] == device and machine["engine"].startswith(engine)
    assert rows(tmp_path / "cuda") == rows(tmp_path / "cpu")


def command(model, out, tokens=TOKENS) -> list[str]:
    given = f"--texts {TEXTS} --shard-size {SIZE} --max-new-tokens {tokens} --seed 5 --workers 1".split()
    return [sys.executable, str(ROOT / "gpt.py"), "bulk", "-m", str(model), "--out", str(out), *given]


def wait_for_group(process) -> None:
    """Wait until all processes of a killed driver's group have ended."""
    with contextlib.suppress(ProcessLookupError):
        while True:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-process.pid, os.WNOHANG)  # those that this process adopted
            os.killpg(process.pid, 0)
            time.sleep(0.05)


def started(model, out) -> subprocess.Popen:
    """A slow job in a process group of its own, once its first file is there."""
    given = command(model, out, SLOW)
    process = subprocess.Popen(given, start_new_session=True, stderr=subprocess.PIPE, text=True)
    while not files(out):
        time.sleep(0.01)
        assert process.poll() is None
    return process


@pytest.mark.full
def test_a_killed_driver_leaves_no_worker_and_is_resumed(slow, slow_expected, model, tmp_path):
    process = started(model, tmp_path)
    process.kill()
    process.wait()
    process.stderr.close()  # its workers have it too, so it may have no end
    wait_for_group(process)
    assert 0 < len(files(tmp_path)) < len(slow_expected)
    run(slow, tmp_path)
    check(tmp_path, slow_expected)


@pytest.mark.full
def test_ctrl_c_stops_and_the_command_goes_on(model, slow_expected, tmp_path, cli):
    process = started(model, tmp_path / "out")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, err = process.communicate()
    assert process.returncode == 130 and "Traceback" not in err
    assert "the same command goes on" in err and err.count("\n") <= 2
    wait_for_group(process)
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    assert not manifest["complete"] and len(manifest["shards"]) < len(slow_expected)
    done = cli(*command(model, tmp_path / "out", SLOW)[2:])
    assert f"{TEXTS} texts, {TEXTS * SLOW:,} tokens in 12 files" in done.stderr
    check(tmp_path / "out", slow_expected)
    cli(*command(model, tmp_path / "out", SLOW)[2:])  # nothing is left to do


def test_another_request_is_refused(job, settings, tmp_path):
    run(job, tmp_path)
    others = {
        "seed": replace(job, settings=asking(settings, seed=6)),
        "texts": replace(job, texts=TEXTS + 1),
        "shard_size": replace(job, shard_size=5),
        "fingerprint": replace(job, settings=replace(settings, fingerprint="0")),
        "sampling": replace(job, settings=asking(settings, sampling=Sampling(top_k=3))),
    }
    for name, other in others.items():
        with pytest.raises(BulkError, match=rf"holds texts of another request \({name}\)"):
            run(other, tmp_path)
    run(replace(job, settings=replace(settings, model="elsewhere")), tmp_path)


def test_a_random_seed_is_recorded_and_goes_on(job, settings, tmp_path):
    first, other = (replace(job, settings=asking(settings, seed=-1), drawn=True) for _ in range(2))
    with pytest.raises(KeyboardInterrupt):
        run(first, tmp_path, here(None, KeyboardInterrupt()))
    seed = json.loads((tmp_path / MANIFEST).read_text())["request"]["seed"]
    assert seed >= 0 and run(other, tmp_path)["complete"]
    run(replace(job, settings=asking(settings, seed=seed)), tmp_path / "again")
    assert files(tmp_path) == files(tmp_path / "again")


def test_files_that_are_missing_or_changed_are_written_again(job, expected, tmp_path, caplog, monkeypatch):
    """Only a file with another size or time is read; --verify reads all."""
    run(job, tmp_path)
    first, second, third, fourth, *_ = sorted(expected)
    (tmp_path / first).write_text("changed")
    (tmp_path / second).unlink()
    os.utime(tmp_path / third)  # copied, say
    (tmp_path / fourth).write_bytes(data := (tmp_path / fourth).read_bytes().replace(b"a", b"b"))
    stamp = json.loads((tmp_path / MANIFEST).read_text())["shards"][fourth]["stamp"]
    assert stamp[0] == len(data)
    os.utime(tmp_path / fourth, (float(stamp[1]),) * 2)
    left = tmp_path / f"{first}.0123abcd{UNFINISHED}"
    foreign = [tmp_path / name for name in (f"x{UNFINISHED}", f"{first}{UNFINISHED}", "lock")]
    for path in (left, *foreign):
        path.write_text("half")
    opened = Mock(side_effect=stores.Store.open, autospec=True)
    monkeypatch.setattr(stores.Store, "open", lambda *given: opened(*given))
    run(job, tmp_path)
    assert {call.args[1] for call in opened.call_args_list} == {MANIFEST, first, third}
    run(job, tmp_path, verify=True)
    assert not left.exists() and all(path.read_text() == "half" for path in foreign)
    for path in foreign:
        path.unlink()
    again = "files are missing or changed, the first is"
    assert [line.partition(";")[0] for line in caplog.messages] == [
        f"2 {again} {first}",
        f"1 {again} {fourth}",
    ]
    check(tmp_path, expected)


def test_a_directory_that_is_not_the_jobs_is_refused(job, tmp_path):
    (tmp_path / "texts-1.jsonl").write_text("mine")
    with pytest.raises(BulkError, match="has texts, but no manifest.json"):
        run(job, tmp_path)
    (tmp_path / "texts-1.jsonl").unlink()
    for text in ("", "{", "[]", "{}", '{"version": 3}', "\udcff"):
        (tmp_path / MANIFEST).write_bytes(os.fsencode(text))
        with pytest.raises(BulkError, match="manifest.json cannot be continued"):
            run(job, tmp_path)
    (tmp_path / MANIFEST).unlink()
    run(job, tmp_path)
    content = json.loads((tmp_path / MANIFEST).read_text())
    shards, machines = content["shards"], content["machines"]
    first = min(shards)
    for change, why in (
        ({"request": [1]}, "request is a list"),
        ({"shards": {**shards, first: {}}}, "stamp"),
        ({"shards": {**shards, first: {**shards[first], "tokens": "9"}}}, "unsupported operand"),
        ({"shards": {**shards, first: {**shards[first], "rejected": 1}}}, "has no len"),
        ({"machines": machines[0]}, "machines is a dict"),
        ({"workers_lost": 1}, "workers_lost is an int"),
    ):
        (tmp_path / MANIFEST).write_text(json.dumps(content | change))
        with pytest.raises(
            BulkError, match=rf"manifest.json cannot be continued \(.*{re.escape(why)}.*\); remove it"
        ):
            run(job, tmp_path)
    (tmp_path / MANIFEST).write_text(json.dumps(content | {"version": 1}))
    with pytest.raises(BulkError, match="its version is 1; this program writes 3"):
        run(job, tmp_path)


def test_one_process_at_a_time_has_a_folder_and_its_lock_is_removed(job, tmp_path, monkeypatch):
    lock = tmp_path / stores.LOCK
    taken = rf"another process \({os.getpid()}\) writes texts in"
    lock.write_text("1")  # of a killed process
    with locked(lock, "writes texts"), pytest.raises(ValueError, match=taken):
        run(job, tmp_path)
    assert not lock.exists()
    (other := tmp_path / "other").write_text("mine")
    lock.symlink_to(other)
    with pytest.raises(OSError, match=r"symbolic links: .*\.texts\.lock"):
        run(job, tmp_path)
    lock.unlink()
    lock.write_bytes(b"mine\xff")
    with pytest.raises(ValueError, match=r"\.texts\.lock is not a lock of this program"):
        run(job, tmp_path)
    assert lock.read_bytes() == b"mine\xff" and other.read_text() == "mine"
    lock.unlink()
    flock = fcntl.flock

    def late(file, how):
        monkeypatch.setattr(fcntl, "flock", flock)
        lock.unlink()  # its owner ends after this process has opened it
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with locked(lock, "writes texts"), pytest.raises(ValueError, match=taken):
        run(job, tmp_path)


def test_a_disk_without_locks_and_fsync_gives_a_warning(job, expected, tmp_path, monkeypatch):
    for number in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL):
        error = OSError(number, os.strerror(number))
        monkeypatch.setattr(fcntl, "flock", Mock(side_effect=error))
        monkeypatch.setattr(os, "fsync", Mock(side_effect=error))
        with pytest.warns(UserWarning, match=rf"no fsync \({error.strerror}\)"):
            with pytest.warns(UserWarning, match=rf"the disk has no file locks \({error.strerror}\)"):
                run(job, tmp_path / str(number))
        check(tmp_path / str(number), expected)


def test_a_shard_that_fails_again_and_again_is_left_out(job, expected, tmp_path, caplog):
    once = Death("kaboom")
    faults = [once, *[None] * 11, once, once]  # the first task, then its retries after all others
    manifest = run(job, tmp_path, here(*faults))
    name = min(expected)
    assert not manifest["complete"] and len(manifest["workers_lost"]) == 3
    assert manifest["failed"] == {name: "Death: kaboom"}
    assert caplog.messages == [f"{name} was left out after 3 attempts: Death: kaboom"]
    manifest = run(job, tmp_path)
    assert manifest["failed"] == {}
    check(tmp_path, expected)
    with pytest.raises(BulkError, match="no worker wrote anything in 5 attempts: Death: kaboom"):
        run(job, tmp_path / "dead", here(*[once] * 5))


@pytest.mark.parametrize("step", ["shard", "manifest"])
def test_a_full_disk_leaves_whole_files(job, expected, tmp_path, monkeypatch, step):
    sync, calls = os.fsync, []

    def full(handle):
        calls.append(handle)
        if len(calls) >= {"shard": 7, "manifest": 9}[step]:  # a file, its directory, and the next one
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device") as error:
        run(job, tmp_path)
    assert str(tmp_path) in str(error.value.filename)
    monkeypatch.undo()
    assert not list(tmp_path.glob(f"*{UNFINISHED}")) and 0 < len(files(tmp_path)) < len(expected)
    run(job, tmp_path)
    check(tmp_path, expected)


GOOD = [
    {"id": "a", "prompt": "abc"},
    {"id": 7, "prompt": "d", "options": {"max_new_tokens": 3, "temperature": 0}},
    {"id": "b", "prompt": "a", "options": {"seed": 99, "stop": "b", "top_k": 4, "top_p": 0.9}},
    {"id": "n", "prompt": "a", "options": dict.fromkeys(("seed", "temperature", "stop", "context"))},
    {"id": "r", "prompt": "a", "options": {"seed": -1, "max_new_tokens": -1, "top_k": 0}},
    {"id": "c", "prompt": "a", "options": {"context": "reset", "stop": ["b", "c"], "min_p": 0.1}},
]
HALF = '{"id": "\\ud800", "prompt": "a"}'
MALFORMED = {
    "{": "Expecting",
    "[]": "the line is a list; it must be an object",
    '{"id": 1}': "prompt must be a string",
    '{"prompt": "a"}': "id must be a string or a whole number",
    '{"id": true, "prompt": "a"}': "id must be",
    HALF: "surrogates not allowed",
    '{"id": 1, "prompt": "xyz"}': "does not know 3 of the text's characters",
    '{"id": 1, "prompt": "a", "more": 1}': "the line has 'more'",
    '{"id": 1, "prompt": "a", "options": []}': "options is a list; it must be an object",
    '{"id": 1, "prompt": "a", "options": {"colour": 1}}': "options has 'colour'; it must be one of",
    '{"id": 1, "prompt": "a", "options": {"temperature": NaN}}': "temperature is nan",
    '{"id": 1, "prompt": "a", "options": {"temperature": 1%s}}' % ("0" * 400): "must be a number of",
    '{"id": 1, "prompt": "a", "options": {"max_new_tokens": null}}': "max_new_tokens must be",
    '{"id": 1, "prompt": "a", "options": {"max_new_tokens": 99999999}}': "at most 1048576",
    '{"id": 1, "prompt": "a", "options": {"stop": 1}}': "stop is an int; it must be a string or several",
    '{"id": 1, "prompt": "a", "options": {"stop": [""]}}': "stop is ['']",
    "\udcff": "can't decode",
    "[" * 100000: "recursion",
}


@pytest.fixture
def prompts(tmp_path) -> Path:
    """Good and malformed lines in turn, and empty ones."""
    lines = list(MALFORMED)
    for i, good in enumerate(GOOD):
        lines.insert(5 * i, json.dumps(good))
    lines[3:3] = ["", "  "]
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(os.fsencode("\n".join(lines)))  # the last line has no end
    return path


def test_prompts_from_a_file(settings, model, prompts, tmp_path, caplog):
    found = Prompts(prompts, SIZE)
    assert found.lines == len(GOOD) + len(MALFORMED) + 2
    job = Job(asking(settings, max_new_tokens=30), found.lines, SIZE, found)
    manifest = run(job, tmp_path / "out")
    reported = caplog.messages
    written = rows(tmp_path / "out")
    assert [row["id"] for row in written] == [good["id"] for good in GOOD]
    lines = prompts.read_bytes().split(b"\n")
    for row, good in zip(written, GOOD):
        assert json.loads(lines[row["index"]]) == good
        given = good.get("options", {})
        options = {name: given[name] for name in given if given[name] is not None}
        if options.get("seed") == -1:
            del options["seed"]
        options = {"seed": 5 + row["index"], "max_new_tokens": 30} | options
        assert row["text"] == generate(load(str(model)), good["prompt"], **options)
    rejected = [each for shard in manifest["shards"].values() for each in shard["rejected"]]
    assert manifest["complete"] and len(rejected) == len(MALFORMED) == len(reported)
    for each, line in zip(rejected, reported):
        text = os.fsdecode(lines[each["line"] - 1])
        assert MALFORMED[text] in each["error"], each
        assert line == f"line {each['line']}: {each['error']}"
    (again := tmp_path / "again").write_text("{}")
    for change in (
        lambda: prompts.write_bytes(prompts.read_bytes() + b"\n"),
        lambda: os.replace(again, prompts),
    ):
        other = replace(job, prompt=Prompts(prompts, SIZE))
        change()
        with pytest.raises(BulkError, match="was changed while the job ran"):
            run(other, tmp_path / other.prompt.sha256)
        assert not files(tmp_path / other.prompt.sha256)
    with pytest.raises(BulkError, match=r"another request \(.*prompt\)"):
        run(replace(job, prompt=Prompts(prompts, SIZE)), tmp_path / "out")


def test_a_prompts_file_of_a_windows_editor_gives_the_same_texts(settings, tmp_path):
    lines = [{"id": 0, "prompt": "a\nb"}, {"id": 1, "prompt": "c", "options": {"stop": "\n"}}]
    for mark, end in (("", "\n"), ("\ufeff", "\r\n")):
        changed = [mark + json.dumps(line).replace("\\n", json.dumps(end)[1:-1]) + end for line in lines]
        (path := tmp_path / f"prompts{len(mark)}").write_bytes("".join(changed).encode())
        job = Job(settings, 2, 1, Prompts(path, 1))
        run(job, tmp_path / f"out{len(mark)}")
    assert rows(tmp_path / "out0") == rows(tmp_path / "out1") and len(rows(tmp_path / "out1")) == 2


def test_a_row_is_a_line_whatever_its_strings_hold():
    hostile = ['}, {"index": ', "}, {", '"}, {"index": 1', "\n", "\u2028", "\\", '\\"}, {"index": ']
    made = [{"index": i, "id": a, "text": b} for i, (a, b) in enumerate(zip(hostile, hostile[1:]))]
    for some in ([], made[:1], made):
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in some]
        assert shards.in_jsonl(some).decode() == "".join(lines)


def test_parquet(job, settings, model, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    run(job, tmp_path / "lines")
    for out in ("a", "b"):
        run(replace(job, settings=replace(settings, format="parquet")), tmp_path / out)
    assert files(tmp_path / "a", "parquet") == files(tmp_path / "b", "parquet")
    tables = [parquet.read_table(file) for file in sorted((tmp_path / "a").glob("*.parquet"))]
    assert [row for table in tables for row in table.to_pylist()] == rows(tmp_path / "lines")


def test_wrong_requests_are_one_line(failed, model):
    for given, line in (
        ([], "give --texts N or --prompts FILE"),
        (["--prompts", "p", "--texts", 3], "--texts does not go with --prompts"),
        (["--prompts", "nowhere"], "nowhere: No such file"),
        (["--prompts", os.devnull], f"{os.devnull} is empty; it must have a prompt in each line"),
        (["--texts", 2**62, "--seed", 2**63 - 5], "the last text's must be less than 2**63"),
        (["--texts", 3, "--part", "part0", "--engine", "native"], "engine is 'native'"),
        (["--texts", 3, "--gpus", 2], "--gpus goes with --device cuda only"),
    ):
        assert line in failed("bulk", "-m", model, "--out", "o", *given)
