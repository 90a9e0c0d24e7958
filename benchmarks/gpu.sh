#!/usr/bin/env bash
# Every measurement on a CUDA machine, in one run of at most nine minutes. Every part has its own time limit, so
# that a part that hangs does not stop the others. After every part $LEGATO_RESULTS gets records.tar.gz (records,
# logs) and summary.json.
#
#   PARTS="decode e2e"   only these, of: tests kernels kernels_moondream3 portable portable_formats portable_formats_kv8 decode tick e2e lone e2e_photos lone_photos hop image
#                        fp8 e2e_fp8 adapters decode_moondream3 speculation kv memory reference peers
#   PYTHON, DEVICE       the interpreter (python3) and the device (cuda)
#   LARGE                the model with random weights (moondream2); DEVICE=cpu LARGE=random-tiny tries
#                        all of this without a GPU, at sizes that mean nothing
#   SERVE                more options of `legato serve`, for e2e
#   MOONDREAM_REFERENCE  folder of a checkout of Moondream's reference implementation, for reference
#                        and peers
# Records name the commit: without git here, run `make pack` before the tree is copied, and copy .legato-commit too.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} device=${DEVICE:-cuda} model=${LARGE:-moondream2}
parts=${PARTS:-tests kernels kernels_moondream3 portable portable_formats portable_formats_kv8 decode tick e2e lone e2e_photos lone_photos hop image fp8 e2e_fp8 adapters decode_moondream3 speculation kv memory reference peers}
results=${LEGATO_RESULTS:-$PWD/benchmarks/results/h200}
budget=${BUDGET:-540} # seconds for all parts together
export PYTHONPATH="$PWD/proto/gen:$PWD/service:$PWD/engine:$PWD/engine/tiny:$PWD/clients/python:$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1
LEGATO_RESULTS=$(mktemp -d) && export LEGATO_RESULTS
trap 'rm -rf "$LEGATO_RESULTS"' EXIT
mkdir -p "$results"
failed=0

pack() {
  "$python" -m benchmarks summary "$LEGATO_RESULTS" >"$LEGATO_RESULTS/summary.log" 2>&1
  cp "$LEGATO_RESULTS/summary.json" "$results/" 2>/dev/null
  tar -C "$LEGATO_RESULTS" -czf "$results/records.tar.gz" .
}

part() { # NAME SECONDS COMMAND...
  local name=$1 limit=$2 start=$SECONDS; shift 2
  [[ " $parts " == *" $name "* ]] || return 0
  ((limit > budget - SECONDS)) && limit=$((budget - SECONDS))
  echo "==> $name (at most $limit s)"
  if ((limit < 5)); then echo "<== $name FAILED (no time left)"; failed=1; return 0; fi
  timeout -k 5 "$limit" "$@" 2>&1 | tee "$LEGATO_RESULTS/$name.log"
  local status=${PIPESTATUS[0]}
  ((status == 0)) || { echo "<== $name FAILED ($status)"; failed=1; }
  pack
  echo "<== $name: $((SECONDS - start)) s"
}

bench() { # NAME SECONDS OPTIONS...
  local name=$1 limit=$2; shift 2
  part "$name" "$limit" "$python" -m benchmarks "$name" "$@"
}

large=(--device "$device" --model "$model" --random-weights)
serve=(--device "$device" --model "$model" --random-weights)
[[ -n ${SERVE:-} ]] && read -ra more <<<"$SERVE" && serve+=("${more[@]}")
reference=()
[[ -n ${MOONDREAM_REFERENCE:-} ]] && reference=(--moondream-reference "$MOONDREAM_REFERENCE")
# 110 tokens from position 795: 850 positions on average.
decode=(--context 795 --repeats 3) rates=(--context 795 --requests 4 --repeats 1) ticks=5000 scale=1 calls=200 repeats=11
steps=(--steps 60)
if [[ $device == cpu ]]; then
  decode=(--context 0 --length 30 --repeats 1) rates=(--length 30 --repeats 1) ticks=200 scale=0.1 calls=10 repeats=2
  steps=(--dry)
fi

part tests 260 "$python" -m pytest -q -m gpu tests/gpu -p no:cacheprovider
if [[ $device != cpu ]]; then
  bench kernels 100 --models moondream2,legato-tiny
  part kernels_moondream3 100 "$python" -m benchmarks kernels --name kernels_moondream3 --shapes 1x1,8x1,32x1 \
    --models moondream3,moondream3-e4m3-kv8,moondream3-fp8,moondream3-int8,moondream3-int4 --long-shapes 4x1@32767
  LEGATO_KERNEL_PTX=compute_80 part portable 40 "$python" -m benchmarks portable --weights packed --image --name portable_formats_ptx80
  part portable_formats 60 "$python" -m benchmarks portable --weights packed fp8 int8 int4 --image --name portable_formats_hopper
  part portable_formats_kv8 60 "$python" -m benchmarks portable --weights fp8 int4 --kv8 --name portable_formats_kv8_hopper
fi
bench decode 90 "${large[@]}" --streams 1,8,32 --compare-tasks "${decode[@]}"
bench tick 20 --ticks "$ticks"
bench e2e 130 --calls-scale "$scale" --cell-seconds 20 --total-seconds 115 -- "${serve[@]}"
bench lone 40 -- "${serve[@]}"
part e2e_photos 70 "$python" -m benchmarks e2e --name e2e_photos --pictures photo --workloads new,mix --tokens 3 \
  --callers 1,64 --calls-scale "$scale" --cell-seconds 15 --total-seconds 55 -- "${serve[@]}"
part lone_photos 30 "$python" -m benchmarks lone --name lone_photos --pictures photo -- "${serve[@]}"
bench hop 40 "${large[@]}" --calls "$calls"
bench image 25 "${large[@]}" --device-stages --repeats "$repeats"
[[ $device == cpu ]] || bench fp8 30 --device "$device"
[[ $device == cpu ]] || part e2e_fp8 60 "$python" -m benchmarks e2e --name e2e_fp8 --calls-scale "$scale" \
  --cell-seconds 12 --total-seconds 45 -- "${serve[@]}" --vision-dtype fp8
[[ $device == cpu ]] || bench adapters 75
[[ $device == cpu ]] || part decode_moondream3 60 "$python" -m benchmarks decode --name decode_moondream3 \
  --device "$device" --model moondream3 --random-weights --max-context 4096 --streams 1,8,32 "${decode[@]}"
bench speculation 110 "${large[@]}" --streams 1,8 --settings fixed:1,fixed:3,fixed:7,seed,budget \
  --workloads "0.4,0.6,0.8,mixed,structured,creative,near the end,under pressure" "${rates[@]}"
bench kv 40 "${large[@]}"
[[ $device == cpu ]] || bench memory 60 "${large[@]}"
[[ -n ${MOONDREAM_REFERENCE:-} ]] && bench reference 120 --checkout "$MOONDREAM_REFERENCE" --device "$device" \
  --runs full/f32 full/bf16 --full-sizes 22 --max-tokens 12 --layers 2 4
left=$((budget - SECONDS)) # includes time that the parts above did not use; 15 s of it are for the record
bench peers "$left" --device "$device" "${steps[@]}" "${reference[@]}" --budget $((left - 15))
cat "$LEGATO_RESULTS/summary.log" 2>/dev/null
exit $failed
