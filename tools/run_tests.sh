#!/usr/bin/env bash
# run_tests.sh PYTHON MARKS [PYTEST_ARGUMENT ...]: the selected tests, those marked `optimized` in processes of their own.
# XLA reads its flags once: where everything is compiled in a hurry, tests/support/quick_compiler.py halves the time.
set -u
python=$1 marks=$2
shift 2
none=5  # pytest's status where nothing is selected
status=$none
for part in "not optimized" "optimized"; do
  "$python" -m pytest -m "($marks) and $part" "$@"
  ended=$?
  [ $ended = 2 ] && exit 2  # interrupted
  [ $ended = $none ] && continue
  [ $ended = 0 ] && [ $status != $none ] || status=$ended
done
exit $status
