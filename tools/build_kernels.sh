#!/usr/bin/env bash
# Compiles the kernels (cuda_kernels/variants.txt) without CMake, but for those over NCCL:
#   tools/build_kernels.sh OBJECTS [NVCC_OPTIONS...]
# OBJECTS, a folder, gets an object and a log for each line. NVCC is the compiler, JOBS how many run at once.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
objects=${1:?usage: tools/build_kernels.sh OBJECTS [NVCC_OPTIONS...]}
shift
mkdir -p "$objects"
export NVCC=${NVCC:-nvcc}
compile() {  # compile ROOT OBJECTS NAME SOURCE DEFINES OPTIONS...
  local root=$1 objects=$2 name=$3 source=$4 defines=$5
  shift 5
  # shellcheck disable=SC2086  # several words
  "$NVCC" -std=c++17 -O3 -I"$root" "$@" $defines -c "$root/cuda_kernels/$source" -o "$objects/$name.o" >"$objects/$name.log" 2>&1 ||
    { cat "$objects/$name.log"; return 255; }
}
export -f compile
while read -r name source defines; do
  case $name in '#'* | *nccl*) continue ;; esac
  printf '%s\0' "$name" "$source" "$(for define in $defines; do printf -- '-D%s ' "$define"; done)"
done <"$root/cuda_kernels/variants.txt" |
  xargs -0 -n 3 -P "${JOBS:-$(nproc)}" bash -c 'root=$1 objects=$2; shift 2; options=("${@:1:$#-3}"); compile "$root" "$objects" "${@: -3}" "${options[@]}"' \
    _ "$root" "$objects" "$@"
