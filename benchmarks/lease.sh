#!/usr/bin/env bash
# What a few minutes on a lent accelerator are for: faults first, then figures, each part under a time limit.
#
#   benchmarks/lease.sh faults steps                  # these parts, about four minutes on one H100
#   WHEELS=wheels OUT=out benchmarks/lease.sh weights # a bare machine without network: packages from a folder of wheels
#   benchmarks/lease.sh --smoke                       # every part, tiny, on the CPU
#
# The output of a part goes into OUT/PART.txt, the rows of all figures into one OUT/step-*.jsonl. A second run with the same
# OUT goes on with what is missing.
set -u
cd "$(dirname "$0")/.."
out=${OUT:-runs/lease}
python=${PYTHON:-python3}
mkdir -p "$out"

export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error
export TORCHINDUCTOR_COMPILE_THREADS=4 # of each process, and the tests are nine
if [ -n "${WHEELS:-}" ]; then
    packages=$(mktemp -d)
    "$python" -m pip install --quiet --no-index --no-deps --target "$packages" "$WHEELS"/*.whl || exit
    export PYTHONPATH=$PYTHONPATH:$packages
fi

device=cuda tests=() smoke=() few=4 layers=16 short=32768 long=131072
if [ "${1:-}" = --smoke ]; then
    shift
    device=cpu tests=(--parts "steps, peers") smoke=(--device cpu --smoke) few=2 layers=4 short=256 long=512
fi
parts=${*:-faults gradients gradients-full steps chunks weights long}

part() { # NAME SECONDS COMMAND...
    local name=$1 seconds=$2 start=$SECONDS code=0
    shift 2
    [[ " $parts " == *" $name "* ]] || return 0
    timeout "$seconds" "$@" >"$out/$name.txt" 2>&1 || code=$?
    echo "$name: exit code $code after $((SECONDS - start)) s" | tee -a "$out/$name.txt"
}

figures() { # NAME SECONDS ARGUMENTS...
    local name=$1 seconds=$2
    shift 2
    part "$name" "$seconds" "$python" benchmarks/step.py "${smoke[@]}" --out "$out" --rounds 1 "$@"
}

# What tells right from wrong runs side by side, timings run alone.
part faults 115 "$python" tests/on_device.py --device "$device" --seconds 105 --out "$out/faults" "${tests[@]}" &
{
    figures gradients 80 --minutes 1.2 --parts gradients --layers "$few" --tokens "$short" --train lora \
        --methods seqtile+chunk seqtile+chunk+segment4 seqtile seqtile+attention-saved+offload-weights liger
    figures gradients-full 40 --minutes 0.6 --parts gradients --tokens "$short" --train full --methods liger seqtile
} &
wait
figures steps 160 --minutes 2.3 --quick --parts steps machine loss
figures chunks 130 --minutes 2 --parts steps --layers 4 --tokens "$short" "$long" --train lora \
    --methods seqtile+chunk seqtile+chunk+segment4 seqtile seqtile+attention-saved+offload
figures weights 110 --minutes 1.6 --parts steps --layers "$layers" --tokens "$short" --train lora \
    --methods seqtile+attention-saved seqtile+attention-saved+weights
figures long 60 --minutes 0.8 --parts steps --tokens "$long" --train lora --methods seqtile+attention-saved+offload liger

for name in $parts; do
    printf '\n== %s ==\n' "$name"
    # Of the tests a line a part and each failure, of the figures the tables.
    grep -E '^\||^Steps|gradient_error|FAILED|ERROR|parts|exit code|[0-9] (passed|failed)' "$out/$name.txt"
done
