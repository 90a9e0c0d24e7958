"""The models that `legato pull` knows.

A revision is a commit of the repository, and the hashes are those of the hub's own records of it.
Where no commit is known here, the revision is a branch: the first pull writes down the commit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

INDEX = "model.safetensors.index.json"
"""Of a model in shards; it names them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Files of one repository; of a name that ends in * all that begin so, if there are any."""

    repository: str
    revision: str
    files: tuple[str, ...]
    sha256: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def wants(self, name: str) -> bool:
        return any(
            name.startswith(each[:-1]) if each.endswith("*") else name == each
            for each in self.files
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Published:
    """A model; bytes are of the weights in memory, 0 where there is no such form."""

    name: str
    family: str  # of `--model`
    sources: tuple[Source, ...]
    licence: str
    bf16_bytes: int
    fp8_bytes: int = 0
    stored_fp8: bool = False  # the published file is that of `fp8_bytes`

    @property
    def loaded_bytes(self) -> int:
        """On a GPU, by default."""
        return self.fp8_bytes if self.stored_fp8 else self.bf16_bytes

    @property
    def loaded_bytes_on_cpu(self) -> int:
        """By default a CPU computes in float32."""
        return self.bf16_bytes * 2


_MOONDREAM = ("config.json", "model.safetensors", INDEX, "LICENSE*")
_TEXT = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    INDEX,
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "LICENSE*",
)
_STARMIE = Source(
    "moondream/starmie-v1",
    "35192e10a54e36eabe0a7cc57a2c1aab371cafc5",
    ("tokenizer.json",),
    {"tokenizer.json": "0512fdcac4a5f9e7746cbefce4a468dc93bf0f93f11e701b84f8b31bff199e9c"},
)
_BSL = "Business Source License 1.1 with an additional use grant: read it before you serve others"

_ALL = (
    Published(
        "moondream2",
        "moondream2",
        (
            Source(
                "vikhyatk/moondream2",
                "9a7d4024050840e001defacec2b00727e89149e6",  # the tag 2025-06-21
                _MOONDREAM,
                {
                    "model.safetensors": (
                        "70a7d94c0c8349eb58ed2d9e636ef2d0916960f321ecabeac6354b8ba3d7403f"
                    )
                },
            ),
            _STARMIE,
        ),
        "Apache-2.0; its tokenizer's repository names none",
        bf16_bytes=3_854_538_968,
    ),
    Published(
        "moondream3",
        "moondream3",
        (
            Source(
                "moondream/moondream3-preview",
                "5112966d1a723413b1c9a1e8bea272b72e647b35",
                _MOONDREAM,
            ),
            _STARMIE,
        ),
        _BSL,
        bf16_bytes=18_500_000_000,
        fp8_bytes=10_500_000_000,
    ),
    Published(
        "moondream3.1",
        "moondream3.1",
        (Source("moondream/moondream3.1-9B-A2B", "main", _MOONDREAM), _STARMIE),
        "not known here: the repository says",
        bf16_bytes=18_500_000_000,
        fp8_bytes=10_500_000_000,
        stored_fp8=True,
    ),
    Published(
        "smollm2-135m",
        "llama",
        (
            Source(
                "HuggingFaceTB/SmolLM2-135M-Instruct",
                "12fd25f77366fa6b3b4b768ec3050bf629380bac",
                _TEXT,
                {
                    "model.safetensors": (
                        "5af571cbf074e6d21a03528d2330792e532ca608f24ac70a143f6b369968ab8c"
                    )
                },
            ),
        ),
        "Apache-2.0",
        bf16_bytes=269_060_552,
    ),
    Published(
        "qwen3-0.6b",
        "qwen",
        (
            Source(
                "Qwen/Qwen3-0.6B",
                "c1899de289a04d12100db370d81485cdf75e47ca",
                _TEXT,
                {
                    "model.safetensors": (
                        "f47f71177f32bcd101b7573ec9171e6a57f4f4d31148d38e382306f42996874b"
                    )
                },
            ),
        ),
        "Apache-2.0",
        bf16_bytes=1_503_300_328,
    ),
)

MODELS = {each.name: each for each in _ALL}
