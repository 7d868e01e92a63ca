#!/usr/bin/env bash
# run_tests.sh PYTHON MARKS [PYTEST_ARGUMENT ...]: the selected tests, those marked `optimized` in processes of their own.
# XLA reads its flags once: where all programs are compiled the quick way, tests/support/quick_compiler.py halves the
# time. So are the kernels on host threads: each of their programs keeps all cores busy, and tests of JAX beside one
# take twice as long. To collect the whole suite takes a process six seconds. So these two parts, and thorough tests,
# collect only the files that have such tests, unless an argument names a file or a folder. tests/conftest.py refuses a
# file whose `optimized` or `thorough` tests this script would not find.
set -u
python=$1 marks=$2
shift 2
none=5  # pytest's status where nothing is selected
status=$none
parts=("not optimized" "optimized")
[[ $marks == *"not kernels"* ]] || parts=("kernels" "not kernels and not optimized" "not kernels and optimized")
with_mark() { grep -rl --include='test_*.py' "mark\.$1" tests; }
in_table() { sed -n 's|^    "\([^":]*\)::.*|tests/\1|p' tests/support/thorough.py; }
named=
for word; do [ -e "${word%%::*}" ] && named=1; done
for part in "${parts[@]}"; do
  places=()
  case $named$part in
    kernels) places=(tests/native) ;;
    "optimized" | "not kernels and optimized") mapfile -t places < <(with_mark optimized) ;;
    "not kernels and not optimized")
      case $marks in thorough*) mapfile -t places < <({ with_mark thorough; in_table; } | sort -u) ;; esac ;;
  esac
  "$python" -m pytest ${places[@]+"${places[@]}"} -m "($marks) and $part" "$@"
  ended=$?
  [ $ended = 2 ] && exit 2  # interrupted
  [ $ended = $none ] && continue
  [ $ended = 0 ] && [ $status != $none ] || status=$ended
done
exit $status
