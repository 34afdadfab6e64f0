"""What a server says of itself before it is measured. Used by `engine-actors bench serve`."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import aiohttp

POLL_S = 0.5


@dataclass(frozen=True)
class ServedFacts:
    """A model at a server.

    Attributes:
        root: Where it came from, as the server says; its name if it says nothing.
    """

    name: str
    root: str


async def served_model(url: str, api_key: str | None, name: str | None, timeout_s: float) -> ServedFacts:
    """The model `name`, or the first; waits for a server that is just starting.

    Raises:
        TimeoutError: No server answered in time.
        ValueError: The server has no such model, or refuses the key.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    deadline_s = time.monotonic() + timeout_s
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"{url}/v1/models", headers=headers) as response:
                    if response.status == 200:
                        cards = (await response.json())["data"]
                        break
                    if response.status < 500:
                        raise ValueError(f"{url}/v1/models answered {response.status}: {await response.text()}")
                    problem = f"HTTP {response.status}"
            except aiohttp.ClientError as error:
                problem = str(error)
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"no server at {url} within {timeout_s:g} s: {problem}")
            await asyncio.sleep(POLL_S)
    for card in cards:
        if name in (None, card["id"]):
            return ServedFacts(card["id"], card.get("root") or card["id"])
    raise ValueError(f"--model {name!r} is not served at {url}; there are {', '.join(card['id'] for card in cards)}")
