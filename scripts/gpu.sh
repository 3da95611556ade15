#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds, tests and benchmarks on a machine with a GPU, and ends with a short summary.
#   gpu.sh [build] [test] [sanitize] [bits] [bench] [compare] [python] [alternate]
#                        without arguments: all but sanitize and alternate
#   gpu.sh verified      checks that the CUDA code is the code that bench/gpu-verified records
#   gpu.sh headers       copies the installed headers of fmt, CLI11 and nlohmann-json to
#                        build/headers, for building on a machine without these packages
# test runs the device suite, and verify at 1, 2 and 4 ranks, both with the best kernels for the GPU
# and with the portable ones. Then it tests ranks as processes, time-sliced and under MPS, and jobs
# that fail. It ends with a checksum of the CUDA code; bench/gpu-verified holds that of the code
# that last ran. bench runs the layer on one rank and several, and dispatch and combine alone on 8,
# with ranks as threads and as processes. compare times all that bench/gpu_compare.py does, and bits
# runs its comparison of bits; both need a python3 with torch. python runs the Python package's tests
# there, bench/gpu_torch_ranks.py and bench/gpu_torch.py. sanitize runs the kernel tests under
# compute-sanitizer. alternate builds this tree and the one in SWITCHYARD_GPU_OLD, such as an
# earlier commit's, and times them in turns. A relative path starts at the root of the repository.
. "$(dirname "$0")/lib.sh"

binaries=build/gpu
results=${SWITCHYARD_GPU_RESULTS:-build/gpu-results}
shapes=(qwen3-30b olmoe mixtral dsv3-slice)
ranks=(2 4 8)                    # for the layer with the first shape
dispatched_tokens=(4096 128 16)  # per rank, for dispatch and combine alone on 8 ranks
few_tokens=1x2048x768x128x8,8x2048x768x128x8,64x2048x768x128x8,1024x2048x768x128x8
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
processes=(mpirun --oversubscribe --bind-to none -n)

collect_headers() {
  say "Copying headers to build/headers"
  mkdir -p build/headers
  local folder
  for folder in fmt CLI nlohmann; do
    [ -d "/usr/include/$folder" ] ||
      { echo "there is no /usr/include/$folder: run scripts/test.sh here first" >&2; exit 1; }
    cp -r "/usr/include/$folder" build/headers/
  done
}

run_build() {
  configure
  say "Building for the GPU"
  build_targets
}

# Configures the sources in the current folder, unless they are configured already.
configure() {
  local options architecture
  architecture=$(find_architecture)
  options=("-DSWITCHYARD_CUDA_ARCHITECTURES=$architecture")
  [ ! -d "$root/build/headers" ] || options+=("-DSWITCHYARD_HEADERS=$root/build/headers")
  [ -f "$binaries/build.ninja" ] || cmake --preset gpu "${options[@]}"
}

# Prints the architecture of this machine's GPU as CMake writes it; compiling for the default two
# takes twice as long. Hopper's own instructions need 90a.
find_architecture() {
  local digits
  digits=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | sort -u | tr -d .)
  [[ $digits =~ ^[0-9]+$ ]] ||
    { echo "nvidia-smi names no single architecture: ${digits:-nothing}" >&2; return 1; }
  echo "${digits/#90/90a}"
}

build_targets() {
  cmake --build --preset gpu
  ! has_mpi || cmake --build "$binaries" --target switchyard_process_tests
}

# True if the build has MPI, so that ranks can be processes.
has_mpi() { cmake --build "$binaries" --target help | grep switchyard_process_tests >/dev/null; }

run_test() {
  build_targets  # so that the sum below matches the code that runs
  say "Testing on the GPU"
  "$binaries/cli/switchyard" info
  test_with best
  test_with portable
  if has_mpi; then
    say "Ranks that are processes, in turns"
    test_processes 2 '*CudaLayerTest*Ranks*/48x40'
    test_processes 4 '*CudaLayerTest*Ranks*/48x40'
    "$binaries/tests/switchyard_process_tests" --gtest_brief=1 --gtest_filter='Cuda*'
    say "Ranks that are processes, by way of MPS"
    under_mps test_many_processes
  else
    say "This build has no MPI: ranks that are processes are not tested"
  fi
  say "All green; for bench/gpu-verified:"
  kernel_sum
}

