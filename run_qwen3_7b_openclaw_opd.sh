#!/usr/bin/env bash
# On-policy distillation on slime: a judge turns what followed each turn into a hint, a teacher with
# the hint in view says how likely each sampled token is (openclaw_rl.losses.opd_loss).
#
#   MODEL_PATH=/models/Qwen3-8B DATA_PATH=/data/agent SLIME_DIR=/src/slime MEGATRON_DIR=/src/Megatron-LM \
#      bash run_qwen3_7b_openclaw_opd.sh [more flags of slime]
#
# DRY_RUN=1 shows everything and starts nothing. Also by environment: JUDGE_MODEL_PATH (default: the
# base model), JUDGE_URL (instead of an engine here), TEACHER (base, policy, or a folder), NUM_GPUS,
# ACTOR_GPUS, ROLLOUT_GPUS, JUDGE_GPUS, TEACHER_GPUS, W_OPD, ...; all of them: docs/slime.md.
# OPD_TOP_K=4 with CUSTOM_LOSS_FUNCTION_PATH=openclaw_rl.losses.topk_opd_loss distils over the
# likeliest tokens instead of the sampled one.
source "$(dirname -- "${BASH_SOURCE[0]}")/scripts/slime_common.sh"

OPD_ARGS=(
   --loss-type custom_loss
   --custom-loss-function-path "${CUSTOM_LOSS_FUNCTION_PATH:-openclaw_rl.losses.opd_loss}"
   --custom-rm-path "${CUSTOM_RM_PATH:-openclaw_rl.rewards.hindsight.custom_rm}"

   --advantage-estimator grpo
   --eps-clip 0.2
   --eps-clip-high 0.28
   --entropy-coef 0.00
   # --use-kl-loss
   # --kl-loss-coef 0.01
   # --kl-loss-type low_var_kl
)

launch opd \
   "${CKPT_ARGS[@]}" \
   "${ROLLOUT_ARGS[@]}" \
   "${PERF_ARGS[@]}" \
   "${OPD_ARGS[@]}" \
   "${OPTIMIZER_ARGS[@]}" \
   "${SGLANG_ARGS[@]}" \
   ${WANDB_ARGS[@]+"${WANDB_ARGS[@]}"} \
   "${MISC_ARGS[@]}" \
   "$@"
