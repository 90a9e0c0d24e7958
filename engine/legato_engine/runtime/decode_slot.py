"""One of the two ping-pong working sets: pinned buffers at both ends, device buffers between.

All buffers are allocated once, at fixed addresses. A slot belongs to one launch from staging until
the commit that reads `tokens_host` and `payload_host`; nobody else may touch it in between.

Shape legend: R rows of a full batch, M pages of a full context, D text width, V vocabulary.
"""

from __future__ import annotations

import torch

from legato_engine.device.base import Device
from legato_engine.runtime.staging import StagingBuffer


class DecodeSlot:
    """Buffers for one launch of at most `max_rows` rows, or one prefill of `max_prompt` tokens."""

    def __init__(
        self,
        device: Device,
        *,
        max_rows: int,
        max_pages: int,
        max_prompt: int,
        width: int,
        vocab_size: int,
        dtype: torch.dtype,
    ) -> None:
        on = device.torch_device
        rows = ((max_rows,), torch.int64)
        self.staged = StagingBuffer(
            device, {"row": rows, "position": rows, "sample_position": rows}
        )
        self.constraint = StagingBuffer(device, {"constraint": rows})
        self.prompt = StagingBuffer(
            device,
            {
                "token": ((max_prompt,), torch.int64),
                "payload": ((max_prompt, 2), torch.float32),
                "prefix_pages": ((max_pages,), torch.int64),
                "pages": ((max_pages,), torch.int64),
                "seed": ((1,), torch.int64),
                "top_k": ((1,), torch.int64),
                "temperature": ((1,), torch.float32),
                "top_p": ((1,), torch.float32),
            },
        )
        self.hidden_RD = torch.zeros(max_rows, width, dtype=dtype, device=on)
        self.logits_RV = torch.zeros(max_rows, vocab_size, device=on)
        self.tokens_R = torch.zeros(max_rows, dtype=torch.int64, device=on)
        self.payload_R2 = torch.zeros(max_rows, 2, device=on)
        self.tokens_host = device.pinned((max_rows,), torch.int64)
        self.payload_host = device.pinned((max_rows, 2), torch.float32)
