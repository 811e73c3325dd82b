#!/usr/bin/env bash
# From training to a canary, each step a gate: what the workflow "release" does, on one machine.
#
#   deploy/pipeline.sh [FOLDER]      # build/pipeline by default; `make pipeline` runs it
#
# FOLDER/released is what is in production. The first time it is filled with the model as it was trained.
# What was trained and compressed for the same inputs is not made again.
set -euo pipefail
cd "$(dirname "$0")/.."
FOLDER=${1:-build/pipeline}
PATH="$PWD/.venv/bin:$PATH"
HOOKS=examples/digits/hooks.py
MAX_DROP=${MAX_DROP:-3}                    # points of accuracy that compression may cost, with 95% confidence
MAX_REGRESSION=${MAX_REGRESSION:-50%}      # how much slower a candidate may be under load; machines of a CI are noisy
LIVE_RATE=${LIVE_RATE:-150}                # requests a second while the canary is judged
mkdir -p "$FOLDER"
running=()

stop_all() {
  for pid in "${running[@]}"; do kill "$pid" 2>/dev/null || true; done
  wait
}
trap stop_all EXIT

step() { printf '\n== %s\n' "$*"; }

free_port() { python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

# up REPOSITORY [FLAGS]: serves it; its address is in $URL.
up() {
  local port repository=$1
  shift
  port=$(free_port)
  URL=http://127.0.0.1:$port
  serve up "$repository" --port "$port" --triton-http-port 0 --triton-grpc-port 0 --triton-metrics-port 0 "$@" \
    > "$FOLDER/serve-$port.log" 2>&1 &
  running+=($!)
  for _ in $(seq 240); do
    if python -c "import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=1)" "$URL/readyz" 2>/dev/null; then return; fi
    if ! kill -0 "${running[-1]}" 2>/dev/null; then break; fi
    sleep 0.5
  done
  cat "$FOLDER/serve-$port.log"
  echo "the server did not start" >&2
  exit 1
}

step "train"
[ -f "$FOLDER/model.pt" ] || python examples/digits/train.py "$FOLDER"
# One half chooses, the other proves; the artifact's accuracy is of the samples that the server is asked later.
python - "$FOLDER" <<'END'
import sys
from pathlib import Path

import numpy as np

folder = Path(sys.argv[1])
with np.load(folder / "eval.npz") as data:
    for first, name in enumerate(("selection", "proof")):
        np.savez(folder / f"{name}.npz", **{key: data[key][first::2] for key in data.files})
END

step "compress, within a budget of $MAX_DROP points"
compress export "$FOLDER/model.pt" --prune 0.7 --finetune train.npz --int8 static --calibration calibration.npz \
  --selection selection.npz --eval proof.npz --max-drop "$MAX_DROP" -o "$FOLDER/artifact"

if [ ! -d "$FOLDER/released" ]; then
  step "nothing is in production yet: release the model as it was trained"
  compress export "$FOLDER/model.pt" --eval proof.npz -o "$FOLDER/original"
  serve pack "$FOLDER/original" --repository "$FOLDER/released" --name digits --hooks "$HOOKS"
fi

step "pack the candidate, and look it over"
rm -rf "$FOLDER/candidate"
serve pack "$FOLDER/artifact" --repository "$FOLDER/candidate" --name digits --hooks "$HOOKS"
serve lint "$FOLDER/candidate"
serve check "$FOLDER/candidate"
serve deploy gate "$FOLDER/candidate" --model digits --max-drop "$MAX_DROP"

# Now, and served as signed: a Triton that reads the folder itself writes byte code into it, which nobody can sign.
step "sign it"
key=$FOLDER/signing-key.pem
[ -f "$key" ] || (umask 077 && openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$key")
openssl pkey -in "$key" -pubout -out "$FOLDER/public.pem"
serve sign "$FOLDER/candidate" --key "$key"

step "end to end: the embedded Triton answers as the artifact did"
up "$FOLDER/candidate" --public-key "$FOLDER/public.pem"
candidate=$URL
python examples/digits/images.py "$FOLDER/proof.npz" "$FOLDER/images"
serve verify digits --eval "$FOLDER/images" --artifact "$FOLDER/artifact" --output label --tolerance 0 \
  --url "$candidate"

step "under load, beside what is in production"
up "$FOLDER/released"
serve load compare --ab "$URL" "$candidate" --model digits --concurrency 8 --rounds 5 --duration 1.5 --warmup 0.5 \
  --max-regression "$MAX_REGRESSION" --output "$FOLDER/compare.json" "$FOLDER/compare.html"
stop_all
running=()

step "push: what was tried is still what was signed; render its manifests"
serve check "$FOLDER/candidate" --public-key "$FOLDER/public.pem"
serve deploy render "$FOLDER/candidate" -o "$FOLDER/kubernetes" --max-drop "$MAX_DROP" --signed-by signer \
  --gateway-image "${GATEWAY_IMAGE:-registry.example/gateway:0.1.0}" --image "${TRITON_IMAGE:-registry.example/triton:26.07-hooks}"

step "canary: on live traffic, the candidate takes over or is rolled back"
rm -rf "$FOLDER/production"
cp -r "$FOLDER/released" "$FOLDER/production"
serve pack "$FOLDER/artifact" --repository "$FOLDER/production" --name digits_next --hooks "$HOOKS"
state=$FOLDER/rollouts.db
rm -f "$state"*
SERVE_GATEWAY_STATE=$state up "$FOLDER/production"
serve load "$URL" --model digits --rate "$LIVE_RATE" --duration 600 > "$FOLDER/live.log" 2>&1 &
running+=($!)
serve rollout start digits --candidate digits_next --state "$state" --shadow 50 --steps 25 --steps 50 --step-s 2 --wait
stop_all
running=()

step "released"
rm -rf "$FOLDER/released"
cp -r "$FOLDER/candidate" "$FOLDER/released"
echo "$FOLDER/released is what is in production now"
