#!/usr/bin/env bash
# Binary RL on slime: a PRM reads what followed each turn and votes -1, 0 or 1; clipped policy
# gradient (openclaw_rl.losses.grpo_loss).
#
#   MODEL_PATH=/models/Qwen3-8B DATA_PATH=/data/agent SLIME_DIR=/src/slime MEGATRON_DIR=/src/Megatron-LM \
#      bash run_qwen3_7b_openclaw_rl.sh [more flags of slime]
#
# DRY_RUN=1 shows everything and starts nothing. Also by environment: PRM_MODEL_PATH (default: the
# base model), PRM_URL (instead of an engine here), PRM_M, NUM_GPUS, ACTOR_GPUS, ROLLOUT_GPUS,
# PRM_GPUS, CKPT_SAVE_DIR, HOST, PORT, OPENCLAW_RL_API_KEY, ...; all of them: docs/slime.md.
source "$(dirname -- "${BASH_SOURCE[0]}")/scripts/slime_common.sh"

RL_ARGS=(
   --loss-type custom_loss
   --custom-loss-function-path "${CUSTOM_LOSS_FUNCTION_PATH:-openclaw_rl.losses.grpo_loss}"
   --custom-rm-path "${CUSTOM_RM_PATH:-openclaw_rl.rewards.prm.custom_rm}"

   --advantage-estimator grpo
   --eps-clip 0.2
   --eps-clip-high 0.28
   --entropy-coef 0.00
   # --use-kl-loss
   # --kl-loss-coef 0.01
   # --kl-loss-type low_var_kl
)

launch rl \
   "${CKPT_ARGS[@]}" \
   "${ROLLOUT_ARGS[@]}" \
   "${PERF_ARGS[@]}" \
   "${RL_ARGS[@]}" \
   "${OPTIMIZER_ARGS[@]}" \
   "${SGLANG_ARGS[@]}" \
   ${WANDB_ARGS[@]+"${WANDB_ARGS[@]}"} \
   "${MISC_ARGS[@]}" \
   "$@"
