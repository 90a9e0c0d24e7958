"""The resident kernel: decode steps of Moondream 2's decoder as one launch.

A program says what every thread block does in a step, and in which order: `program` makes it from a
model's `sizes`, `stream` says in which order it reads the weights, `validator` proves it (with
`operands`, `effects`, `order` and `ring`), `simulator` runs it on the CPU against the plain forward
pass in `weights`, and `sources/step.cu` runs it on the GPU. `header` writes what the device has to
know of it. None of these needs torch; `kernels/cuda/resident.py` packs weights and launches.
"""
