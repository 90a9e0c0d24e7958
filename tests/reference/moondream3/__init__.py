"""Moondream 3 in numpy and float64: slow, plain, written from its description alone."""

from tests.reference.moondream3.config import Config as Config
from tests.reference.moondream3.config import full as full
from tests.reference.moondream3.config import small as small
from tests.reference.moondream3.config import thin as thin
from tests.reference.moondream3.numerics import check_weights as check_weights
from tests.reference.moondream3.numerics import quantise_cache as quantise_cache
from tests.reference.moondream3.numerics import quantise_experts as quantise_experts
from tests.reference.moondream3.numerics import random_weights as random_weights
from tests.reference.moondream3.numerics import weight_shapes as weight_shapes
from tests.reference.moondream3.vision import encode_image as encode_image
