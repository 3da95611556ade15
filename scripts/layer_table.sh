#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Prints a table of the layer's speed by ranks, threads and dtypes, beside the matrix library's own.
# usage: scripts/layer_table.sh [PATH OF switchyard] [SHAPE…]
set -euo pipefail
switchyard=${1:-build/release/cli/switchyard}
shift || true
shapes=("$@")
[[ ${#shapes[@]} -gt 0 ]] || shapes=(small fine)
cores=$(nproc)

field() { sed -E "s/.*\"$2\":([0-9.eE+-]+).*/\1/" <<<"$1"; }
percent() { awk -v x="$(field "$1" "$2")" 'BEGIN { print 100 * x }'; }

printf '| shape | type | threads in all | ranks | ms forward | ms forward+backward | GFLOP/s | ceiling | of ceiling | outside GEMM |\n'
printf '|---|---|---|---|---|---|---|---|---|---|\n'
for shape in "${shapes[@]}"; do
  for dtype in f32 bf16; do
    for threads in 1 2 4 16; do
      [[ $threads -le $cores ]] || continue
      [[ $threads -ne 2 || $cores -le 2 ]] || continue
      for ranks in 1 2 4; do
        [[ $ranks -le $threads ]] || continue
        json=$("$switchyard" bench layer --shape "$shape" --dtype "$dtype" --ranks "$ranks" \
          --threads $((threads / ranks)) --repeat "${REPEAT:-5}" --json)
        printf '| %s | %s | %d | %d | %.2f | %.2f | %.0f | %.0f | %.0f%% | %.1f%% |\n' "$shape" "$dtype" \
          "$threads" "$ranks" "$(field "$json" ms_forward)" "$(field "$json" ms_forward_backward)" \
          "$(field "$json" gflops_forward_backward)" "$(field "$json" ceiling_gflops)" \
          "$(percent "$json" fraction_of_ceiling)" \
          "$(percent "$json" fraction_outside_gemm)"
      done
    done
  done
done
