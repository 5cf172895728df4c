"""Jobs in an S3 store, which moto's server stands for, and in one that renames."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import Mock

import pytest
from bulk_jobs import Death, here, processes

from shakespeare.generation.many import bulk
from shakespeare.generation.many.jobs import Manifest
from shakespeare.generation.many.stores import MANIFEST, open_store

with_moto = pytest.mark.filterwarnings("default")  # botocore's own warnings are no errors


@pytest.fixture
def bucket(monkeypatch):
    """A bucket's URL, and its s3fs, of a server in this process."""
    for package in ("moto.server", "s3fs"):
        pytest.importorskip(package, reason=f"{package.partition('.')[0]} is not installed")
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "testing"),
        ("AWS_SECRET_ACCESS_KEY", "testing"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
        ("FSSPEC_S3_ENDPOINT_URL", f"http://{host}:{port}"),
        ("AWS_ENDPOINT_URL", f"http://{host}:{port}"),
    ):
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    system = s3fs.S3FileSystem()
    system.mkdir("texts")
    open_store.cache_clear()
    yield "s3://texts/some/job", system
    system.rm("texts", recursive=True)  # moto keeps it for the next server of the process
    server.stop()
    s3fs.S3FileSystem.clear_instance_cache()
    open_store.cache_clear()


def objects(system) -> dict[str, str]:
    system.invalidate_cache()
    found = {path.rpartition("/")[2]: system.cat_file(path) for path in system.find("texts")}
    del found[MANIFEST]
    return {name: hashlib.sha256(data).hexdigest() for name, data in found.items()}


@with_moto
def test_processes_write_to_s3_and_the_job_goes_on(job, expected, bucket, cli, model, caplog):
    """The files' bytes are those of a folder, and going on compares ETags."""
    out, system = bucket
    with pytest.raises(KeyboardInterrupt):
        bulk.run(job, out, here(None, None, Death("gone"), KeyboardInterrupt()))
    assert len(objects(system)) == 2
    manifest = bulk.run(job, out, processes(2))
    assert manifest.content["complete"] and objects(system) == expected
    first, second, *_ = sorted(expected)
    with system.open(f"{out}/{first}", "wb") as file:
        file.write(b"changed")
    system.rm_file(f"{out}/{second}")
    bulk.run(job, out, here())
    assert objects(system) == expected
    assert any("2 files are missing or changed" in line for line in caplog.messages)
    read, open_file = [], system.open
    system.open = lambda path, *more: read.append(path) or open_file(path, *more)
    bulk.run(job, out, here())
    assert [path.rpartition("/")[2] for path in read if MANIFEST not in path] == []
    line = cli("bulk", "-m", model, "--texts", 3, "--out", "s3://nowhere/a", code=2).stderr
    assert line.count("\n") == 1 and "s3://nowhere/a" in line
    assert json.loads(system.cat_file(f"{out}/{MANIFEST}"))["complete"]


@with_moto
def test_two_jobs_at_once_write_the_same_or_one_is_refused(job, expected, bucket):
    """A URL has no lock: two equal jobs write each file twice. Of two that begin at once, one ends."""
    out, system = bucket
    Manifest(open_store(out), out, job).save()
    with ThreadPoolExecutor(2) as both:
        jobs = [both.submit(bulk.run, job, out, processes(1)) for _ in range(2)]
        assert all(each.result().content["complete"] for each in jobs)
    assert objects(system) == expected
    bulk.run(job, out, Mock(side_effect=AssertionError("nothing is left to do")))
    system.rm("texts/some", recursive=True)
    store = open_store(out)
    first, second = (Manifest(store, out, replace(job, texts=texts)) for texts in (9, 10))
    first.save()
    with pytest.raises(FileExistsError):
        second.save()
    first.save()


def test_an_unknown_store_is_refused_before_anything_is_compiled(failed):
    assert "out is 'nope://x': Protocol not known" in failed("bulk", "--texts", 4, "--out", "nope://x")


def test_a_store_that_renames_gets_a_temporary_name_first(tmp_path, monkeypatch):
    """A file is there whole or not at all also where fsspec's disk stands for an SFTP server."""
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
    local = fsspec.filesystem("file")
    store = open_store(f"local://{tmp_path}/a")
    put, seen = type(local).pipe_file, []

    def pipe(self, path, data):
        seen.append(path)
        put(self, path, data[:2])
        if data == b"fails":
            raise RuntimeError("the line is cut")
        put(self, path, data)

    monkeypatch.setattr(type(local), "pipe_file", pipe)
    with store.locked():
        stamp = store.write("texts-1", b"whole")
        with pytest.raises(OSError, match="RuntimeError: the line is cut"):
            store.write("texts-1", b"fails")
        assert (tmp_path / "a" / "texts-1").read_bytes() == b"whole" and store.files()["texts-1"] == stamp
        assert len(seen) == 2 and all(path.endswith(".unfinished") for path in seen)
        assert len(store.files()) == 2
    assert store.files().keys() == {"texts-1"}  # what was left is removed at the end