# Identifies the CUDA code: the first 16 digits of a checksum over its files without comments and
# white space.
kernel_sum() {
  { find src/device/cuda -type f; ls src/device/{device_backend,peer_memory}.h; } | LC_ALL=C sort |
    while read -r file; do
      echo "$file"
      g++ -fpreprocessed -dD -E -P -x c++ "$file" 2>/dev/null | tr -d '[:space:]'
    done | sha256sum | cut -c 1-16
}

test_with() {
  local kernels=$1
  local verified="$results/verify-$kernels.txt"
  say "With $kernels kernels"
  SWITCHYARD_TEST_CUDA_KERNELS=$kernels run_shards
  "$binaries/cli/switchyard" verify tests/data/golden --device cuda --kernels "$kernels" \
    --ranks 1,2,4 >"$verified" || { cat "$verified"; return 1; }
  tail -n 3 "$verified"
}

# Runs the device suite in ten processes at once, which takes a third of the time of one process.
run_shards() {
  local shards=10 shard pids=() logs=() status=0
  for ((shard = 0; shard < shards; ++shard)); do
    logs+=("$results/shard-$shard.txt")
    GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$shard \
      "$binaries/tests/switchyard_device_tests" --gtest_brief=1 >"${logs[shard]}" 2>&1 &
    pids+=($!)
  done
  for ((shard = 0; shard < shards; ++shard)); do
    wait "${pids[shard]}" || { status=1; cat "${logs[shard]}"; }
  done
  awk '/^\[  PASSED  \]/ { passed += $4 } /^\[  SKIPPED \].* tests?\.$/ { skipped += $4 }
       /^\[  FAILED  \].* tests?, listed/ { failed += $4 }
       END { printf "%d passed, %d skipped, %d failed\n", passed, skipped, failed }' "${logs[@]}"
  return "$status"
}

test_processes() {
  local count=$1 tests=$2
  "${processes[@]}" "$count" -x "SWITCHYARD_TEST_MPI_SIZE=$count" \
    "$binaries/tests/switchyard_device_tests" --gtest_brief=1 --gtest_filter="$tests"
}

test_many_processes() {
  local count
  for count in "${ranks[@]}"; do
    test_processes "$count" '*CudaLayerTest*Ranks*'
    "${processes[@]}" "$count" "$binaries/cli/switchyard" verify tests/data/golden --comm mpi \
      --device cuda >"$results/verify-processes-$count.txt"
    tail -n 1 "$results/verify-processes-$count.txt"
  done
  test_processes 4 'CudaRanks/CudaRanksForms*:CudaRanks/CudaRanks.*:*CudaParallel*/4_ranks'
}

# Runs a function with its own MPS daemon, so that processes share the GPU concurrently.
under_mps() {
  CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d)
  CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY
  export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
  trap 'quit_mps' EXIT
  nvidia-cuda-mps-control -d
  "$@"
  quit_mps
}

quit_mps() {
  trap - EXIT
  echo quit | nvidia-cuda-mps-control || true
  rm -rf "$CUDA_MPS_PIPE_DIRECTORY"
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
}

