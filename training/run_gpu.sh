#!/usr/bin/env bash
# Train, export, evaluate. Knobs: MINUTES, GPUS, WORK (scratch and checkpoint), PYTHON, EXTRA (options of the trainer),
# RESUME=1 to continue WORK/checkpoint.pt, SCENES (evaluation scenes a group), CPU=1 for a test without a GPU.
set -euo pipefail
cd "$(dirname "$0")"
PYTHON=${PYTHON:-python3} MINUTES=${MINUTES:-5} GPUS=${GPUS:-1} WORK=${WORK:-/tmp/legato-run} SCENES=${SCENES:-2048}
export PYTHONPATH="$PWD" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
mkdir -p "$WORK"
device=(); [ -z "${CPU:-}" ] || device=(--cpu)
resume=(); [ -z "${RESUME:-}" ] || resume=(--resume)
"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$GPUS" -m legato_training.train \
  --out "$WORK" --minutes "$MINUTES" "${device[@]}" "${resume[@]}" ${EXTRA:-}
rm -rf "$WORK/results" && mkdir -p "$WORK/results/weights"
"$PYTHON" -m legato_training.export --checkpoint "$WORK/checkpoint.pt" --out "$WORK/model"
split -b 15m -d "$WORK/model/model.safetensors" "$WORK/results/weights/model.safetensors.part"
cp "$WORK/model/config.json" "$WORK/model/tokenizer.json" "$WORK/results/"
"$PYTHON" -m legato_training.evaluate --model "$WORK/model" --out "$WORK/results/metrics.json" --scenes "$SCENES" \
  --batch "${EVAL_BATCH:-256}" "${device[@]}"
"$PYTHON" -m legato_training.preview --model "$WORK/model" --out "$WORK/results/answers.png" "${device[@]}"
