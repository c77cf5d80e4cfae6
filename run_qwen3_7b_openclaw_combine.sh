#!/usr/bin/env bash
# Both signals in one sample on slime: W_RL times the reward plus W_OPD times the distillation term,
# each only where it exists (openclaw_rl.losses.combined_loss).
#
#   MODEL_PATH=/models/Qwen3-8B DATA_PATH=/data/agent SLIME_DIR=/src/slime MEGATRON_DIR=/src/Megatron-LM \
#      bash run_qwen3_7b_openclaw_combine.sh [more flags of slime]
#
# DRY_RUN=1 shows everything and starts nothing. Also by environment: W_RL, W_OPD, OPD_TOP_K,
# PRM_MODEL_PATH and JUDGE_MODEL_PATH (default: the base model; one engine serves both where they
# are the same), PRM_URL, JUDGE_URL, TEACHER, NUM_GPUS, ACTOR_GPUS, ROLLOUT_GPUS, PRM_GPUS,
# JUDGE_GPUS, TEACHER_GPUS, ...; all of them: docs/slime.md.
source "$(dirname -- "${BASH_SOURCE[0]}")/scripts/slime_common.sh"

COMBINE_ARGS=(
   --loss-type custom_loss
   --custom-loss-function-path "${CUSTOM_LOSS_FUNCTION_PATH:-openclaw_rl.losses.combined_loss}"
   --custom-rm-path "${CUSTOM_RM_PATH:-openclaw_rl.rewards.combined.custom_rm}"

   --advantage-estimator grpo
   --eps-clip 0.2
   --eps-clip-high 0.28
   --entropy-coef 0.00
   # --use-kl-loss
   # --kl-loss-coef 0.01
   # --kl-loss-type low_var_kl
)

launch combined \
   "${CKPT_ARGS[@]}" \
   "${ROLLOUT_ARGS[@]}" \
   "${PERF_ARGS[@]}" \
   "${COMBINE_ARGS[@]}" \
   "${OPTIMIZER_ARGS[@]}" \
   "${SGLANG_ARGS[@]}" \
   ${WANDB_ARGS[@]+"${WANDB_ARGS[@]}"} \
   "${MISC_ARGS[@]}" \
   "$@"
