"""Child of `test_real_slime.py`: slime's own argument parsing on what the scripts print.

Reads a list of argument lists on stdin, prints one JSON object a list on stdout. The only thing
that is stood in for is Megatron's question for the compute capability of the GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from typing import Any

PARSED: list[argparse.ArgumentParser] = []


def record() -> None:
    """Note every parser that is used."""
    real = argparse.ArgumentParser.parse_known_args

    def parse(self: argparse.ArgumentParser, *given: Any) -> Any:
        PARSED.append(self)
        return real(self, *given)

    argparse.ArgumentParser.parse_known_args = parse  # type: ignore[method-assign,assignment]


def look(words: list[str]) -> dict[str, Any]:
    import megatron.training.arguments as megatron
    from slime.backends.megatron_utils.hf_to_megatron import supports_hf_weight_loading
    from slime.backends.sglang_utils.sglang_config import SglangConfig
    from slime.utils.arguments import parse_args
    from slime.utils.misc import load_function

    megatron.get_device_arch_version = lambda: 9
    PARSED.clear()
    sys.argv = ["train_async.py", *words]
    args = parse_args()
    options = {name for parser in PARSED for name in parser._option_string_actions}
    names = {action.dest for parser in PARSED for action in parser._actions}
    given = [word.partition("=")[0] for word in words if word.startswith("--")]
    with open(args.custom_config_path, encoding="utf-8") as file:
        import yaml

        ours = yaml.safe_load(file)
    engines = SglangConfig.from_yaml(args.sglang_config)
    for model in engines.models:
        model.resolve(args)
    paths = [
        args.rollout_function_path,
        args.eval_function_path,
        args.custom_convert_samples_to_train_data_path,
        args.custom_advantage_function_path,
        args.custom_loss_function_path,
    ]
    return {
        "flags": len(given),
        "unknown": [flag for flag in given if flag not in options],
        "overridden": sorted(set(ours) & names),
        "told": {name: getattr(args, name) == value for name, value in ours.items()},
        "engine_gpus": engines.total_num_gpus - args.rollout_num_gpus,
        "updated": [model.name for model in engines.models if model.update_weights],
        "not_callable": [path for path in paths if not callable(load_function(path))],
        "loads_weights": supports_hf_weight_loading(args.hf_checkpoint),
        "starts_from": args.load,
        "batch": args.global_batch_size,
    }


def main() -> None:
    record()
    for words in json.load(sys.stdin):
        with contextlib.redirect_stdout(sys.stderr):
            found = look(words)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
