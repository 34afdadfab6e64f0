"""A weight in the panels the kernels read (csrc/weight_layout.h), made once at load time from row-major bfloat16.

Panels hold 32 outputs, padded with zeros, as bfloat16 or as integers of 8 or 4 bits. A gate-up weight interleaves its
halves by 16, so that one panel holds gates together with the ups they multiply.
"""

from __future__ import annotations

import torch

from executors.kernels.abi import WeightFormat
from executors.kernels.library import NativeKernels
from executors.kernels.memory import HugePageArena

PANEL = 32


class PackedWeight:
    """A weight [num_outputs, num_inputs] in panel order. `data` (and `scale`) is the only copy.

    Args:
        format: Integers are rounded from `weight`, with a step (INT4: and an offset) for each 32 inputs of an output.
        importance: float32 [num_inputs], above zero: how much INT4 cares for the errors of each input's weights, such
            as the mean square of the input. None treats all alike.
        fine_inputs: Inputs of an integer weight are rounded to 15 bits instead of 8, for twice the arithmetic.
        arena: Where the panels go; weights of one model made in the order of their use share one.

    Attributes:
        data: bfloat16 [panels, num_inputs / 2, 32, 2], or uint8 [panels, bytes of a panel].
        scale: float32 [panels * 32], of each output in panel order; None for bfloat16.
        gate_up: Rows were [gates; ups] and are interleaved.
    """

    def __init__(
        self,
        kernels: NativeKernels,
        weight: torch.Tensor,
        *,
        gate_up: bool = False,
        fine_inputs: bool = False,
        format: WeightFormat = WeightFormat.BF16,
        importance: torch.Tensor | None = None,
        arena: HugePageArena | None = None,
    ) -> None:
        if weight.dim() != 2 or weight.dtype != torch.bfloat16 or weight.device.type != "cpu":
            raise ValueError(
                f"weight must be a bfloat16 CPU matrix, got {weight.dtype} {tuple(weight.shape)} on {weight.device}"
            )
        if weight.shape[1] % 2:
            raise ValueError(f"weight must have an even number of inputs, got {weight.shape[1]}")
        if gate_up and weight.shape[0] % 2:
            raise ValueError(f"a gate-up weight must have an even number of rows, got {weight.shape[0]}")
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        self.kernels = kernels
        self.num_outputs, self.num_inputs = int(weight.shape[0]), int(weight.shape[1])
        self.gate_up = gate_up
        self.fine_inputs = fine_inputs
        self.format = format
        self.scale: torch.Tensor | None = None
        arena, library = arena or HugePageArena(0), kernels.library
        shape = (weight.data_ptr(), weight.stride(0), self.num_outputs, self.num_inputs, int(gate_up))
        if format is WeightFormat.BF16:
            self.data = arena.zeros((self.num_panels, self.num_inputs // 2, PANEL, 2), torch.bfloat16)
            library.ea_pack_bf16(*shape, self.data.data_ptr())
            return
        panel_bytes = library.ea_panel_bytes(format, self.num_inputs)
        self.data = arena.zeros((self.num_panels, panel_bytes), torch.uint8)
        self.scale = torch.zeros(self.num_panels * PANEL)
        if importance is not None:
            importance = importance.float().contiguous()
            if importance.shape != (self.num_inputs,) or not (importance > 0).all() or not importance.isfinite().all():
                raise ValueError(
                    f"importance must be {self.num_inputs} positive numbers, got {tuple(importance.shape)}"
                )
        library.ea_quantize(
            *shape,
            format,
            0 if importance is None else importance.data_ptr(),
            self.data.data_ptr(),
            self.scale.data_ptr(),
        )

    @property
    def num_panels(self) -> int:
        return -(-(self.num_outputs // 2) // 16) if self.gate_up else -(-self.num_outputs // PANEL)

    @property
    def scale_address(self) -> int:
        return 0 if self.scale is None else self.scale.data_ptr()

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)

    def unpack(self) -> torch.Tensor:
        """The weight as the kernels see it, [num_outputs, num_inputs]: bfloat16 as it was given, or float32."""
        library, shape = self.kernels.library, (self.num_outputs, self.num_inputs, int(self.gate_up))
        if self.scale is None:
            weight = torch.empty(self.num_outputs, self.num_inputs, dtype=torch.bfloat16)
            library.ea_unpack_bf16(self.data.data_ptr(), *shape, weight.data_ptr(), self.num_inputs)
        else:
            weight = torch.empty(self.num_outputs, self.num_inputs)
            library.ea_dequantize(
                self.data.data_ptr(), self.scale_address, *shape, self.format, weight.data_ptr(), self.num_inputs
            )
        return weight

    def pack_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """A bias [num_outputs] in panel order: float32 [panels * 32]."""
        if bias.shape != (self.num_outputs,):
            raise ValueError(f"bias must have shape ({self.num_outputs},), got {tuple(bias.shape)}")
        packed = torch.zeros(self.num_panels * PANEL, dtype=torch.float32)
        if not self.gate_up:
            packed[: self.num_outputs] = bias.float()
            return packed
        half = self.num_outputs // 2
        view = packed.view(self.num_panels, 2, 16)
        for index in range(2):
            padded = torch.zeros(self.num_panels * 16)
            padded[:half] = bias[index * half : (index + 1) * half].float()
            view[:, index] = padded.view(self.num_panels, 16)
        return packed
