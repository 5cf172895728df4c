"""Hints for who types nanoGPT's commands and options."""

RECIPE = "leave it out, train's recipe decides"
# nanoGPT's words that are none of the command's, and what to type instead.
WORDS = {
    **dict.fromkeys(("sample", "sample.py"), "part4 --inference"),
    **{f"{name}.py": name for name in ("train", "prepare", "bench")},
    "--start": "--prompt TEXT or --prompt-file FILE, with --inference",
    "--out_dir": "-m DIRECTORY with --inference, --out DIRECTORY of train",
    "--init_from": "-m MODEL with --inference; --init MODEL or --resume of train",
    "--max_iters": "--minutes or --steps of train",
    "--batch_size": "--batch-chars of train, batch size times block size",
    "--block_size": "--block-size of train; a model keeps its own",
    "--dataset": "--corpus FILE of train and eval",
    "--dtype": "--weights and --kv-cache with --inference; train takes float32",
    "--compile": "leave it out, kernels are always compiled",
    **dict.fromkeys(("--eval_iters", "--eval_interval", "--log_interval"), "leave it out, train decides"),
    **dict.fromkeys(("--wandb_log", "--wandb_project", "--wandb_run_name", "--backend"), "leave it out"),
    "--eval_only": "eval, a command",
    "config/": "options of train, config files are not read",
    **dict.fromkeys(("--n_layer", "--n_head", "--n_embd", "--dropout"), "a number, an option of train"),
    **dict.fromkeys(("--bias", "--learning_rate", "--min_lr", "--decay_lr", "--warmup_iters"), RECIPE),
    **dict.fromkeys(("--beta1", "--beta2", "--weight_decay", "--grad_clip", "--lr_decay_iters"), RECIPE),
    "--gradient_accumulation_steps": "--batch-chars of train, all characters of a step",
}


def hint(word_type: str, word: str) -> str:
    """What to type for an unknown option or command that is one of nanoGPT's words; else ''."""
    theirs = f"--{word[2:].replace('-', '_')}" if word_type == "option" else word
    known = WORDS.get(theirs)
    return f"No such {word_type} {theirs!r}, which is nanoGPT's; here: {known}" if known else ""
