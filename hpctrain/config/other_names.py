"""The names that other tools have for our keys: who types one is told what it is here.

python -m hpctrain experiment=digits accumulate_grad_batches=4   did you mean train.accumulate?
python -m hpctrain keys gradient_clip_val                        the lines of train.clip_norm

docs/migrate.md has whole tables, and says what has no key here.
"""

OTHER_NAMES = {
    # Lightning
    "accelerator": "parallel.device",
    "accumulate_grad_batches": "train.accumulate",
    "callbacks": "hooks",
    "check_val_every_n_epoch": "train.eval_every",
    "default_root_dir": "output_dir",
    "devices": "launch.tasks_per_node",
    "fast_dev_run": "debug=fast",
    "gradient_clip_val": "train.clip_norm",
    "limit_train_batches": "data.subset",
    "limit_val_batches": "data.val_split",
    "log_every_n_steps": "train.log_every",
    "max_time": "launch.time_min",
    "num_nodes": "launch.nodes",
    "num_sanity_val_steps": "debug=fast",
    "overfit_batches": "data.subset",
    "profiler": "train.profile",
    "save_top_k": "checkpoint.best",
    "seed_everything": "seed",
    "strategy": "parallel",
    "val_check_interval": "train.eval_every",
    # Hugging Face's Trainer
    "adam_beta1": "optimizer.options",
    "adam_beta2": "optimizer.options",
    "adam_epsilon": "optimizer.options",
    "auto_find_batch_size": "train.micro_batch_size",
    "bf16": "precision.compute",
    "dataloader_drop_last": "data.tail",
    "dataloader_num_workers": "data.threads",
    "ddp_find_unused_parameters": "parallel.ddp.find_unused_parameters",
    "eval_steps": "train.eval_every",
    "fp16": "precision.compute",
    "full_determinism": "train.deterministic",
    "gradient_accumulation_steps": "train.accumulate",
    "gradient_checkpointing": "train.activation_checkpointing",
    "group_by_length": "data.buckets.field",
    "label_smoothing_factor": "task.label_smoothing",
    "learning_rate": "optimizer.lr",
    "load_best_model_at_end": "checkpoint.best",
    "logging_steps": "train.log_every",
    "lr_scheduler_type": "scheduler.kind",
    "max_grad_norm": "train.clip_norm",
    "metric_for_best_model": "checkpoint.best",
    "num_train_epochs": "train.max_epochs",
    "optim": "optimizer",
    "per_device_train_batch_size": "train.micro_batch_size",
    "report_to": "tracking.also",
    "run_name": "name",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep",
    "torch_compile": "train.compile",
    "warmup_ratio": "scheduler.warmup_epochs",
    # torch and others
    "batch_size": "train.global_batch_size",
    "epochs": "train.max_epochs",
    "num_workers": "data.threads",
    "pretrained": "checkpoint.init_from",
    "shuffle": "data.shuffle",
}
