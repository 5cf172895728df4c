"""The command of each part. With --inference it writes text; without, it runs the lab's test."""

from __future__ import annotations

import click

from app.cli import lab, writing
from app.cli.options import (
    EngineOptions,
    TextOptions,
    all_of,
    device_option,
    dtype_option,
    engine_option,
    kv_cache_option,
    on_command_line,
    refuse_options_of_the_other_device,
    set_threads,
    simd_option,
    step_option,
    take,
    take_sampling,
    threads_option,
    tile_options,
    weights_option,
)
from attention_ext import PARTS
from attention_ext.parts import running_on, with_gradient

BOTH_MODES = {"br", "bc", "threads", "simd", "inference", "device", "step"}
TEST_ONLY = {"batch", "heads", "N", "d", "causal", "dtype", "backward"}
NOT_BACKWARD = {"br", "bc", "device", "step", "dtype"}
WITH_CUDA = running_on("cuda")
WITH_STEPS = tuple(name for name in WITH_CUDA if PARTS[name].operator)

part_options = all_of(
    lab.shape_options,
    tile_options(shown=f"{lab.LAB_TILE} in the test, auto in --inference"),
    threads_option,
    simd_option,
    device_option,
    step_option,
    lab.causal_option,
    lab.backward_option,
    dtype_option,
    click.option("--inference", is_flag=True, help="Write text instead of running the test."),
    writing.text_options,
    engine_option,
    weights_option,
    kv_cache_option,
    writing.output_options,
)


def command_of(part: str) -> click.Command:
    """The command of one row of PARTS."""

    @click.command(part, short_help=f"Test {part} against PyTorch and profile it.")
    @part_options
    @click.pass_context
    def command(given: click.Context, /, **options) -> None:
        refuse_options_of_the_other_mode(given)
        refuse_what_the_part_has_not(part, given)
        refuse_options_of_the_other_device()
        backward = options.pop("backward")
        for side in ("br", "bc"):
            auto = options["inference"] or options["device"] == "cuda"
            size = options[side] or ("auto" if auto else lab.LAB_TILE)
            options[side] = None if size == "auto" else size
        threads = options["threads"]
        if options["inference"]:
            options["sampling"] = take_sampling(options)
            engine, texts = take(EngineOptions, options), take(TextOptions, options)
            writing.write(part, threads, engine, texts, options["as_json"], options["interactive"])
        elif backward:
            set_threads(threads)
            names = TEST_ONLY - NOT_BACKWARD - {"backward"} | {"simd"}
            lab.run_backward_test(part, **{name: options[name] for name in names})
        else:
            set_threads(threads)
            names = {"br", "bc", "simd", "device", "step", *TEST_ONLY} - {"backward"}
            lab.run_test(part, **{name: options[name] for name in names})

    command.help = (
        f"Test {part} ({PARTS[part].summary}) against PyTorch and profile it, "
        "or write text with it (--inference)."
    )
    return command


def refuse_options_of_the_other_mode(context: click.Context) -> None:
    """Raise UsageError for an option that would be ignored."""
    for option in context.command.params:
        name = str(option.name)
        if not on_command_line(context, name):
            continue
        if context.params["inference"] and name in TEST_ONLY:
            raise click.UsageError(f"{option.opts[0]} does not go with --inference")
        if context.params["backward"] and name in NOT_BACKWARD:
            raise click.UsageError(f"{option.opts[0]} does not go with --backward")
        if context.params["interactive"] and name in ("num_samples", "as_json"):
            raise click.UsageError(f"{option.opts[0]} does not go with --interactive")
        if not context.params["inference"] and name not in TEST_ONLY | BOTH_MODES:
            raise click.UsageError(f"{option.opts[0]} goes with --inference only")


def refuse_what_the_part_has_not(part: str, context: click.Context) -> None:
    """Raise UsageError for a device, a step or a gradient that the part lacks."""
    if context.params["backward"] and part not in with_gradient():
        who = " and ".join(with_gradient())
        raise click.UsageError(f"{part} computes no gradients; --backward goes with {who} only")
    if context.params["step"] and part not in WITH_STEPS:
        raise click.UsageError(f"--step goes with {' and '.join(WITH_STEPS)} only")
    if context.params["device"] == "cuda" and part not in WITH_CUDA:
        raise click.UsageError(
            f"{part} has no CUDA kernel; --device cuda goes with {' and '.join(WITH_CUDA)} only"
        )


COMMANDS = tuple(command_of(part) for part in PARTS)