# Checks memory accesses in everything except the largest tensors, and races, which takes a hundred
# times as long, in the smaller tests. The sanitizer runs one kernel of a process at a time, so
# thread ranks would wait for each other forever: ranks are processes here.
run_sanitize() {
  sanitize memcheck 'Cuda*:-*Large*:*Syncs*:*Ranks*:CudaParallel*:CudaGate*'
  ! has_mpi || sanitize_processes
  sanitize racecheck "Cuda/Capacity*:Cuda/Count*:Cuda/Plan*:Cuda/Losses*:Cuda/Memory*:Cuda/Rows*:\
Cuda/RouteContract*:Cuda/RouteSums*:Cuda/RouteBackward*Bits*:Cuda/RouteBackward*Run*:\
Cuda/ExpertsContract.Small*:Cuda/ExpertsContract.Some*:Cuda/ExpertsTokens*Few*:Cuda/SharedContract.Gradients*:\
CudaGroupedGemm.*ManyGroups*:CudaGroupedGemm.*Apart*:CudaGroupedGemm.*Biases*:\
CudaFusedGemm.*OtherGroups*:\
CudaGraph/*ForwardAndBackward*/f32"
}

sanitize() {
  local tool=$1 tests=$2
  say "compute-sanitizer $tool, for some minutes"
  compute-sanitizer --tool "$tool" --error-exitcode 1 \
    "$binaries/tests/switchyard_device_tests" --gtest_brief=1 --gtest_filter="$tests" \
    >"$results/$tool.txt" 2>&1 || { tail -n 40 "$results/$tool.txt"; return 1; }
  tail -n 2 "$results/$tool.txt"
}

sanitize_processes() {
  say "compute-sanitizer memcheck, over 2 processes"
  "${processes[@]}" 2 -x SWITCHYARD_TEST_MPI_SIZE=2 \
    compute-sanitizer --tool memcheck --error-exitcode 1 "$binaries/tests/switchyard_device_tests" \
    --gtest_brief=1 --gtest_filter='*CudaLayerTest*Ranks*' >"$results/memcheck-processes.txt" 2>&1 ||
    { tail -n 40 "$results/memcheck-processes.txt"; return 1; }
  tail -n 2 "$results/memcheck-processes.txt"
}

run_bench() {
  local shape count tokens
  for shape in "${shapes[@]}"; do
    say "$shape"
    bench_layer "$shape" --ranks 1 | tee "$results/bench-$shape.txt"
  done
  for count in "${ranks[@]}"; do
    say "${shapes[0]} over $count ranks"
    bench_layer "${shapes[0]}" --ranks "$count" | tee "$results/bench-ranks-$count.txt"
  done
  for tokens in "${dispatched_tokens[@]}"; do
    say "dispatch and combine over 8 ranks of $tokens tokens"
    bench_dispatch "$tokens" --ranks 8 | tee "$results/bench-dispatch-$tokens.txt"
  done
  ! has_mpi || under_mps bench_processes
}

bench_processes() {
  local count tokens
  for count in "${ranks[@]}"; do
    say "${shapes[0]} over $count processes"
    bench_layer "${shapes[0]}" --comm mpi "${processes[@]}" "$count" |
      tee "$results/bench-processes-$count.txt"
  done
  for tokens in "${dispatched_tokens[@]}"; do
    say "dispatch and combine over 8 processes of $tokens tokens"
    bench_dispatch "$tokens" --comm mpi "${processes[@]}" 8 |
      tee "$results/bench-dispatch-processes-$tokens.txt"
  done
}

# bench_layer SHAPE OPTION VALUE [LAUNCHER...]: OPTION sets the number of ranks or how they are
# connected.
bench_layer() {
  "${@:4}" "$binaries/cli/switchyard" bench layer --device cuda --dtype bf16 --sizing bounded \
    --shape "$1" "$2" "$3"
}

# bench_dispatch TOKENS_A_RANK OPTION VALUE [LAUNCHER...]
bench_dispatch() {
  "${@:4}" "$binaries/cli/switchyard" bench dispatch --device cuda --dtype bf16 \
    --shape "$((8 * $1)),7168,256,8" "$2" "$3"
}

has_torch() {
  python3 -c 'import torch' 2>/dev/null || { echo "python3 has no torch here: left out"; return 1; }
}

