"""Where states are kept: on a disk and in a bucket alike. The bucket is pyarrow's, over a folder of this machine."""

from __future__ import annotations

import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

from orchestrator.execution.checkpoints import RunCheckpoint, owner_of
from orchestrator.execution.job import Job
from orchestrator.execution.verdict import Verdict
from orchestrator.tracking.shelf import BucketShelf, LocalShelf, Shelf, keeps_states, shelf_of
from orchestrator.trial import Finding
from orchestrator.workload import WorkloadConfig

URI = "s3://bucket/lab/run one/artifacts"
JOB = Job(1, 2, 3, 1, "run", "toy", {}, "val/loss", False, 10, 10, 0, URI)
OWNER = owner_of("toy", WorkloadConfig())


class Sink:
    def __init__(self) -> None:
        self.findings: list[str] = []

    stopping = False

    def finding(self, job: Job, finding: Finding) -> None:
        self.findings.append(finding.message)

    def sync(self) -> None:
        """There are no reports."""


@pytest.fixture
def bucket_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the objects of `URI`'s shelf lie."""
    system = SubTreeFileSystem(str(tmp_path), LocalFileSystem())
    monkeypatch.setattr(BucketShelf, "_system", system)
    folder = tmp_path / "bucket/lab/run one/artifacts-checkpoints"
    folder.mkdir(parents=True)  # a bucket needs none
    return folder


@pytest.fixture(params=["disk", "bucket"])
def shelf(request: pytest.FixtureRequest, tmp_path: Path, bucket_folder: Path) -> Shelf:
    return LocalShelf(tmp_path / "states") if request.param == "disk" else BucketShelf(f"{URI}-checkpoints")


def test_a_file_on_a_shelf_is_read_back_whole_and_by_its_first_line(shelf: Shelf) -> None:
    assert shelf.names() == []
    shelf.write("step-1", [b"head\n", b"x" * 3_000_000])
    assert shelf.names() == ["step-1"]
    with shelf.opened("step-1") as (file, size_bytes):
        assert size_bytes == 3_000_005
        assert file.readline(100) == b"head\n"
        assert file.tell() == 5
        assert file.read() == b"x" * 3_000_000


def test_a_file_that_is_written_again_is_the_later_one_and_one_that_is_removed_is_gone(shelf: Shelf) -> None:
    shelf.write("a", [b"first"])
    shelf.write("a", [b"2nd"])
    with shelf.opened("a") as (file, size_bytes):
        assert (file.read(), size_bytes) == (b"2nd", 3)
    shelf.remove("a")
    shelf.remove("a")
    with pytest.raises(FileNotFoundError), shelf.opened("a"):
        pass
    shelf.write("b", [b""])
    shelf.clear()
    assert shelf.names() == []


def test_a_state_in_a_bucket_is_gone_on_from_and_a_torn_one_falls_back_to_the_one_before(bucket_folder: Path) -> None:
    first = RunCheckpoint(JOB, OWNER, Sink(), Verdict(JOB))
    assert first.due(10)
    for step in (10, 20, 30):
        first.save(step, b"state %d" % step)
    assert sorted(path.name for path in bucket_folder.iterdir()) == ["step-20.attempt-1", "step-30.attempt-1"]
    newest = bucket_folder / "step-30.attempt-1"
    newest.write_bytes(newest.read_bytes()[:-1])
    again, sink = replace(JOB, attempt=2, first_step=21), Sink()
    assert RunCheckpoint(again, OWNER, sink, Verdict(again)).load() == b"state 20"
    assert sink.findings == ["the checkpoint of step 30 is not used: it was not written to its end"]


def test_states_are_kept_on_disks_and_in_buckets_and_nowhere_else() -> None:
    assert all(keeps_states(root) for root in ("/data", "file:///data", "s3://bucket/lab", "gs://bucket"))
    assert not keeps_states("hdfs://node/lab")
    assert shelf_of("mlflow-artifacts:/1/run/artifacts") is None


class EmptyBucket(BaseHTTPRequestHandler):
    """Answers as an S3 server whose bucket is empty, and remembers what it was asked."""

    asked: ClassVar[list[str]] = []
    answer = (
        b'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><KeyCount>0</KeyCount></ListBucketResult>'
    )

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.answer)))
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on the terminal."""


def test_another_s3_server_is_asked_where_mlflow_is_told_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), EmptyBucket)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "a word")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")  # else the library looks for the cloud it may run in
    monkeypatch.setenv("MLFLOW_S3_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    assert BucketShelf(f"{URI}-checkpoints").names() == []
    server.shutdown()
    server.server_close()
    assert EmptyBucket.asked[0].startswith("/bucket?")
    assert "lab%2Frun%20one%2Fartifacts-checkpoints" in EmptyBucket.asked[0]
