#!/usr/bin/env bash
# Every figure that needs a GPU, in one run: GPU tests, then speed with the GPU to itself, then accuracy on CIFAR-10.
#
#     benchmarks/on_gpu.sh /data/cifar10                  # all of it
#     PARTS="tests speed" benchmarks/on_gpu.sh            # tests speed compiled accuracy
#     EPOCHS=30 NETWORKS="resnet50" PARTS=accuracy benchmarks/on_gpu.sh /data/cifar10
#
# Peers are on PYTHONPATH where they are to be compared with (benchmarks/peers.py). One log for each step in LOGS; a
# step that fails does not stop the others, and the exit status says that there was one.
set -uo pipefail
cd "$(dirname "$0")/.."
data="${1:-}" python="${PYTHON:-python3}" logs="${LOGS:-runs/on_gpu}" epochs="${EPOCHS:-30}"
mkdir -p "$logs"
rm -f "$logs/failed"

step() { # name of the log, command
  local name="$1" begin=$SECONDS
  shift
  "$@" > "$logs/$name.log" 2>&1 || echo "$name" >> "$logs/failed"
  echo "$name: $((SECONDS - begin)) s"
}

accuracy() { # network, configuration
  local run="runs/on_gpu/$1" qat=$(((epochs + 9) / 10))
  local common=(--config "configs/$2.yaml" --data-dir "$data" --qat.epochs "$qat")
  step "accuracy_$1" "$python" benchmarks/accuracy.py "${common[@]}" --output_dir "$run" \
    --float_train.epochs "$epochs" --quant.rounding.steps 300
  step "peers_$1" "$python" benchmarks/peers_accuracy.py "${common[@]}" --output_dir "$run/peers" \
    --model.checkpoint "$run/float/best.pt"
}

for part in ${PARTS:-tests speed compiled accuracy}; do
  case "$part" in
    tests)
      step tests "$python" -m pytest -q -m gpu --continue-on-collection-errors ;;
    speed)
      step calibration "$python" benchmarks/calibration.py
      step kernels "$python" benchmarks/fake_quant_kernels.py
      for network in resnet50 efficientnet_b0 bert; do
        step "step_$network" "$python" benchmarks/qat_step.py --networks "$network"
      done ;;
    compiled)
      step compiled_ways "$python" benchmarks/compiled_ways.py ;;
    accuracy)
      : "${data:?the folder of CIFAR-10 comes first}"
      for network in ${NETWORKS:-mobilenet_v2 efficientnet_b0 resnet50}; do
        accuracy "$network" "cifar10_${network%_b0}" &
      done
      wait ;;
    *)
      echo "there is no part '$part'" >&2
      exit 2 ;;
  esac
done
[ ! -f "$logs/failed" ] || { echo "failed: $(tr '\n' ' ' < "$logs/failed")" >&2; exit 1; }