run_python() {
  has_torch || return 0
  say "The Python package, with $(python3 -c 'import torch; print("torch", torch.__version__)')"
  export SWITCHYARD_LIBRARY=$root/$binaries/lib/libswitchyard.so PYTHONPATH=$root/python
  python3 -m pytest -q tests/python --ignore=tests/python/test_package.py
  under_mps bench_torch_ranks
  python3 bench/gpu_torch.py --library "$binaries/bench/libswitchyard_gpu_compare.so" \
    --json "$results/torch.json" | tee "$results/torch.txt"
}

# Benchmarks a Qwen3-MoE block over 4 processes against one.
bench_torch_ranks() {
  timeout 180 torchrun --nproc-per-node 4 bench/gpu_torch_ranks.py \
    --json "$results/torch-ranks.json" | tee "$results/torch-ranks.txt"
}

run_bits() {
  has_torch || return 0
  say "The bits of whole layers"
  python3 bench/gpu_compare.py --library "$binaries/bench/libswitchyard_gpu_compare.so" \
    --only bits --json "$results/bits.json" | tee "$results/bits.txt"
}

run_alternate() {
  has_torch || return 0
  local old=${SWITCHYARD_GPU_OLD:?is not set to the folder of the old sources} folder
  for folder in "$old" .; do
    say "Building $folder"
    (
      cd "$folder"
      configure
      cmake --build "$binaries" --target switchyard_gpu_compare
    )
  done
  local library=$binaries/bench/libswitchyard_gpu_compare.so
  say "$old and this folder in turns: forward+backward"
  python3 bench/gpu_alternate.py "$old/$library" "$library" | tee "$results/alternate.txt"
  say "$old and this folder in turns: forward of few tokens"
  python3 bench/gpu_alternate.py --forward --shapes "$few_tokens" "$old/$library" "$library" |
    tee "$results/alternate-few.txt"
}

run_compare() {
  has_torch || return 0
  say "Beside torch"
  python3 bench/gpu_compare.py --library "$binaries/bench/libswitchyard_gpu_compare.so" \
    --json "$results/compare.json" | tee "$results/compare.txt"
  python3 bench/gpu_chart.py "$results/compare.json" "$results/compare.svg"
  echo "drawn: $results/compare.svg"
}

say_verified() {
  if [ "$(kernel_sum)" = "$(cat bench/gpu-verified)" ]; then
    echo "This CUDA code has run on a GPU with all tests green."
  else
    echo "This CUDA code is not what ran last: run scripts/gpu.sh build test on a GPU." >&2
    return 1
  fi
}

[ "${1:-}" = verified ] && { say_verified; exit; }
mkdir -p "$results"
[ "${1:-}" = headers ] && { collect_headers; exit; }
[ $# -gt 0 ] || set -- build test bits bench compare python
for step in "$@"; do "run_$step"; done
say "In short"
for step in verify-best verify-portable memcheck racecheck; do
  [ -f "$results/$step.txt" ] && tail -n 6 "$results/$step.txt"
done
[ ! -f "$results/compare.txt" ] ||
  grep -E '^\|( [^|]*\|){2} (layer|switchyard) ' "$results/compare.txt" || true
for shape in "${shapes[@]}"; do
  [ -f "$results/bench-$shape.txt" ] || continue
  printf '%-12s ' "$shape"
  grep -E '^forward\+backward' "$results/bench-$shape.txt"
done
# Prints the line of a step, or of dispatch and combine, and the next one: the same as a graph.
sum_up() {
  local file=$1 line=$2 name=$3
  [ -f "$results/$file.txt" ] || return 0
  grep -A 1 -E "^$line" "$results/$file.txt" | sed "s/^/$name: /"
}
for count in "${ranks[@]}"; do
  sum_up "bench-ranks-$count" 'forward\+backward' "${shapes[0]} over $count ranks"
  sum_up "bench-processes-$count" 'forward\+backward' "${shapes[0]} over $count processes"
done
for tokens in "${dispatched_tokens[@]}"; do
  sum_up "bench-dispatch-$tokens" 'dispatch\+combine' "8 ranks of $tokens tokens"
  sum_up "bench-dispatch-processes-$tokens" 'dispatch\+combine' "8 processes of $tokens tokens"
done
