#!/usr/bin/env bash
# Fetch the wheels that a GPU machine with PyTorch lacks, where there is a package index.
#
#     benchmarks/gpu/wheels.sh FOLDER [PYTHON_VERSION [PACKAGE ...]]
#
# PYTHON_VERSION is that of the GPU machine (3.12). Without packages they are those of Winnow and of
# its tests with all that they need, but torch and what it needs; versions are those of
# constraints.txt. There:
#
#     python -m pip install --no-index --find-links FOLDER -r FOLDER/requirements.txt
#
# PYTHON=python3 names the Python whose pip is used, MACHINE=x86_64 the processor over there.
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 2; }
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
folder=$1 version=${2:-3.12} python=${PYTHON:-python3} machine=${MACHINE:-x86_64}
mkdir -p "$folder"
if [ $# -ge 3 ]; then
    printf '%s\n' "${@:3}"
else
    "$python" - "$root/pyproject.toml" <<'PYTHON'
import sys, tomllib
project = tomllib.load(open(sys.argv[1], "rb"))["project"]
print(*(each for each in project["dependencies"] if not each.startswith("torch>")), sep="\n")
print("pytest", "pytest-timeout", "hypothesis", sep="\n")
PYTHON
fi >"$folder/requirements.txt"
pip=("$python" -m pip --disable-pip-version-check)
# Hydra needs this one, of which there is no wheel to fetch; it holds Python alone.
"${pip[@]}" wheel --quiet --no-deps -c "$root/constraints.txt" -w "$folder" antlr4-python3-runtime
download=("${pip[@]}" download --quiet --only-binary=:all: --find-links "$folder" -d "$folder"
    --python-version "$version" --implementation cp
    --platform "manylinux_2_28_$machine" --platform "manylinux_2_17_$machine"
    --platform "manylinux2014_$machine" -c "$root/constraints.txt")
"${download[@]}" -r "$folder/requirements.txt"
if [ $# -lt 3 ]; then  # with what they need, pip would fetch torch and gigabytes of CUDA
    "${download[@]}" --no-deps peft accelerate psutil
    printf '%s\n' peft accelerate psutil >>"$folder/requirements.txt"
fi
du -sh "$folder"
