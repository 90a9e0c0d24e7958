#!/usr/bin/env bash
# Wait up to SECONDS (first argument) for the run, show the log's end, and copy results to $OUT when it is done.
set -euo pipefail
WORK=${WORK:-/tmp/legato-run} OUT=${OUT:-/tmp/legato-out} limit=${1:-60}
for ((waited = 0; waited < limit; waited += 2)); do
  [ ! -f "$WORK/done" ] || break
  sleep 2
done
tail -n "${LINES_SHOWN:-25}" "$WORK/log.txt"
mkdir -p "$OUT"
cp "$WORK/log.txt" "$OUT/log.txt"
if [ -f "$WORK/done" ]; then
  echo "finished with status $(cat "$WORK/done")"
  if [ -d "$WORK/results" ]; then cp -r "$WORK/results/." "$OUT/"; fi
else
  echo "still running after $limit s"
fi
