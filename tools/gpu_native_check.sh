#!/usr/bin/env bash
# The kernels without JAX on a machine with NVIDIA GPUs: builds tests/native with the nvcc on PATH and runs every
# scenario, then a few under compute-sanitizer where there is one. One GPU suffices; two show the link too.
#   tools/gpu_native_check.sh OUT_DIRECTORY [CALLS]
# Writes JSON and logs to OUT_DIRECTORY and ends within six minutes. Exit status 0: all passed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
OUT=${1:?usage: tools/gpu_native_check.sh OUT_DIRECTORY [CALLS]}
CALLS=${2:-1000000}
NVCC=${NVCC:-nvcc}
BUILD=${BUILD:-build/native}
LIMIT=355  # seconds in all
mkdir -p "$OUT" "$BUILD"
left() { echo $((LIMIT - SECONDS)); }

capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
gpus=$(nvidia-smi --list-gpus | wc -l)
if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then gpus=$(tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .); fi
[ "$gpus" -gt 4 ] && gpus=4
if [ "$capability" = 90 ]; then target=-gencode=arch=compute_90a,code=sm_90a; else target=-arch=sm_$capability; fi
echo "$gpus GPUs of compute capability $capability; $($NVCC --version | grep release)"

failed=0
objects=()
options=("$target" -lineinfo -Xcompiler "-Wall,-Wextra,-ffp-contract=off")
rm -rf "$BUILD/kernels"
JOBS=64 timeout -k 5 150 tools/build_kernels.sh "$BUILD/kernels" "${options[@]}" >"$OUT/native_build.log" 2>&1 &
pids=($!)
for source in tests/native/*.cu tests/native/nodes/nodes.cu; do
  object=$BUILD/$(basename "$source").o
  case $source in *nodes*) ;; *) objects+=("$object") ;; esac
  timeout -k 5 150 "$NVCC" -std=c++17 -O3 "${options[@]}" -I. -c "$source" -o "$object" >"$object.log" 2>&1 &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
cat "$BUILD"/*.o.log >>"$OUT/native_build.log"
kernels=("$BUILD"/kernels/*.o)
if [ $failed = 0 ]; then
  "$NVCC" "$target" "${objects[@]}" "${kernels[@]}" -o "$BUILD/harness" >>"$OUT/native_build.log" 2>&1 &&
    "$NVCC" "$target" "${kernels[@]}" "$BUILD"/{world,nodes}.cu.o -o "$BUILD/nodes" >>"$OUT/native_build.log" 2>&1 || failed=1
fi
if [ $failed = 1 ]; then
  echo "the build failed"
  tail -40 "$OUT/native_build.log"
  exit 1
fi
echo "built after $SECONDS s"

status=0
run() {  # run NAME SECONDS COMMAND...
  local name=$1 most=$2 rc=0
  shift 2
  [ "$most" -gt "$(left)" ] && most=$(left)
  if [ "$most" -lt 5 ]; then
    echo "== $name: left out, no time"
    status=1
    return
  fi
  echo "== $name"
  timeout -k 5 "$most" "$@" 2>&1 | tee "$OUT/$name.log" || rc=$?
  [ "$rc" = 0 ] || { echo "== $name: status $rc"; status=1; }
}
# Every scenario runs in a process of its own, so that losing the device in one scenario does not fail the next.
for scenario in normal decode wrap late absent skip shapes order dead indices generations company concurrent graphs members few broken unmet errors alone numbers balance; do
  run "native_$scenario" 60 "$BUILD/harness" --ranks "$((gpus > 1 ? 2 * gpus : 4))" --gpus "$gpus" --scenario $scenario --calls 10000 \
    --json "$OUT/native_$scenario.json"
done
if [ "$gpus" -gt 1 ]; then  # one rank per GPU
  run native_late_apart 60 "$BUILD/harness" --ranks "$gpus" --gpus "$gpus" --scenario late --json "$OUT/native_late_apart.json"
fi
if [ "$gpus" -gt 2 ]; then  # it takes three, one of which is nearly full
  run native_leaver 60 "$BUILD/harness" --ranks "$gpus" --gpus "$gpus" --scenario leaver --json "$OUT/native_leaver.json"
fi
for nodes in "4 2" "4 1" "8 2"; do  # kernels across nodes, between virtual ones: ranks, and ranks of a node
  read -r ranks per_node <<<"$nodes"
  run "native_nodes_${ranks}_$per_node" 30 "$BUILD/nodes" --ranks "$ranks" --per-node "$per_node" --gpus "$gpus" --link peer --calls 3000
done
run native_random_two 60 "$BUILD/harness" --ranks 2 --gpus "$((gpus > 1 ? 2 : 1))" --scenario random --calls "$CALLS" --seed 2 \
  --json "$OUT/native_random_two.json"
run native_random 60 "$BUILD/harness" --ranks "$((gpus > 1 ? 2 * gpus : 4))" --gpus "$gpus" --scenario random --calls "$((CALLS / 4))" \
  --json "$OUT/native_random.json"
if ! command -v compute-sanitizer >/dev/null; then
  echo "== compute-sanitizer is not installed: left out"
elif [ "$gpus" = 1 ]; then
  echo "== compute-sanitizer: left out on one GPU, where it may hold back one rank's kernel until the other rank's has ended"
else
  sanitized=("$BUILD/harness" --ranks 2 --gpus 2 --scenario random --calls 300)
  run native_memcheck 40 compute-sanitizer --tool memcheck --error-exitcode 9 --print-limit 20 "${sanitized[@]}" \
    --json "$OUT/native_memcheck.json"
  run native_racecheck 60 compute-sanitizer --tool racecheck --print-limit 100000 "${sanitized[@]}" --json "$OUT/native_racecheck.json" \
    >"$OUT/racecheck_output.txt"
  # racecheck does not know acquire and release: it reports the rings of signal.cuh, which are ordered by them. In the
  # exchange kernel it also reports two words that a warp reads behind a barrier of the whole block, on every path: the
  # number of BlockClaim and run.last of FinishOperation. Nothing else may be reported.
  elsewhere=$(grep -E '(Read|Write) access at' "$OUT/native_racecheck.log" |
    grep -cvE 'in signal\.cuh:|::BlockClaim\(|::FinishOperation<.*ExchangeKernel')
  rings=$(grep -E '(Read|Write) access at' "$OUT/native_racecheck.log" | grep -c 'in signal\.cuh:')
  echo "== native_racecheck: $rings accesses reported in signal.cuh (ordered by acquire and release), $elsewhere that are not known"
  grep -q 'RACECHECK SUMMARY' "$OUT/native_racecheck.log" || status=1
  [ "$elsewhere" = 0 ] || status=1
  head -c 200000 "$OUT/native_racecheck.log" >"$OUT/native_racecheck.short" && mv "$OUT/native_racecheck.short" "$OUT/native_racecheck.log"
  rm -f "$OUT/racecheck_output.txt"
fi
# The kernels' times, for the record: no verdict.
if [ "$gpus" -gt 1 ] && [ "$(left)" -gt 60 ]; then
  timeout -k 5 60 "$NVCC" -std=c++17 -O3 "$target" -I. benchmarks/ops/kernel_times.cu "${kernels[@]}" -o "$BUILD/kernel_times" &&
    timeout -k 5 "$(($(left) < 40 ? $(left) : 40))" "$BUILD/kernel_times" "$OUT/native_kernels.json" | tee "$OUT/native_kernels.log"
fi
echo "ended after $SECONDS s with status $status"
exit $status
