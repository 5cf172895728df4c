#!/bin/sh
# Build llama.cpp's llama-server, which benchmarks/serving.py compares with, from the sources in PyPI's
# llama-cpp-python: the llama.cpp of the other comparisons. It needs cmake, ninja, a C++ compiler and some minutes.
# usage: scripts/build-llama-server.sh FOLDER     then: PATH=FOLDER/bin:$PATH python -m benchmarks.serving
set -eu
cd "$(dirname "$0")/.."
[ $# -eq 1 ] || { sed -n '2,4s/^# //p' "$0" >&2; exit 2; }

version=$(sed -n 's/^llama_cpp_python==//p' constraints.txt)
mkdir -p "$1"
folder=$(cd "$1" && pwd)
"${PYTHON:-.venv/bin/python}" -m pip download -q --no-deps --no-binary llama-cpp-python \
    "llama-cpp-python==$version" -d "$folder"
tar -xzf "$folder/llama_cpp_python-$version.tar.gz" -C "$folder"
# as a user builds it for this machine; without the web page and TLS, which need a network and OpenSSL
cmake -S "$folder/llama_cpp_python-$version/vendor/llama.cpp" -B "$folder/build" -G Ninja \
    -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_OPENSSL=OFF \
    -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF > "$folder/cmake.log"
ninja -C "$folder/build" llama-server
mkdir -p "$folder/bin"
cp "$folder/build/bin/llama-server" "$folder/bin"
echo "$folder/bin/llama-server"
