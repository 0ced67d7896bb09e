"""What one lane of the CUDA executor has for itself."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from bullet_graph.graphs.piecewise import PiecewiseGraphs
from bullet_graph.kernels.memory import Uploader
from bullet_graph.kernels.sampler import SamplingState
from bullet_graph.models.decoder import Decoder
from bullet_graph.runtime.eager_lane import EagerForward, EagerLane
from bullet_graph.runtime.slots import settings_row
from bullet_graph.runtime.step import SlotInit


@dataclass(slots=True)
class CudaLane:
    """What belongs to one lane alone.

    Attributes:
        stream: bound to the partition of its last launch.
        eager: buffers for eager forwards.
        slots: uploads slot settings.
        forward: that was stopped between two layers.
        last: passed when all that the lane was given is done.
    """

    stream: torch.cuda.Stream
    eager: EagerLane
    slots: Uploader
    forward: EagerForward | None = None
    last: torch.cuda.Event | None = None

    @classmethod
    def open(
        cls,
        stream: torch.cuda.Stream,
        decoder: Decoder,
        state: SamplingState,
        *,
        max_num_seqs: int,
        max_rows: int,
        num_kv_blocks: int,
        graphs: PiecewiseGraphs | None,
    ) -> Self:
        """Make a lane's buffers on its stream.

        Args:
            stream: of the lane, bound to the whole GPU.
            decoder: weights and cache on the GPU.
            state: of all slots, for both lanes.
            max_num_seqs: slots.
            max_rows: most rows of a forward.
            num_kv_blocks: blocks of the cache.
            graphs: captured pieces for short forwards, of this lane alone; None launches all of them kernel by kernel.
        """
        with torch.cuda.stream(stream), torch.inference_mode():
            eager = EagerLane(
                decoder,
                state,
                max_num_seqs=max_num_seqs,
                max_rows=max_rows,
                num_kv_blocks=num_kv_blocks,
                graphs=graphs,
            )
            slots = Uploader(max_num_seqs * (state.settings.shape[1] + 1) + 8, decoder.cos_sin.device)
        return cls(stream, eager, slots)

    def write_slots(self, admitted: tuple[SlotInit, ...], settings: Tensor) -> None:
        """Enqueue the settings of sequences that enter their slots, on the current stream.

        Args:
            admitted: at least one.
            settings: the sampler's, [slots, columns] int32.
        """
        slots = np.array([init.slot for init in admitted], dtype=np.int32)
        table = np.concatenate([settings_row(init) for init in admitted])
        device_slots, device_table = self.slots.upload(slots, table)
        settings[device_slots] = device_table.view(len(admitted), -1)
