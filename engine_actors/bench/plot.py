"""A picture of latency against request rate. Used by `engine-actors bench serve --plot`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def plot_latency(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a PNG: median TTFT and ITL, and their percentiles, against the rate that was reached.

    Args:
        rows: Figures of `load_figures` at different rates.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install 'engine-actors[bench]'") from error
    rows = sorted(rows, key=lambda row: row["request_throughput"])
    rates = [row["request_throughput"] for row in rows]
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    names = [name for name in ("ttft", "itl", "tpot", "e2el") if f"median_{name}_ms" in rows[0]][:2]
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for key in sorted(
            key for key in rows[0] if key.endswith(f"_{name}_ms") and not key.startswith(("mean", "std"))
        ):
            axes.plot(rates, [row[key] for row in rows], marker="o", label=key.removesuffix(f"_{name}_ms"))
        axes.set(xlabel="requests per second", ylabel=f"{name.upper()} (ms)", title=name.upper())
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f"{rows[0].get('model_id', '')}, {rows[0].get('num_prompts', '')} requests at each rate")
    figure.savefig(path, format="png", dpi=120)
