"""`args`: the namespace that hooks receive, with slime's attribute names.

Under slime the hooks get slime's own namespace (and our extra settings by
`--custom-config-path`); the embedded host, the judge and the tests build the same names here.
"""

from __future__ import annotations

from argparse import Namespace

from openclaw_rl.settings import Config


def hook_args(config: Config) -> Namespace:
    """Return slime's view of `config`."""
    judge, train, rollout, engine = config.judge, config.train, config.rollout, config.engine
    return Namespace(
        # model and places
        hf_checkpoint=config.model.path,
        dtype=config.model.dtype,
        device=train.device or config.model.device,
        served_name=config.served_name,
        context_length=config.gateway.context_length or None,
        journal_path=str(config.journal_path),
        save=str(config.checkpoint_dir),
        keep_checkpoints=train.keep_checkpoints,
        host_name="local",
        # engine
        engine_url=engine.url.rstrip("/") or None,
        engine_kind=engine.kind if engine.url else "embedded",
        engine_api_key=engine.api_key or None,
        adapter_dir=engine.adapter_dir or None,
        adapter_dir_at_engine=engine.adapter_dir_at_engine or None,
        engine_port=engine.port,
        engine_max_streams=engine.max_streams,
        engine_kv_tokens=engine.kv_tokens or None,
        engine_threads=engine.threads or None,
        # judge
        custom_rm_path=config.reward_path,
        reward_key=judge.reward_key or None,
        prm_url=judge.prm_url or None,
        prm_model=judge.prm_model or None,
        prm_api_key=judge.prm_api_key or None,
        prm_model_path=judge.prm_model_path or None,
        prm_m=judge.prm_m,
        prm_temperature=judge.temperature,
        judge_url=judge.judge_url or None,
        judge_model=judge.judge_model or None,
        judge_api_key=judge.judge_api_key or None,
        judge_model_path=judge.judge_model_path or None,
        judge_temperature=judge.temperature,
        judge_timeout=judge.timeout_seconds,
        judge_concurrency=judge.concurrency,
        min_hint_chars=judge.min_hint_chars,
        teacher_url=judge.teacher_url or None,
        teacher_api_key=judge.teacher_api_key or None,
        # rollout
        rollout_function_path=rollout.function_path,
        rollout_batch_size=rollout.batch_size,
        n_samples_per_prompt=1,
        rollout_temperature=config.gateway.temperature,
        session_share=rollout.session_share,
        max_staleness=rollout.max_staleness,
        max_sample_tokens=rollout.max_sample_tokens or None,
        num_rollout=train.num_rollout or None,
        # loss
        loss_type="custom_loss",
        custom_loss_function_path=config.loss_path,
        custom_advantage_function_path=train.custom_advantage_function_path or None,
        custom_convert_samples_to_train_data_path=(
            train.custom_convert_samples_to_train_data_path or None
        ),
        # The weight of a signal that the method does not use is 0, so that judge and loss agree.
        w_rl=train.w_rl if train.method != "opd" else 0.0,
        w_opd=train.w_opd if train.method != "rl" else 0.0,
        opd_clip=train.opd_clip or None,
        opd_top_k=train.opd_top_k,
        opd_subset=train.opd_subset,
        opd_tail=train.opd_tail,
        opd_hints=train.opd_hints,
        opd_hint_choice=train.opd_hint_choice,
        opd_baseline=train.opd_baseline,
        use_tis=_tis_clip(config) > 0,
        tis_clip=_tis_clip(config) or None,
        eps_clip=train.eps_clip,
        eps_clip_high=train.eps_clip_high,
        use_kl_loss=train.kl_loss_coef > 0,
        kl_loss_coef=train.kl_loss_coef,
        kl_loss_type="low_var_kl",
        entropy_coef=train.entropy_coef,
        # optimiser
        lr=train.lr,
        adam_beta1=0.9,
        adam_beta2=0.98,
        weight_decay=train.weight_decay,
        clip_grad=train.clip_grad,
        max_grad_norm_skip=train.max_grad_norm_skip,
        max_logprob_diff=train.max_logprob_diff,
        num_steps_per_rollout=train.num_steps_per_rollout,
        loss_chunk_tokens=train.loss_chunk_tokens,
        lora_rank=train.lora_rank,
        lora_alpha=train.lora_alpha,
        max_tokens_per_gpu=train.max_tokens_per_gpu or None,
        gradient_checkpointing=train.gradient_checkpointing,
        train_threads=train.threads or None,
        seed=train.seed,
    )


def _tis_clip(config: Config) -> float:
    """An engine of another make computes other log-probs than the trainer does."""
    if config.train.tis_clip < 0:
        return 2.0 if config.engine.url else 0.0
    return config.train.tis_clip
