"""From the scheduler's slot settings to the sampler's."""

import numpy as np
from numpy.typing import NDArray

from bullet_graph.kernels.sampler import pack_settings
from bullet_graph.runtime.step import SlotInit


def settings_row(init: SlotInit) -> NDArray[np.int32]:
    """The packed settings of a sequence that enters a slot; see :func:`pack_settings`."""
    return pack_settings(
        temperature=init.temperature,
        top_k=init.top_k,
        top_p=init.top_p,
        min_p=init.min_p,
        seed=init.seed,
        masked_until=init.masked_until,
        masked_token_ids=init.masked_token_ids,
    )
