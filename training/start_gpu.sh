#!/usr/bin/env bash
# Start run_gpu.sh in a session of its own, so that it outlives this command. Same knobs; progress: poll_gpu.sh.
set -euo pipefail
cd "$(dirname "$0")"
export WORK=${WORK:-/tmp/legato-run}
mkdir -p "$WORK"
rm -f "$WORK/done"
setsid nohup bash -c './run_gpu.sh; echo $? > "$WORK/done"' > "$WORK/log.txt" 2>&1 < /dev/null &
echo "started, log in $WORK/log.txt"
