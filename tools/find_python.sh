#!/usr/bin/env bash
# Prints the path of a Python >= 3.12: $PYTHON, else one on PATH, else one that pyenv, uv or conda keeps. Names the
# missing parts and exits 1 where there is none.
set -u

is_new_enough() {
  "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

path_of() {
  "$1" -c 'import sys; print(sys.executable)'
}

if [ -n "${PYTHON:-}" ]; then
  if is_new_enough "$PYTHON"; then
    path_of "$PYTHON"
    exit 0
  fi
  echo "PYTHON=$PYTHON is not a Python >= 3.12 with venv and ensurepip" >&2
  exit 1
fi

for candidate in python3.12 python3.13 python3.14 python3 \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python3 \
    "$HOME"/.local/share/uv/python/cpython-3.1[2-9]*/bin/python3 \
    "${CONDA_PREFIX:-/nonexistent}"/bin/python3; do
  if is_new_enough "$candidate"; then
    path_of "$candidate"
    exit 0
  fi
done

{
  echo "No Python >= 3.12 with venv and ensurepip was found (python3 is $(python3 --version 2>&1))."
  echo "Install one (Debian 13, Ubuntu 24.04: apt-get install python3-venv; elsewhere: pyenv install 3.12) or name it:"
  echo "  make setup PYTHON=/path/to/python3.12"
} >&2
exit 1
