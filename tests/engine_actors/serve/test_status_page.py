"""The status page in a real browser: headless Chromium renders what the server is doing. Skipped without one."""

from __future__ import annotations

import shutil
import subprocess
import threading
from pathlib import Path

import httpx
import pytest

from scheduler.output import SchedulerStats
from tests.engine_actors.serve.server import RunningServer
from tests.engine_actors.serve.test_lifecycle import WAIT_S, wait_for

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium")


def rendered(url: str, profile: Path) -> str:
    """The page's document after its first refresh."""
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
               "--virtual-time-budget=1500", "--dump-dom", url]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_page_shows_the_engine_and_each_request(server: RunningServer, http: httpx.Client, tmp_path: Path) -> None:
    server.hold()
    body = {"prompt": "Hello <b>big</b> world", "stream": True}
    request = threading.Thread(
        target=http.post, args=("/v1/completions",), kwargs={"json": body, "headers": {"X-Request-Id": "<i>mine"}}
    )
    request.start()
    assert server.llm.started.wait(WAIT_S)
    server.release(2)
    wait_for(server, lambda: next(iter(server.app.state.inflight)).num_generated == 2)
    server.call(lambda: server.model.metrics.observe_stats(SchedulerStats(7, 3, 0.625)))
    page = rendered(server.url, tmp_path)
    server.call(lambda: server.model.metrics.observe_stats(SchedulerStats()))
    server.release(1000)
    request.join(WAIT_S)
    assert '<b>7</b><span class="muted">running</span>' in page
    assert '<b>3</b><span class="muted">waiting</span>' in page
    assert "62.5 %" in page
    assert '<span class="ok">healthy</span>' in page
    assert "cmpl-&lt;i&gt;mine" in page
    assert "<td>running</td>" in page
