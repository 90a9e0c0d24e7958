#!/usr/bin/env bash
# Everything that is measured on a CUDA machine, in one go: tests, end to end through gRPC, decode
# steps. Every part has its own time limit, so that one that hangs does not take the others along.
# PYTHON names the interpreter, LEGATO_RESULTS the folder for the records, DEVICE the device.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} device=${DEVICE:-cuda}
export PYTHONPATH="$PWD/proto/gen:$PWD/service:$PWD/engine:$PWD/engine/tiny:$PWD/clients/python:$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1
failed=0

part() { # NAME SECONDS COMMAND...
  local name=$1 limit=$2 start=$SECONDS; shift 2
  echo "==> $name"
  timeout "$limit" "$@" || { echo "<== $name FAILED ($?)"; failed=1; }
  echo "<== $name: $((SECONDS - start)) s"
}

tiny=(--device "$device")
large=(--device "$device" --model "${LARGE:-moondream2}" --random-weights)
calls=(--alone "${ALONE:-40}" --calls "${CALLS:-512}" --callers 64)
part "rpc legato-tiny" 80 "$python" -m benchmarks rpc --name rpc_tiny_gpu "${calls[@]}" -- "${tiny[@]}"
part "rpc moondream2" 110 "$python" -m benchmarks rpc --name rpc_moondream2_gpu "${calls[@]}" --max-objects 1 --width 850 --height 600 -- "${large[@]}"
part "gpu tests" 110 "$python" -m pytest -q -m gpu tests/gpu -p no:cacheprovider
part "decode moondream2" 110 "$python" -m benchmarks decode --name decode_moondream2_gpu "${large[@]}" --streams "${STREAMS:-1,8,32}" --task caption --repeats 3
part "decode legato-tiny" 70 "$python" -m benchmarks decode --name decode_tiny_gpu "${tiny[@]}" --streams "${STREAMS:-1,8,32}" --repeats 3
exit $failed
