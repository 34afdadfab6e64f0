"""Loading weights: `load_model` builds one rank's model and fills it from safetensors or with dummy values."""

from executors.layers.weights import WeightLoadError
from executors.loader.loading import load_model

__all__ = ["WeightLoadError", "load_model"]
