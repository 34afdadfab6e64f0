"""What `ModelConfig.quantization` means for the packed weights. Asked by whoever packs a model's weights."""

from __future__ import annotations

from dataclasses import dataclass

from executors.kernels.abi import WeightFormat


@dataclass(frozen=True)
class WeightFormats:
    """Formats of a model's weights. Linear layers whose results go through a softmax have fine inputs (measured).

    Attributes:
        layers: Of the linear layers between embedding and head.
        vocabulary: Of embedding and head, which may be one matrix, and of which a token reads single rows.
    """

    layers: WeightFormat = WeightFormat.BF16
    vocabulary: WeightFormat = WeightFormat.BF16


_FORMATS = {
    None: WeightFormats(),
    "int8": WeightFormats(WeightFormat.INT8, WeightFormat.INT8),
    # Four bits are too few for the vocabulary: every token passes it twice, and nothing evens its errors out.
    "int4": WeightFormats(WeightFormat.INT4, WeightFormat.INT8),
}


def weight_formats(quantization: str | None) -> WeightFormats:
    """For a value that `ModelConfig` has accepted."""
    return _FORMATS[quantization]
