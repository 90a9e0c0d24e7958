#!/bin/sh
# Fills PREFIX with all that an image of Legato runs: build.sh null|cpu|cuda PREFIX.
#
# PREFIX is a virtual environment without pip, complete with bytecode, so that it may be read-only. A build stage of
# deploy/Containerfile runs this, and so does the test of the image's steps where there is no container engine.
set -eu

target=$1
prefix=$2
source=$(cd "$(dirname "$0")/../.." && pwd)
locks=$source/deploy/image/locks
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

case $target in
    null) packages="$source $source/service" ;;
    cpu | cuda) packages="$source $source/service $source/engine/tiny" ;;
    *) echo "build.sh: the target is null, cpu or cuda, not $target" >&2; exit 2 ;;
esac

python3 -m venv "$work/tools"
"$work/tools/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes -r "$locks/build.txt"
for package in $packages; do
    "$work/tools/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
        --wheel-dir "$work/wheels" "$package"
done

python3 -m venv --without-pip "$prefix"
install() {
    "$work/tools/bin/uv" pip install --quiet --python "$prefix/bin/python" --compile-bytecode --link-mode copy "$@"
}
install --require-hashes -r "$locks/$target.txt"
if [ "$target" = cpu ]; then
    # PyTorch publishes this build on an index of its own, which uv knows. Its version is that of the CUDA image.
    install --no-deps --torch-backend cpu "$(grep -oE '^torch==[0-9.]+' "$locks/cuda.txt")"
fi
install --no-deps --no-index "$work"/wheels/*.whl
if [ "$target" = cpu ]; then
    # The image has no compiler, so the CPU's kernels are compiled here, for any processor with AVX2.
    (cd "$work" && "$prefix/bin/python" -m legato_engine.kernels.cpu.compiler)
fi
