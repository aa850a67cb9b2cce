"""The names that other tools have for our keys: who types one is told what it is here.

python -m hpctrain experiment=digits accumulate_grad_batches=4   did you mean train.accumulate?
python -m hpctrain --help gradient_clip_val                        the lines of train.clip_norm

docs/migrate.md has whole tables, and says what has no key here.
"""

# Of Lightning, of Hugging Face's Trainer, and of others.
_OTHERS = {
    "checkpoint.best": "save_top_k load_best_model_at_end metric_for_best_model",
    "checkpoint.every_steps": "save_steps",
    "checkpoint.init_from": "pretrained",
    "checkpoint.keep": "save_total_limit",
    "data.buckets.field": "group_by_length",
    "data.shuffle": "shuffle",
    "data.subset": "limit_train_batches overfit_batches",
    "data.tail": "dataloader_drop_last",
    "data.threads": "dataloader_num_workers num_workers",
    "data.val_split": "limit_val_batches",
    "debug=fast": "fast_dev_run num_sanity_val_steps",
    "hooks": "callbacks",
    "launch.nodes": "num_nodes",
    "launch.tasks_per_node": "devices",
    "launch.time_min": "max_time",
    "name": "run_name",
    "optimizer": "optim",
    "optimizer.lr": "learning_rate",
    "optimizer.options": "adam_beta1 adam_beta2 adam_epsilon",
    "output_dir": "default_root_dir",
    "parallel": "strategy",
    "parallel.ddp.find_unused_parameters": "ddp_find_unused_parameters",
    "parallel.device": "accelerator",
    "precision.compute": "bf16 fp16",
    "scheduler.kind": "lr_scheduler_type",
    "scheduler.warmup_epochs": "warmup_ratio",
    "seed": "seed_everything",
    "task.label_smoothing": "label_smoothing_factor",
    "tracking.also": "report_to",
    "train.accumulate": "accumulate_grad_batches gradient_accumulation_steps",
    "train.activation_checkpointing": "gradient_checkpointing",
    "train.clip_norm": "gradient_clip_val max_grad_norm",
    "train.compile": "torch_compile",
    "train.deterministic": "full_determinism",
    "train.eval_every": "check_val_every_n_epoch val_check_interval eval_steps",
    "train.global_batch_size": "batch_size",
    "train.log_every": "log_every_n_steps logging_steps",
    "train.max_epochs": "num_train_epochs epochs",
    "train.micro_batch_size": "auto_find_batch_size per_device_train_batch_size",
    "train.profile": "profiler",
}
OTHER_NAMES = {name: ours for ours, names in _OTHERS.items() for name in names.split()}
