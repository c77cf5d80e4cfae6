# shellcheck shell=bash
# What the three run_qwen3_7b_openclaw_*.sh share: the flags of slime, in groups to edit. A script
# that sources it changes or adds to a group, then calls `launch METHOD FLAGS...`.
#
# Not here, because it is computed (`DRY_RUN=1` shows it): the model's arguments from its
# config.json, the division of the GPUs, the engines of PRM, judge and teacher, our hooks.

# shellcheck disable=SC2034  # the arrays are used by the scripts
set -euo pipefail

OPENCLAW_RL_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="${PYTHON:-python3}"
CKPT_SAVE_DIR="${CKPT_SAVE_DIR:-${DATA_PATH:-}/checkpoints}"

CKPT_ARGS=(
   --hf-checkpoint "${MODEL_PATH:-}"
   --ref-load "${MODEL_PATH:-}"      # also where training starts; a Hugging Face folder will do
   --load "$CKPT_SAVE_DIR"           # goes on from here once there is a checkpoint
   --save "$CKPT_SAVE_DIR"
   --save-interval 20
)

ROLLOUT_ARGS=(
   --num-rollout 1000000             # until stopped
   --rollout-batch-size 16           # turns in a batch
   --n-samples-per-prompt 1
   --num-steps-per-rollout 1
   --rollout-temperature 1.0         # turns sampled at another one are served, not trained
   --rollout-max-response-len 8192   # where the client names no limit
   --rollout-max-context-len 32768
   --disable-rollout-global-dataset  # turns come from the journal
)

PERF_ARGS=(
   --tensor-model-parallel-size "${TENSOR_PARALLEL:-4}"
   --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1

   --recompute-granularity full
   --recompute-method uniform
   --recompute-num-layers 1

   --use-dynamic-batch-size
   --max-tokens-per-gpu 16384        # a longer session gets a micro-batch of its own
   --log-probs-chunk-size 1024
)

OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 1e-5
   --lr-decay-style constant
   --weight-decay 0.1
   --adam-beta1 0.9
   --adam-beta2 0.98
)

SGLANG_ARGS=(
   --sglang-mem-fraction-static 0.8
   --sglang-context-length 32768
   # --router-policy consistent_hashing  # slime's own build of the router: a session stays with
   #                                     # one engine; the default looks for the longest prefix
)

MISC_ARGS=(
   --attention-dropout 0.0           # Megatron's default is 0.1
   --hidden-dropout 0.0
   --accumulate-allreduce-grads-in-fp32
   --attention-softmax-in-fp32
   --attention-backend flash
   --use-fault-tolerance             # an engine that dies is started again
)

# W&B by environment only: WANDB_API_KEY (or WANDB_MODE=offline), WANDB_PROJECT, WANDB_GROUP.
WANDB_ARGS=()
if [[ -n "${WANDB_API_KEY:-}" || "${WANDB_MODE:-}" == offline ]]; then
   WANDB_ARGS=(
      --use-wandb
      --wandb-project "${WANDB_PROJECT:-openclaw-rl}"
      --wandb-group "${WANDB_GROUP:-$(basename -- "$0" .sh)}"
   )
fi

# A model that openclaw_rl/slime/model_args.py does not know: MODEL_ARGS_FILE names a script that
# sets MODEL_ARGS, such as those in slime's scripts/models/.
MODEL_ARGS=()
if [[ -n "${MODEL_ARGS_FILE:-}" ]]; then
   # shellcheck source=/dev/null
   source "$MODEL_ARGS_FILE"
fi

# launch METHOD FLAGS...: check, divide the GPUs, write slime's files and become slime's train script,
# which starts a Ray of its own or uses that of RAY_ADDRESS. See `python -m openclaw_rl.slime.launch --help`.
launch() {
   local method="$1"
   shift
   # As published; the 2 of `openclaw-rl up` was chosen on an adapter of a small model.
   export W_OPD="${W_OPD:-1}"
   export PYTHONPATH="$OPENCLAW_RL_DIR${PYTHONPATH:+:$PYTHONPATH}"
   local said
   if ! said="$("$PYTHON" -c 'import openclaw_rl.slime.launch' 2>&1)"; then
      echo "openclaw-rl: PYTHON=$PYTHON cannot run this project (${said##*$'\n'}): name another" \
         "PYTHON, or install into that one: '$PYTHON' -m pip install -e '$OPENCLAW_RL_DIR'" >&2
      exit 2
   fi
   exec "$PYTHON" -m openclaw_rl.slime.launch --method "$method" -- \
      ${MODEL_ARGS[@]+"${MODEL_ARGS[@]}"} "$@"
}
